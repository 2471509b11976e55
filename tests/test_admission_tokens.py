"""A budget of tokens: what is in flight holds prompt + max_new_tokens, from its slot to its release."""

from __future__ import annotations

import copy
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.admission import DRAIN_WINDOW, Admission
from roseinfer.errors import InputError, SchedulerManagerOverloadedError
from roseinfer.ticket import Ticket, TicketState
from tests.scripted import computed


def refused(
    admission: Admission, tokens: int, *, now: float = 0.0, is_bound: bool = False
) -> SchedulerManagerOverloadedError:
    with pytest.raises(SchedulerManagerOverloadedError) as caught:
        admission.reserve(now, tokens, is_bound=is_bound)
    return caught.value


@pytest.mark.parametrize("limit", [0, -1, 1.0, "16", True])
def test_only_none_and_positive_whole_numbers_are_budgets(limit: int) -> None:  # case A10
    with pytest.raises(InputError):
        Admission(None, limit)


@pytest.mark.parametrize(("last", "gets_in"), [(29, True), (30, True), (31, False)])
def test_current_plus_new_may_reach_the_budget_and_not_exceed_it(last: int, gets_in: bool) -> None:  # case A7
    admission = Admission(None, 100)
    for tokens in (40, 30):
        admission.reserve(0.0, tokens)
    if gets_in:
        admission.reserve(0.0, last)
        assert admission.counts().held_tokens == 70 + last
    else:
        error = refused(admission, last)
        assert (error.reason, error.limit, error.measured, error.asked) == ("tokens", 100, 70, 31)


def test_ten_long_prompts_pass_a_count_and_not_a_budget() -> None:  # case A7
    count, budget = Admission(16), Admission(None, 250_000)
    for _ in range(10):
        count.reserve(0.0, 100_000)
    for _ in range(2):
        budget.reserve(0.0, 100_000)
    assert refused(budget, 100_000).reason == "tokens"
    budget.reserve(0.0, 50_000)  # whoever is small enough still gets in


def test_a_trace_by_hand() -> None:
    """Budget 10. What is held after each event, and who is refused."""
    admission = Admission(None, 10)
    first = admission.reserve(0.0, 6)
    second = admission.reserve(1.0, 4)
    assert admission.counts().held_tokens == 10
    assert refused(admission, 1, now=1.5).measured == 10
    admission.start(first)
    admission.progress([computed(first, 5)])
    assert refused(admission, 1, now=2.0).measured == 10  # what is computed is not given back before the slot
    admission.release(first, 3.0)
    third = admission.reserve(3.0, 6)
    assert admission.counts().held_tokens == 10
    for ticket in (second, third):
        admission.release(ticket, 4.0)
    counts = admission.counts()
    assert (counts.held_tokens, counts.peak_held_tokens, counts.reserved, counts.refused) == (0, 10, 3, 2)


def test_a_refusal_for_tokens_touches_nothing_but_its_own_counter() -> None:
    admission = Admission(None, 10)
    admission.reserve(1.0, 8)
    before = admission.counts()
    refused(admission, 3, now=5.0)
    refused(admission, 11, now=5.0)
    assert admission.counts() == before._replace(refused=2)


def test_a_release_gives_the_tokens_back_once() -> None:  # case A3
    admission = Admission(None, 10)
    ticket = admission.reserve(0.0, 4)
    admission.reserve(0.0, 5)
    assert admission.release(ticket, 1.0)
    assert not admission.release(ticket, 2.0)
    assert admission.counts().held_tokens == 5


def test_the_refusal_names_limit_held_asked_and_in_flight_apart() -> None:  # case A6
    admission = Admission(8, 100)
    for _ in range(3):
        admission.reserve(0.0, 25)
    error = refused(admission, 40)
    assert (error.reason, error.stage, error.limit, error.measured) == ("tokens", "submit", 100, 75)
    assert (error.asked, error.inflight, error.retry_after_s) == (40, 3, None)
    assert str(error) == "too many tokens in flight: 75 held, 40 more asked for, limit 100 (tokens)"
    assert vars(copy.copy(error)) == vars(error)


