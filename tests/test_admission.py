from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.admission import DRAIN_WINDOW, Admission
from roseinfer.errors import InputError, SchedulerManagerOverloadedError
from roseinfer.ticket import Ticket, TicketState
from tests.scripted import computed

COST = 10


def refused(admission: Admission, now: float = 0.0) -> SchedulerManagerOverloadedError:
    with pytest.raises(SchedulerManagerOverloadedError) as caught:
        admission.reserve(now, COST)
    return caught.value


@pytest.mark.parametrize("limit", [0, -1, 1.0, "16", True])
def test_only_none_and_positive_whole_numbers_are_limits(limit: Any) -> None:  # case A10
    with pytest.raises(InputError) as caught:
        Admission(limit)
    assert isinstance(caught.value, ValueError)
    assert caught.value.name == "max_inflight_requests"


def test_no_limit_refuses_nobody() -> None:  # case A10
    admission = Admission(None)
    for i in range(10_000):
        assert admission.reserve(0.0, COST).inflight_before == i


@pytest.mark.parametrize("limit", [1, 2, 16])
def test_exactly_the_limit_fits(limit: int) -> None:
    admission = Admission(limit)
    for _ in range(limit):
        admission.reserve(0.0, COST)
    assert refused(admission).inflight == limit
    assert admission.inflight == limit


def test_a_refusal_touches_nothing_but_its_own_counter() -> None:
    admission = Admission(1)
    admission.reserve(1.0, COST)
    before = admission.counts()
    refused(admission, 5.0)
    assert admission.counts() == before._replace(refused=1)


def test_the_refusal_tells_limit_and_depth_apart() -> None:  # case A6
    # The depth cannot differ from a limit that it just met, so the limit is lowered under it.
    admission = Admission(16)
    for _ in range(16):
        admission.reserve(0.0, COST)
    admission.limit = 10
    error = refused(admission)
    assert (error.limit, error.inflight) == (10, 16)
    assert "16 in flight" in str(error)
    assert "limit 10" in str(error)
    assert error.reason == "inflight"


def test_a_ticket_knows_what_it_met() -> None:
    admission = Admission(None)
    first = admission.reserve(0.0, COST)
    assert [admission.reserve(0.0, COST).inflight_before for _ in range(2)] == [1, 2]
    admission.release(first, 0.0)
    assert admission.reserve(0.0, COST).inflight_before == 2


def test_a_slot_comes_back_once_however_often_it_is_released() -> None:  # case A3
    admission = Admission(2)
    ticket = admission.reserve(1.0, COST)
    admission.reserve(1.0, COST)
    assert admission.release(ticket, 2.0)
    after = admission.counts()
    assert not admission.release(ticket, 3.0)
    assert admission.counts() == after
    assert (admission.inflight, ticket.released_s) == (1, 2.0)


def test_the_peak_is_the_largest_depth_that_was() -> None:
    admission = Admission(None)
    tickets = [admission.reserve(0.0, COST) for _ in range(3)]
    for ticket in tickets:
        admission.release(ticket, 1.0)
    admission.reserve(2.0, COST)
    assert admission.counts().peak_inflight == 3


def test_the_bytes_of_a_text_give_way_to_its_true_tokens() -> None:
    admission = Admission(None)
    ticket = admission.reserve(0.0, 100)
    admission.reserve(0.0, 7)
    admission.adjust(ticket, 30, 0.0)
    assert admission.counts().backlog_tokens == 37


def test_computed_tokens_leave_the_backlog() -> None:
    admission = Admission(None)
    ticket = admission.reserve(0.0, 30)
    admission.start(ticket)
    admission.progress([computed(ticket, 12)])
    admission.progress([computed(ticket, 1)])
    assert admission.counts().backlog_tokens == 17
    admission.release(ticket, 1.0)
    assert admission.counts().backlog_tokens == 0


