from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.errors import InputError, InvariantError, PromptTooLongError
from roseinfer.executor import StepPlan, StepResult
from roseinfer.request import FinishReason, Request, TokenEvent
from roseinfer.ticket import TicketState
from roseinfer.waiting import STALE_SLACK
from tests.scripted import EOS, CoreDriver

LETTER = 7  # a token that ends nothing


def planned(driver: CoreDriver) -> StepPlan:
    plan = driver.plan()
    assert plan is not None
    return plan


def read_all(driver: CoreDriver) -> None:
    for request in driver.requests:
        if request.finish_reason is not None:
            driver.core.acknowledge(request, driver.now)
    driver.core.check()


def assert_drained(driver: CoreDriver) -> None:
    """Nothing keyed by a request is left, and every slot and block is free."""
    core = driver.core
    core.expire(driver.now)
    assert len(core) == 0
    assert core.live_ids() == []
    assert not core.scheduler.waiting
    assert not core.scheduler.running
    assert not core.scheduler.kv_cache.owners()
    assert not core._unread
    counts = core.admission.counts()
    assert (counts.inflight, counts.backlog_tokens) == (0, 0)


# ---- tokens and ends ----


@pytest.mark.parametrize(
    ("eos_at", "tokens", "reason"),
    [
        (5, 5, FinishReason.STOP),
        (8, 8, FinishReason.STOP),
        (None, 8, FinishReason.LENGTH),
        (1, 1, FinishReason.STOP),
    ],
)
def test_the_ids_say_how_many_tokens_there_are_and_why_it_ended(
    eos_at: int | None, tokens: int, reason: FinishReason
) -> None:  # cases B12, B15
    driver = CoreDriver()
    request = driver.add(4, 8)
    n = 0
    while request.finish_reason is None:
        n += 1
        driver.step(lambda span, n=n: EOS if n == eos_at else LETTER)  # type: ignore[misc]
    assert len(request.output_ids) == len(request.token_times_s) == tokens
    assert request.finish_reason is reason
    assert [event.finish_reason for event in driver.events] == [None] * (tokens - 1) + [reason]
    assert all(event.token_id is not None for event in driver.events)
    assert driver.steps() == []


def test_eos_is_a_token_like_others_for_those_who_ignore_it() -> None:
    driver = CoreDriver()
    request = driver.add(4, 3, ignore_eos=True)
    driver.step(lambda span: EOS)
    driver.steps()
    assert (request.output_ids, request.finish_reason) == ([EOS, 1, 1], FinishReason.LENGTH)


def test_tokens_carry_the_end_of_their_step() -> None:
    driver = CoreDriver()
    request = driver.add(4, 3)
    driver.steps()
    assert request.token_times_s == [event.time_s for event in driver.events] == [1.0, 2.0, 3.0]
    stamps = request.first_scheduled_s, request.first_token_s, request.last_token_s, request.finished_s
    assert stamps == (0.0, 1.0, 3.0, 3.0)


def test_a_chunk_of_a_prompt_gives_no_token() -> None:
    driver = CoreDriver(budget=10)
    driver.add(25, 1)
    steps = driver.steps()
    assert len(steps) == 3
    assert [event.time_s for event in driver.events] == [3.0]


def test_an_ended_request_keeps_its_slot_until_it_is_read_and_its_kv_cache_not() -> None:
    driver = CoreDriver(limit=1)
    request = driver.add(4, 1)
    driver.steps()
    assert driver.core.admission.inflight == 1
    assert driver.core.scheduler.kv_cache.used_tokens == 0
    assert request.ticket.state is TicketState.STARTED
    driver.core.acknowledge(request, 9.0)
    driver.core.acknowledge(request, 10.0)
    assert request.ticket.released_s == 9.0
    assert_drained(driver)


def test_the_backlog_is_what_is_still_to_be_computed() -> None:
    driver = CoreDriver(budget=10)
    driver.add(25, 3)
    backlog = []
    while driver.step():
        backlog.append(driver.core.admission.counts().backlog_tokens)
    assert backlog == [18, 8, 3, 2, 1]  # the last token is sampled, never computed


def test_a_sampling_span_without_a_token_is_an_error() -> None:
    driver = CoreDriver()
    driver.add()
    with pytest.raises(InvariantError, match="gave no token"):
        driver.core.commit(planned(driver), StepResult([None], 0.0, 1.0), 1.0)


# ---- prompts that do not fit ----