def test_of_two_limits_each_refuses_for_itself() -> None:
    admission = Admission(2, 100)
    admission.reserve(0.0, 90)
    assert refused(admission, 20).reason == "tokens"
    admission.reserve(0.0, 5)
    error = refused(admission, 5)  # tokens there are
    assert (error.reason, error.limit, error.measured, error.asked) == ("inflight", 2, 2, 1)


def test_what_alone_exceeds_the_budget_is_told_so_and_nothing_of_coming_back() -> None:
    admission = Admission(1, 100)
    for now in (1.0, 2.0, 3.0):
        admission.release(admission.reserve(now, 10), now + 0.5)
    admission.reserve(4.0, 10)
    error = refused(admission, 101)  # although the only slot is taken
    assert (error.reason, error.limit, error.asked) == ("tokens-never-fits", 100, 101)
    assert error.retry_after_s is None
    assert "asks for 101 tokens" in str(error)


def test_of_a_text_only_its_true_tokens_say_that_it_can_never_fit() -> None:
    admission = Admission(None, 100)
    small = admission.reserve(0.0, 1)
    error = refused(admission, 500, is_bound=True)
    assert (error.reason, error.asked) == ("tokens", 100)  # it may fit once nothing else is in flight
    admission.release(small, 1.0)
    text = admission.reserve(1.0, 500, is_bound=True)
    assert admission.counts().held_tokens == 100
    assert refused(admission, 1).reason == "tokens"
    admission.adjust(text, 60, 0.0)
    admission.reserve(2.0, 40)
    assert admission.counts().held_tokens == 100


def test_a_text_that_proves_too_long_is_refused_when_that_is_known() -> None:
    admission = Admission(None, 100)
    text = admission.reserve(0.0, 500, is_bound=True)
    with pytest.raises(SchedulerManagerOverloadedError) as caught:
        admission.adjust(text, 101, 0.0)
    assert (caught.value.reason, caught.value.stage, caught.value.asked) == (
        *("tokens-never-fits", "queued", 101),
    )
    assert text.state is TicketState.RESERVED  # whoever ends it gives its slot back
    admission.release(text, 1.0)
    assert admission.counts().held_tokens == 0


def test_a_tokenizer_that_makes_more_of_a_text_than_its_bound_does_not_break_the_budget() -> None:
    admission = Admission(None, 100)
    text = admission.reserve(0.0, 10, is_bound=True)
    admission.reserve(0.0, 80)
    admission.adjust(text, 20, 0.0)
    with pytest.raises(SchedulerManagerOverloadedError) as caught:
        admission.adjust(text, 21, 0.0)
    assert (caught.value.reason, caught.value.measured) == ("tokens", 80)
    assert admission.counts().held_tokens == admission.counts().peak_held_tokens == 100


def test_retry_after_is_the_time_in_which_the_missing_tokens_come_free() -> None:
    """The last releases freed 10 tokens every 2 s, and 15 are missing."""
    admission = Admission(None, 100)
    now = 0.0
    for gap, tokens in [(100.0, 90)] * 3 + [(2.0, 10)] * DRAIN_WINDOW:  # the former have left the window
        ticket = admission.reserve(now, tokens)
        now += gap
        admission.release(ticket, now)
    admission.reserve(now, 95)
    assert refused(admission, 20).retry_after_s == pytest.approx(3.0)


def test_retry_after_is_unknown_while_nothing_has_come_free() -> None:
    admission = Admission(None, 10)
    ticket = admission.reserve(0.0, 10)
    assert refused(admission, 1).retry_after_s is None
    admission.release(ticket, 1.0)
    admission.reserve(1.0, 10)
    assert refused(admission, 1).retry_after_s is None  # one release has no rate


# What may happen to a random ticket: its time step, which ticket, what is done, and how many tokens.
actions = st.lists(
    st.tuples(
        st.sampled_from([-0.25, 0.0, 0.5, 3.0]),
        st.integers(0, 20),
        st.sampled_from(["reserve", "reserve text", "adjust", "start", "progress", "release"]),
        st.integers(0, 50),
    ),
    max_size=80,
)