def test_a_request_starts_once_and_only_while_it_holds_its_slot() -> None:
    admission = Admission(None)
    ticket, gone = admission.reserve(0.0, COST), admission.reserve(0.0, COST)
    assert admission.start(ticket)
    assert ticket.state is TicketState.STARTED
    assert not admission.start(ticket)
    admission.release(gone, 1.0)
    assert not admission.start(gone)
    assert gone.state is TicketState.RELEASED


def test_nothing_changes_the_backlog_after_the_release() -> None:
    admission = Admission(None)
    ticket = admission.reserve(0.0, COST)
    admission.start(ticket)
    admission.release(ticket, 1.0)
    admission.adjust(ticket, 1000, 0.0)
    admission.progress([computed(ticket, 5)])
    assert admission.counts().backlog_tokens == 0


# What may happen to a random ticket: its time step, which ticket, and what is done.
actions = st.lists(
    st.tuples(
        st.sampled_from([-0.25, 0.0, 0.5, 3.0]),
        st.integers(0, 20),
        st.sampled_from(["reserve", "adjust", "start", "progress", "release"]),
        st.integers(0, 50),
    ),
    max_size=80,
)


@given(actions, st.sampled_from([None, 1, 4]))
def test_the_account_balances_after_anything_in_any_order(
    steps: list[tuple[float, int, str, int]], limit: int | None
) -> None:  # case A3
    admission = Admission(limit)
    tickets: list[Ticket] = []
    now = 100.0
    n_refused = 0
    for dt, which, action, tokens in steps:
        now += dt  # callers read their clocks before they queue for the lock: time may step back a little
        if action == "reserve":
            try:
                tickets.append(admission.reserve(now, tokens))
            except SchedulerManagerOverloadedError:
                n_refused += 1
        elif tickets:
            ticket = tickets[which % len(tickets)]
            match action:
                case "adjust" if ticket.state is TicketState.RESERVED:
                    admission.adjust(ticket, tokens, 0.0)
                case "start":
                    admission.start(ticket)
                case "progress":
                    admission.progress([computed(ticket, tokens)])
                case "release":
                    admission.release(ticket, now)
        held = [ticket for ticket in tickets if ticket.state is not TicketState.RELEASED]
        counts = admission.counts()
        assert counts.inflight == len(held) == admission.inflight
        assert limit is None or counts.inflight <= limit
        assert counts.backlog_tokens == sum(ticket.cost_tokens for ticket in held)
        assert all(ticket.cost_tokens >= 0 for ticket in tickets)
        assert (counts.reserved, counts.released) == (len(tickets), len(tickets) - len(held))
        assert counts.refused == n_refused
    for ticket in tickets:
        admission.release(ticket, now)
    spans = [ticket.released_s - ticket.reserved_s for ticket in tickets if ticket.released_s is not None]
    assert len(spans) == len(tickets)
    assert admission.counts().inflight_integral_s == pytest.approx(sum(spans), abs=1e-6)
    assert admission.counts().backlog_tokens == 0


def test_the_integral_needs_no_tickets() -> None:
    """One request from 10 to 14, a second from 12 to 13: 5 request seconds."""
    admission = Admission(None)
    first = admission.reserve(10.0, COST)
    second = admission.reserve(12.0, COST)
    admission.release(second, 13.0)
    admission.release(first, 14.0)
    admission.reserve(100.0, COST)  # the empty time before counts nothing
    assert admission.counts().inflight_integral_s == 5.0


def test_a_clock_reading_that_came_late_to_the_lock_spoils_no_account() -> None:
    admission = Admission(None)
    first = admission.reserve(10.0, COST)
    second = admission.reserve(9.5, COST)  # read before the first, entered after it
    admission.release(first, 12.0)
    admission.release(second, 11.5)
    assert admission.counts().inflight_integral_s == 4.0


def test_retry_after_is_unknown_until_slots_have_come_free() -> None:
    admission = Admission(1)
    ticket = admission.reserve(0.0, COST)
    assert refused(admission).retry_after_s is None
    admission.release(ticket, 1.0)
    admission.reserve(1.0, COST)
    assert refused(admission).retry_after_s is None  # one release has no rate