def test_a_prompt_larger_than_the_kv_cache_is_refused_naming_the_bound() -> None:  # case A15
    core = CoreDriver(kv_tokens=256, max_model_len=1024).core
    with pytest.raises(PromptTooLongError, match="KV cache holds 256") as caught:
        core.check_fits(100, 400)
    assert (caught.value.bound, caught.value.bound_tokens) == ("KV cache", 256)
    core.check_fits(100, 156)
    with pytest.raises(PromptTooLongError):
        core.check_fits(100, 157)


def test_a_prompt_that_fills_the_context_fits_and_one_token_more_does_not() -> None:  # case A17
    core = CoreDriver(max_model_len=128).core
    core.check_fits(127, 1)
    with pytest.raises(PromptTooLongError, match="context holds 128"):
        core.check_fits(128, 1)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InputError, match="no token"):
        CoreDriver().core.check_fits(0, 1)


@pytest.mark.parametrize("tokens", [0, 126])
def test_a_text_that_turns_out_not_to_fit_ends_with_the_error(tokens: int) -> None:  # cases A15, A17
    driver = CoreDriver(max_model_len=128)
    request, other = driver.add(text=True), driver.add(4, 1)
    driver.now = 2.0
    driver.tokenized(request, tokens)
    (event,) = driver.events
    assert (event.request_id, event.finish_reason, event.token_id) == (0, FinishReason.ERROR, None)
    assert isinstance(event.error, InputError)
    assert (request.tokenized_s, request.finished_s) == (2.0, 2.0)
    assert driver.core.admission.inflight == 2
    driver.steps()
    assert other.finish_reason is FinishReason.LENGTH
    read_all(driver)
    assert_drained(driver)


def test_the_true_tokens_of_a_text_take_the_place_of_its_bytes() -> None:
    driver = CoreDriver()
    request = driver.add(100, 10, text=True)
    driver.tokenized(request, 25)
    assert driver.core.admission.counts().backlog_tokens == 35


def test_a_tokeniser_error_ends_its_request_alone() -> None:
    driver = CoreDriver()
    request, other = driver.add(text=True), driver.add(4, 1)
    error = RuntimeError("no such character")
    assert driver.took(driver.core.fail(request.request_id, error, 3.0)) == [
        TokenEvent(0, None, 3.0, FinishReason.ERROR, error)
    ]
    assert driver.took(driver.core.fail(request.request_id, error, 4.0)) == []
    driver.steps()
    assert other.finish_reason is FinishReason.LENGTH


def test_ids_that_come_after_the_end_of_their_request_are_dropped() -> None:
    driver = CoreDriver()
    request = driver.add(text=True)
    driver.abort(request)
    driver.tokenized(request, 4)
    assert driver.steps() == []
    assert_drained(driver)


# ---- aborts ----


@pytest.mark.parametrize("text", [True, False])
def test_aborting_a_waiting_request_frees_its_slot_at_once(text: bool) -> None:  # case B9
    driver = CoreDriver(limit=1)
    request = driver.add(text=text)
    driver.now = 5.0
    driver.abort(request)
    assert driver.events == [TokenEvent(0, None, 5.0, FinishReason.ABORT)]
    assert request.ticket.released_s == 5.0
    assert_drained(driver)


def test_a_request_in_a_running_step_is_dropped_when_the_step_is_committed() -> None:  # case B3
    driver = CoreDriver(limit=1)
    request = driver.add(4, 8)
    driver.step()
    plan = planned(driver)
    driver.now = 1.5
    driver.abort(request)
    driver.abort(request)  # once, however often
    assert request.ticket.state is TicketState.STARTED
    assert driver.core.scheduler.kv_cache.used_tokens == 16
    (event,) = driver.commit(plan)
    assert event == TokenEvent(0, None, 2.5, FinishReason.ABORT)
    assert request.output_ids == [1]  # the late token is nobody's
    assert request.ticket.released_s == 2.5
    assert_drained(driver)


def test_a_slot_that_an_abort_frees_is_free_from_the_commit_on_not_from_the_step_end() -> None:
    driver = CoreDriver()
    gone, here = driver.add(), driver.add()
    plan = planned(driver)
    driver.abort(gone)
    driver.core.commit(plan, StepResult([1, 1], 0.0, 1.0), 1.25)
    assert gone.ticket.released_s == 1.25
    assert here.first_token_s == 1.0  # tokens exist from the step's end on