@given(actions, st.sampled_from([None, 1, 4]), st.sampled_from([None, 1, 30, 100]))
def test_never_above_the_budget_and_given_back_once_whatever_happens(
    steps: list[tuple[float, int, str, int]], limit: int | None, budget: int | None
) -> None:  # cases A3, A7
    admission = Admission(limit, budget)
    tickets: list[Ticket] = []
    holds: dict[int, int] = {}  # by the place of its ticket, what an account kept here says
    never_fits: list[tuple[str, bool]] = []  # reasons, and whether the request alone exceeds the budget
    now, peak, n_refused = 100.0, 0, 0
    for dt, which, action, tokens in steps:
        now += dt
        if action.startswith("reserve"):
            is_bound = action == "reserve text"
            asked = tokens if budget is None or not is_bound else min(tokens, budget)
            is_room = (limit is None or len(holds) < limit) and (
                budget is None or sum(holds.values()) + asked <= budget
            )
            try:
                ticket = admission.reserve(now, tokens, is_bound=is_bound)
            except SchedulerManagerOverloadedError as error:
                n_refused += 1
                never_fits.append((error.reason, budget is not None and asked > budget))
                assert not is_room
            else:
                assert is_room
                holds[len(tickets)] = asked
                tickets.append(ticket)
        elif tickets:
            place = which % len(tickets)
            ticket = tickets[place]
            match action:
                case "adjust" if ticket.state is TicketState.RESERVED:
                    is_room = budget is None or sum(holds.values()) - holds[place] + tokens <= budget
                    try:
                        admission.adjust(ticket, tokens, 0.0)
                    except SchedulerManagerOverloadedError:
                        assert not is_room
                    else:
                        assert is_room
                        holds[place] = tokens
                case "start":
                    admission.start(ticket)
                case "progress":
                    admission.progress([computed(ticket, tokens)])
                case "release":
                    assert admission.release(ticket, now) == (holds.pop(place, None) is not None)
        counts = admission.counts()
        peak = max(peak, counts.held_tokens)
        assert counts.held_tokens == sum(holds.values())
        assert counts.peak_held_tokens == peak
        assert budget is None or peak <= budget
        assert (counts.inflight, counts.refused) == (len(holds), n_refused)
        assert counts.backlog_tokens >= 0
    for ticket in tickets:
        admission.release(ticket, now)
    assert admission.counts().held_tokens == admission.counts().backlog_tokens == 0
    assert all((reason == "tokens-never-fits") == never for reason, never in never_fits)


def test_threads_that_race_for_the_last_tokens_never_get_more() -> None:  # case A2, with tokens
    for _ in range(50):
        admission = Admission(None, 100)
        barrier = threading.Barrier(16)
        got: list[Ticket] = []

        def ask(
            number: int,
            admission: Admission = admission,
            barrier: threading.Barrier = barrier,
            got: list[Ticket] = got,
        ) -> None:
            barrier.wait()
            for _ in range(4):
                try:
                    got.append(admission.reserve(0.0, 7 + number % 2))
                except SchedulerManagerOverloadedError:
                    pass

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = admission.counts()
        held = sum(ticket.held_tokens for ticket in got)
        assert held == counts.held_tokens == counts.peak_held_tokens <= 100
        assert held > 100 - 7  # nobody was refused who fitted
        assert len(got) + counts.refused == 64


@pytest.mark.timeout(20)
def test_tokens_may_come_back_from_within_a_reservation() -> None:
    """The garbage collector can close an abandoned stream at any allocation, in the thread that holds the lock."""

    class Reentering(Admission):
        victim: Ticket | None = None

        def _integrate(self, now: float) -> None:
            victim, self.victim = self.victim, None
            if victim is not None:
                self.release(victim, now)
            super()._integrate(now)

    admission = Reentering(None, 40)
    tickets = [admission.reserve(0.0, 10) for _ in range(3)]
    admission.victim = tickets[0]
    admission.reserve(1.0, 10)
    assert admission.counts().held_tokens == 30