def test_retry_after_is_the_mean_gap_of_the_last_releases() -> None:
    admission = Admission(1)
    now = 0.0
    for gap in [100.0] * 3 + [2.0] * DRAIN_WINDOW:  # the slow ones have left the window
        ticket = admission.reserve(now, COST)
        now += gap
        admission.release(ticket, now)
    admission.reserve(now, COST)
    assert refused(admission).retry_after_s == pytest.approx(2.0)


def test_retry_after_is_unknown_when_all_slots_came_free_at_once() -> None:
    admission = Admission(2)
    for ticket in [admission.reserve(0.0, COST) for _ in range(2)]:
        admission.release(ticket, 3.0)
    for _ in range(2):
        admission.reserve(3.0, COST)
    assert refused(admission, 3.001).retry_after_s is None


def test_retry_after_counts_no_time_in_which_nobody_held_a_slot() -> None:
    admission = Admission(4)
    for burst_s in (0.0, 600.0):
        tickets = [admission.reserve(burst_s, COST) for _ in range(4)]
        for n, ticket in enumerate(tickets, 1):
            admission.release(ticket, burst_s + 0.1 * n)
    for _ in range(4):
        admission.reserve(1200.0, COST)
    assert refused(admission, 1200.0).retry_after_s == pytest.approx(0.1)


def test_retry_after_is_at_least_the_time_since_the_last_release() -> None:
    admission = Admission(2)
    first, second = (admission.reserve(0.0, COST) for _ in range(2))
    admission.release(first, 1.0)
    third = admission.reserve(1.0, COST)
    admission.release(second, 2.0)
    admission.reserve(2.0, COST)
    assert refused(admission, 2.5).retry_after_s == pytest.approx(1.0)
    assert refused(admission, 9.0).retry_after_s == pytest.approx(7.0)
    admission.release(third, 9.0)
    admission.reserve(9.0, COST)
    assert refused(admission, 9.0).retry_after_s == pytest.approx(4.0)


def test_many_threads_get_exactly_the_limit() -> None:  # case A2, the counter alone
    for _ in range(50):
        admission = Admission(8)
        barrier = threading.Barrier(16)
        got: list[Ticket] = []

        def ask(
            admission: Admission = admission, barrier: threading.Barrier = barrier, got: list[Ticket] = got
        ) -> None:
            barrier.wait()
            for _ in range(4):
                try:
                    got.append(admission.reserve(0.0, COST))
                except SchedulerManagerOverloadedError:
                    pass

        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = admission.counts()
        assert (len(got), counts.refused, counts.peak_inflight) == (8, 56, 8)


@pytest.mark.timeout(20)
def test_a_slot_may_come_back_from_within_a_reservation() -> None:
    """The garbage collector can close an abandoned stream at any allocation, in the thread that holds the lock."""

    class Reentering(Admission):
        victim: Ticket | None = None

        def _integrate(self, now: float) -> None:
            victim, self.victim = self.victim, None
            if victim is not None:
                self.release(victim, now)
            super()._integrate(now)

    admission = Reentering(4)
    tickets = [admission.reserve(0.0, COST) for _ in range(3)]
    admission.victim = tickets[0]
    admission.reserve(1.0, COST)
    assert admission.inflight == 3


def test_not_started_counts_those_that_no_step_has_worked_on() -> None:
    admission = Admission(None)
    running, waiting, leaving = (admission.reserve(0.0, 1) for _ in range(3))
    assert admission.not_started == 3
    admission.start(running)
    assert admission.not_started == 2
    admission.release(leaving, 1.0)
    admission.release(leaving, 1.0)
    assert admission.not_started == 1
    admission.release(running, 1.0)
    assert admission.not_started == 1
    admission.release(waiting, 1.0)
    assert admission.not_started == 0