def test_an_aborted_request_is_in_no_later_step() -> None:  # cases B6, B10
    """With the next step planned before the last is committed, else it would go on for ever."""
    driver = CoreDriver()
    request, other = driver.add(4, 8), driver.add(4, 8)
    first = planned(driver)
    driver.abort(request)
    second = planned(driver)
    assert [span.request for span in second.spans] == [other]
    driver.commit(first)
    assert request.finish_reason is FinishReason.ABORT
    driver.commit(second)
    assert other.output_ids == [1, 1]


def test_a_half_prefilled_request_that_is_aborted_makes_room() -> None:
    driver = CoreDriver(budget=10)
    long = driver.add(25)
    driver.add(4, 1)
    plan = planned(driver)
    driver.abort(long)
    assert driver.plan() is None
    driver.commit(plan)
    assert driver.step() == [(1, 0, 4)]


def test_abort_knows_no_request_that_has_ended() -> None:
    driver = CoreDriver()
    request = driver.add(4, 1)
    driver.steps()
    n_events = len(driver.events)
    driver.abort(request)
    driver.took(driver.core.abort(99, 0.0))
    assert len(driver.events) == n_events
    assert request.finish_reason is FinishReason.LENGTH


# ---- steps planned ahead ----


def test_with_steps_planned_ahead_tokens_neither_double_nor_get_lost() -> None:  # case B6
    plain, ahead = CoreDriver(budget=9), CoreDriver(budget=9)
    for driver in (plain, ahead):
        for n in (20, 3, 5):
            driver.add(n, 6)
    plain.steps()
    pending = [planned(ahead)]
    while pending:
        if (plan := ahead.plan()) is not None:
            pending.append(plan)
        ahead.commit(pending.pop(0))
    assert [r.output_ids for r in ahead.requests] == [r.output_ids for r in plain.requests] == [[1] * 6] * 3
    read_all(ahead)
    assert_drained(ahead)


def test_the_books_are_right_while_the_steps_of_an_aborted_request_come_in() -> None:  # case B6
    driver = CoreDriver()
    request = driver.add(4, 8)
    launched = [planned(driver) for _ in range(3)]
    driver.abort(request)
    for plan in launched:
        driver.commit(plan)
        driver.core.check()
    assert request.finish_reason is FinishReason.ABORT
    assert_drained(driver)


def test_a_late_token_of_a_request_that_met_its_eos_is_dropped() -> None:  # case B6
    driver = CoreDriver()
    request = driver.add(4, 8)
    first, second = planned(driver), planned(driver)
    driver.commit(first, lambda span: EOS)
    assert request.finish_reason is FinishReason.STOP
    assert driver.commit(second) == []
    assert request.output_ids == [EOS]
    read_all(driver)
    assert_drained(driver)


# ---- a step that raises ----


def failed(driver: CoreDriver, error: Exception) -> list[TokenEvent]:
    planned(driver)
    driver.now += 1
    return driver.took(driver.core.fail_step(error, driver.now))


def test_a_step_that_raises_ends_all_that_ran_and_nothing_else() -> None:  # case B16
    driver = CoreDriver(batch=8)
    for _ in range(12):
        driver.add(4, 2)
    driver.step()
    error = RuntimeError("device lost")
    assert failed(driver, error) == [
        TokenEvent(i, None, 2.0, FinishReason.ERROR, error) for i in range(8)
    ]  # each with the error
    driver.steps()
    assert [r.finish_reason for r in driver.requests[8:]] == [FinishReason.LENGTH] * 4
    read_all(driver)
    assert_drained(driver)


def test_a_request_that_was_aborted_in_a_step_that_raises_ends_as_aborted_and_frees_its_slot() -> None:
    driver = CoreDriver(limit=2)
    gone, here = driver.add(), driver.add()
    planned(driver)
    driver.abort(gone)
    driver.took(driver.core.fail_step(RuntimeError("x"), 1.0))
    assert (gone.finish_reason, here.finish_reason) == (FinishReason.ABORT, FinishReason.ERROR)
    assert driver.core.admission.inflight == 1  # the reader of the other has not seen the error


def test_a_chunk_that_raises_leaves_nobody_half_prefilled() -> None:
    driver = CoreDriver(budget=10)
    driver.add(25)
    driver.add(4, 1)
    failed(driver, RuntimeError("x"))
    assert driver.step() == [(1, 0, 4)]


# ---- streams that nobody reads ----


def test_an_unread_stream_keeps_its_slot_for_the_timeout_and_not_longer() -> None:
    driver = CoreDriver(unread_timeout_s=60.0)
    request = driver.add(4, 1)
    driver.steps()
    assert driver.core.next_due_s() == 61.0
    assert driver.core.expire(60.999) == []
    assert driver.core.expire(61.0) == [request]
    assert request.ticket.released_s == 61.0
    assert driver.core.next_due_s() is None
    assert_drained(driver)


def test_what_was_read_in_time_does_not_expire() -> None:
    driver = CoreDriver(unread_timeout_s=60.0)
    read, unread = driver.add(4, 1), driver.add(4, 2)
    driver.steps()
    driver.core.acknowledge(read, 1.5)
    assert driver.core.next_due_s() == 62.0
    assert driver.core.expire(100.0) == [unread]
    assert read.ticket.released_s == 1.5


def test_one_unread_stream_does_not_keep_those_read_after_it_in_memory() -> None:  # case A23
    driver = CoreDriver()
    driver.add(4, 1)
    driver.steps()
    for _ in range(500):
        request = driver.add(4, 1)
        driver.step()
        driver.core.acknowledge(request, driver.now)
    assert driver.core.expire(driver.requests[0].finished_s or 0.0) == []
    assert len(driver.core._unread) <= 2 * 2 + STALE_SLACK + 1


# ---- anything, in any order, with steps outstanding ----

scripts = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["add", "add text"]), st.integers(1, 30)),
        st.tuples(st.sampled_from(["tokenized", "tokenise fails", "abort", "read"]), st.integers(0, 20)),
        st.tuples(st.sampled_from(["launch", "commit", "commit", "raise", "wait"]), st.integers(0, 3)),
    ),
    max_size=60,
)


@given(scripts, st.integers(1, 3), st.sampled_from([64, 4096]), st.sampled_from([None, 3]))
def test_nothing_leaks_whatever_happens_in_whatever_order(
    script: list[tuple[str, int]], batch: int, kv_tokens: int, limit: int | None
) -> None:  # cases A3, A4, B3, B6, B9, B16
    driver = CoreDriver(batch=batch, budget=12, kv_tokens=kv_tokens, limit=limit, unread_timeout_s=5.0)
    core = driver.core
    texts: list[Request] = []
    launched: list[StepPlan] = []

    def token(request: Request) -> int:
        return (request.request_id + len(request.output_ids)) % 5  # now and then EOS

    for what, n in script:
        match what:
            case "add" | "add text" if limit is None or core.admission.inflight < limit:
                request = driver.add(n, 1 + n % 4, text=what == "add text")
                if what == "add text":
                    texts.append(request)
            case "tokenized" if texts:
                driver.tokenized(texts.pop(n % len(texts)), n)
            case "tokenise fails" if texts:
                request = texts.pop(n % len(texts))
                driver.took(core.fail(request.request_id, RuntimeError("x"), driver.now))
            case "abort" if driver.requests:
                driver.abort(driver.requests[n % len(driver.requests)])
            case "read" if driver.requests:
                request = driver.requests[n % len(driver.requests)]
                if request.finish_reason is not None:
                    core.acknowledge(request, driver.now)
            case "launch" if len(launched) < 2 and (plan := driver.plan()) is not None:
                launched.append(plan)
            case "commit" if launched:
                driver.commit(launched.pop(0), lambda span: token(span.request))
            case "raise" if launched:
                launched.pop(0)
                driver.took(core.fail_step(RuntimeError("x"), driver.now))
            case "wait":
                driver.now += n
                core.expire(driver.now)
        core.check()
    for request in texts:
        driver.tokenized(request, 3)
    while launched or (plan := driver.plan()) is not None:
        driver.commit(launched.pop(0) if launched else plan)  # type: ignore[arg-type]
    ends = [event.request_id for event in driver.events if event.finish_reason is not None]
    assert sorted(ends) == list(range(len(driver.requests)))  # one terminal event each
    tokens: dict[int, list[int]] = {request.request_id: [] for request in driver.requests}
    for event in driver.events:
        if event.token_id is not None:
            tokens[event.request_id].append(event.token_id)
    assert list(tokens.values()) == [request.output_ids for request in driver.requests]
    driver.now += 5.0
    assert_drained(driver)
    held = [request.ticket.released_s for request in driver.requests]
    assert all(released is not None for released in held)
    assert core.admission.counts().inflight_integral_s == pytest.approx(
        sum((request.ticket.released_s or 0.0) - request.reserved_s for request in driver.requests)
    )
