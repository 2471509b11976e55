"""The in-process target, through the real SchedulerManager, with an engine without a model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest

from roseinfer.admission import Admission
from roseinfer.bench.burst_report import burst_report
from roseinfer.bench.client import Client, Played
from roseinfer.bench.environment import GcPause
from roseinfer.bench.experiment import Experiment
from roseinfer.bench.records import REQUEST_SCHEMA, STEP_SCHEMA, TTFT_PARTS, derive
from roseinfer.bench.row_files import record_table
from roseinfer.bench.rows import Attempt, CellResult
from roseinfer.bench.target import LONGEST_PAUSES, InProcessTarget, _gc_notes
from roseinfer.bench.validity import check_cell
from roseinfer.bench.workload import Workload
from roseinfer.errors import RunError
from roseinfer.executor import Clock, StepPlan
from roseinfer.manager import SchedulerManager
from roseinfer.prompt import Prompt
from roseinfer.request import TokenEvent
from roseinfer.stream import Mailbox
from tests.bench.experiments import burst, cell_of, experiment, workload
from tests.scripted import ScriptedEngine, ScriptedTokenizer

ADMITTED_ONLY = [
    *("reserved_s", "admitted_s", "released_s", "tokenized_s", "first_scheduled_s", "first_token_s"),
    *("last_token_s", "finished_s", "received_first_s", "received_last_s", "prompt_tokens", "output_tokens"),
    *("cached_tokens", "finish_reason", "token_times_s", "chunk_times_s", "chunk_tokens"),
]
REFUSED_ONLY = ["rejected_s", "reject_reason", "reject_stage"]


@pytest.fixture(autouse=True)
def _slow_senders_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast a loaded machine sends is not what these tests ask."""
    monkeypatch.setattr("roseinfer.bench.pacing._BURST_SPREAD_S", 60.0)
    monkeypatch.setattr("roseinfer.bench.pacing._SEND_LAG_S", 60.0)


def run(
    n: int = 8, limit: int | None = None, engine: ScriptedEngine | None = None, **flags: Any
) -> tuple[CellResult, Experiment]:
    """A burst of `n` requests of 5 prompt and 2 output tokens, none of which is served before all are sent."""
    engine = ScriptedEngine() if engine is None else engine
    made = experiment(**({"max_inflight": str(limit or 0), "num_requests": n, "max_batch_size": 4} | flags))
    return measured(engine, made, burst(engine, n), limit), made


def measured(
    engine: ScriptedEngine, made: Experiment, load: Workload, limit: int | None = None
) -> CellResult:
    """The result of one cell, with its frames as a reader gets them from their files."""
    result = InProcessTarget(engine, made).run(cell_of(made, limit), load)
    requests: pd.DataFrame = record_table(result.requests, REQUEST_SCHEMA).to_pandas()
    steps: pd.DataFrame = record_table(result.steps, STEP_SCHEMA).to_pandas()
    return result._replace(requests=requests, steps=steps)


def dicts(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def failing_at(step: int) -> Callable[[ScriptedEngine], None]:
    """Makes the engine's n-th step raise, counted from 0."""

    def rig(engine: ScriptedEngine) -> None:
        compute, steps = engine.compute, iter(range(1 << 20))

        def fail(plan: StepPlan) -> None:
            compute(plan)
            if next(steps) == step:
                raise ValueError("scripted failure")

        engine.compute = fail

    return rig


def run_rigged(rig: Callable[[ScriptedEngine], None], n: int = 8, **flags: Any) -> CellResult:
    engine = ScriptedEngine()
    made = experiment(**({"num_requests": n, "max_batch_size": 4} | flags))
    load = burst(engine, n)
    rig(engine)
    return measured(engine, made, load)


@pytest.mark.parametrize("limit", [None, 3, 8, 9])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_offered_request_has_one_row_and_the_cell_is_valid(
    limit: int | None, workers: int
) -> None:  # case D8
    result, _ = run(8, limit, tokenize_workers=workers)
    assert result.requests["request_index"].tolist() == list(range(8))
    assert check_cell(derive(result.requests), result.facts) == []


def test_the_limit_refuses_what_is_over_it() -> None:  # case A2
    result, _ = run(8, limit=3)
    assert result.requests["outcome"].tolist() == ["completed"] * 3 + ["rejected"] * 5
    assert result.facts.peak_inflight == result.facts.limit == 3


def test_no_limit_refuses_nothing() -> None:  # case A10
    result, _ = run(8)
    assert (result.requests["outcome"] == "completed").all()
    assert result.facts.limit is None
    assert result.facts.peak_inflight == 8


def test_a_refused_row_has_the_columns_of_a_refusal_only() -> None:
    result, _ = run(8, limit=3)
    refused = result.requests[result.requests["outcome"] == "rejected"]
    assert refused[ADMITTED_ONLY].isna().all(axis=None)
    assert refused[REFUSED_ONLY].notna().all(axis=None)
    assert (refused["reject_stage"] == "submit").all()
    assert (refused["ended_s"] == refused["rejected_s"]).all()


def test_an_admitted_row_has_no_column_of_a_refusal() -> None:
    result, _ = run(8, limit=3)
    admitted = result.requests[result.requests["outcome"] == "completed"]
    assert admitted[ADMITTED_ONLY].notna().all(axis=None)
    assert admitted[REFUSED_ONLY].isna().all(axis=None)


@pytest.mark.parametrize("flags", [{"tokenize_workers": 0}, {"tokenize_workers": 2}])
def test_the_eight_parts_sum_to_the_time_to_first_token(flags: dict[str, Any]) -> None:
    result, _ = run(8, **flags)
    derived = derive(result.requests)
    assert derived[list(TTFT_PARTS)].notna().all(axis=None)
    assert derived[list(TTFT_PARTS)].sum(axis=1).to_numpy() == pytest.approx(
        derived["ttft_s"].to_numpy(), abs=1e-9
    )


def test_token_ids_are_not_tokenised() -> None:
    engine = ScriptedEngine()
    made = experiment(num_requests=4, pretok=True)
    derived = derive(measured(engine, made, burst(engine, 4, prompt=[1, 2, 3])).requests)
    assert derived["tokenized_s"].isna().all()
    assert (derived["prompt_tokens"] == 3).all()
    parts = derived[list(TTFT_PARTS)].sum(axis=1)
    assert parts.to_numpy() == pytest.approx(derived["ttft_s"].to_numpy(), abs=1e-9)


def test_slots_were_held_for_as_long_as_admission_counted() -> None:
    result, _ = run(8, limit=5)
    held_s = (result.requests["released_s"] - result.requests["reserved_s"]).sum()
    assert result.facts.inflight_integral_s == pytest.approx(held_s, abs=1e-9)


def test_what_a_request_met_is_its_place_in_the_burst() -> None:
    result, _ = run(6, limit=4)
    assert result.requests["inflight_at_send"].tolist() == [0, 1, 2, 3, 4, 4]


def test_token_and_chunk_times_agree() -> None:
    result, _ = run(8)
    for row in dicts(result.requests):
        assert len(row["token_times_s"]) == row["output_tokens"] == sum(row["chunk_tokens"]) == 2
        assert row["token_times_s"][0] == row["first_token_s"]
        assert row["token_times_s"][-1] == row["last_token_s"]
        assert row["chunk_times_s"][0] == row["received_first_s"]
        assert row["chunk_times_s"][-1] == row["received_last_s"]
        assert len(row["chunk_times_s"]) == len(row["chunk_tokens"])


def test_a_chunk_holds_what_one_delivery_brought(monkeypatch: pytest.MonkeyPatch) -> None:  # case E2
    engine = ScriptedEngine()
    taken = threading.Event()
    made = experiment(num_requests=1)
    load = burst(engine, 1, output_tokens=3)
    inner = engine.compute

    def compute(plan: StepPlan) -> None:
        inner(plan)
        if plan.spans[0].start == 5:  # the second step, the first decode: the first token was read by now
            assert taken.wait(30)

    engine.compute = compute
    original = Mailbox.take

    def take(self: Mailbox, timeout_s: float | None = None) -> list[TokenEvent]:
        events = original(self, timeout_s)
        if events:
            taken.set()
        return events

    monkeypatch.setattr(Mailbox, "take", take)
    (row,) = dicts(measured(engine, made, load).requests)
    assert row["chunk_tokens"][0] == 1
    assert sum(row["chunk_tokens"]) == 3


def test_the_steps_account_for_every_token() -> None:
    result, _ = run(
        8, max_num_batched_tokens=6
    )  # prompts of 5: some chunks are a single token, as decodes are
    steps = result.steps
    assert steps["step"].tolist() == list(range(len(steps)))
    assert steps["prefill_tokens"].sum() == 8 * 5
    assert steps["decode_requests"].sum() == 8 * 1  # the first of two output tokens comes with the prefill
    assert steps["prefill_attention_pairs"].sum() == 8 * (5 * 6 // 2)  # however the prompts were chunked
    members = [member for members in steps["members"] for member in members]
    computed = pd.DataFrame(members).groupby("request_index")["n_tokens"].sum()
    assert computed.tolist() == [6] * 8
    assert max(len(step) for step in steps["members"]) <= 4
    assert set(steps.columns) <= set(STEP_SCHEMA.names)


def test_a_step_is_planned_run_and_published_in_this_order() -> None:
    result, _ = run(8)
    stamps = result.steps[["plan_start_s", "exec_start_s", "exec_end_s", "published_s"]].to_numpy()
    assert (np.diff(stamps, axis=1) >= 0).all()
    assert (np.diff(stamps[:, 0]) > 0).all()


def test_a_decode_step_knows_its_context() -> None:
    result, _ = run(1)
    decode = result.steps.iloc[-1]
    assert (decode["decode_requests"], decode["prefill_requests"], decode["context_tokens"]) == (1, 0, 6)


def test_a_step_that_fails_ends_what_ran_as_errors_and_the_rest_goes_on() -> None:  # case B16
    requests = run_rigged(failing_at(0)).requests
    failed = requests[requests["outcome"] == "error"]
    assert 1 <= len(failed) <= 4
    assert failed["error"].str.contains("ValueError: scripted failure").all()
    assert failed["ended_s"].notna().all()  # case D6
    assert failed[["token_times_s", "chunk_times_s", "received_first_s"]].isna().all(axis=None)
    assert (requests.drop(failed.index)["outcome"] == "completed").all()


def test_tokens_received_before_an_error_are_kept() -> None:  # case D7
    requests = run_rigged(failing_at(1), n=1).requests
    assert requests.loc[0, "outcome"] == "error"
    assert requests.loc[0, "output_tokens"] == 1


def test_a_tokenizer_that_fails_is_an_error_of_its_request_and_frees_its_slot() -> None:
    class Broken(ScriptedTokenizer):
        def encode(self, text: str) -> list[int]:
            raise ValueError("scripted tokeniser failure")

    engine = ScriptedEngine()
    engine.make_tokenizer = Broken
    result, _ = run(6, limit=8, engine=engine, tokenize_workers=2)
    assert (result.requests["outcome"] == "error").all()
    assert result.requests["released_s"].notna().all()
    assert result.steps.empty


def test_a_dead_engine_is_an_error_of_every_request_sent_before_and_after() -> None:
    class Died(BaseException):
        pass

    def die(plan: StepPlan) -> None:
        raise Died

    class UntilItIsDead(list[Prompt]):
        def __iter__(self) -> Iterator[Prompt]:
            yield "before"
            (engine_thread,) = [
                thread for thread in threading.enumerate() if thread.name == "roseinfer-engine"
            ]
            engine_thread.join(30)
            yield from ["after"] * 2

    load = workload(["before", "after", "after"])._replace(prompts=UntilItIsDead())
    requests = measured(ScriptedEngine(die), experiment(num_requests=3), load).requests
    assert (requests["outcome"] == "error").all()
    assert requests["error"].str.contains("Died|engine died").all()
    assert requests["ended_s"].notna().all()  # case D6
    assert requests["reserved_s"].notna().tolist() == [True, False, False]


def test_spaced_requests_are_sent_when_they_are_due_whatever_the_server_does() -> None:  # case C3
    engine = ScriptedEngine()
    made = experiment(num_requests=5, submit_interval_ms=4.0, max_batch_size=4)
    load = burst(engine, 5)._replace(
        scheduled_s=np.linspace(0, 0.016, 5), arrival="constant"
    )  # the first is not served before the last is sent
    rows = measured(engine, made, load).requests
    assert rows["scheduled_s"].tolist() == pytest.approx([0.0, 0.004, 0.008, 0.012, 0.016])
    assert (rows["permitted_s"] == rows["scheduled_s"]).all()  # the client has no cap of its own
    assert (rows["sent_s"] >= rows["scheduled_s"]).all()
    assert (rows["arrival"] == "constant").all()
    assert rows["request_rate"].tolist() == [250.0] * 5
    assert rows["burst_size"].isna().all()


def test_factors_say_what_the_cell_was() -> None:
    rows = run(4, limit=3, prompt="hello")[0].requests
    expected = {
        "target": "in-process",
        "admission": "inflight:3",
        "max_inflight": 3,
        "burst_size": 4,
        "prompt_len": 5,
        "output_len": 4,
        "arrival": "burst",
    }
    for name, value in expected.items():
        assert (rows[name] == value).all(), name


def test_a_local_model_is_named_without_its_path(tmp_path: Any) -> None:
    (tmp_path / "mine").mkdir()
    rows = run(2, model=str(tmp_path / "mine"))[0].requests
    assert (rows["model"] == "mine").all()


def test_the_report_agrees_with_the_rows() -> None:
    result, made = run(8, limit=3)
    report = burst_report(result.requests, made, "builtin:gpt2", "cpu")
    assert "Requests: 3\nRejected: 5\nPrompt tokens (total): 15\nCompletion tokens (total): 6\n" in report


def test_an_end_of_sequence_token_is_ignored_unless_it_is_asked_for() -> None:
    for flags, tokens, reason in [({}, 2, "length"), ({"stop_at_eos": True}, 1, "stop")]:
        (row,) = dicts(run(1, engine=ScriptedEngine(script="\0"), **flags)[0].requests)
        assert (row["output_tokens"], row["finish_reason"], row["outcome"]) == (tokens, reason, "completed")


def test_tokenizers_are_made_once_and_lent_to_one_cell_after_another() -> None:
    engine = ScriptedEngine()
    made_tokenizers: list[ScriptedTokenizer] = []

    def make() -> ScriptedTokenizer:
        made_tokenizers.append(ScriptedTokenizer())
        return made_tokenizers[-1]

    engine.make_tokenizer = make
    made = experiment(num_requests=4, tokenize_workers=2)
    target = InProcessTarget(engine, made)
    for _ in range(3):
        target.run(made.cells[0], burst(engine, 4))
    assert len(made_tokenizers) == 3  # the manager's own and one per worker


def test_the_executor_of_a_cell_is_gone_before_the_next_is_made() -> None:
    """Else its KV cache would be in memory twice, and the next one would begin with page faults."""
    executors: list[weakref.ref[Any]] = []

    class Executor:
        def __init__(self, engine: ScriptedEngine) -> None:
            self.launch = engine.launch

    class Engine(ScriptedEngine):
        def make_executor(self, *, num_kv_blocks: int, max_batch_size: int, clock: Clock) -> Any:
            assert all(executor() is None for executor in executors)
            self.clock = clock
            executor = Executor(self)
            executors.append(weakref.ref(executor))
            return executor

    engine = Engine()
    made = experiment(num_requests=6, max_inflight="2")
    target = InProcessTarget(engine, made)
    for _ in range(3):
        target.run(made.cells[0], burst(engine, 6))
    assert len(executors) == 3


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory:\nmore"), MemoryError()])
def test_an_engine_without_memory_is_one_clear_line(error: Exception) -> None:
    class Engine(ScriptedEngine):
        def make_executor(self, *, num_kv_blocks: int, max_batch_size: int, clock: Clock) -> Any:
            raise error

    made = experiment(num_requests=2)
    with pytest.raises(RunError, match=r"could not be set up for inflight_none\S*: \S[^\n]*$"):
        InProcessTarget(Engine(), made).run(made.cells[0], workload(["hello"] * 2))


def test_an_interrupt_while_sending_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())

    class Interrupting(list[Any]):
        def __iter__(self) -> Any:
            yield from ["hello"] * 3
            raise KeyboardInterrupt

    made = experiment(num_requests=5, tokenize_workers=2)
    load: Workload = workload(["hello"] * 5)._replace(prompts=Interrupting())
    with pytest.raises(KeyboardInterrupt):
        InProcessTarget(ScriptedEngine(), made).run(made.cells[0], load)
    assert set(threading.enumerate()) == before


def test_of_the_collectors_pauses_the_longest_are_kept() -> None:
    pauses = [GcPause(start_s=10.0 + i, duration_s=0.001 * i, generation=i % 3) for i in range(20)]
    notes = _gc_notes(pauses, t0=10.0)
    assert notes["count"] == 20
    assert notes["total_s"] == pytest.approx(0.190)
    assert [pause["start_s"] for pause in notes["longest"]] == [19.0, 18.0, 17.0, 16.0, 15.0][:LONGEST_PAUSES]


# --- faults of the bookkeeping, made on purpose: the tool's own assertions catch them


def test_a_slot_that_is_never_given_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    acknowledge, calls = SchedulerManager.acknowledge, iter(range(100))

    def forgetful(self: SchedulerManager, request_id: int) -> None:
        if next(calls) != 2:
            acknowledge(self, request_id)

    monkeypatch.setattr(SchedulerManager, "acknowledge", forgetful)
    result, _ = run(6)
    assert any(
        "1 slot taken and never released" in reason for reason in check_cell(result.requests, result.facts)
    )


def test_a_limit_that_lets_one_more_in_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    init = Admission.__init__
    monkeypatch.setattr(
        Admission, "__init__", lambda self, limit, *more, **named: init(self, limit + 1, *more, **named)
    )
    result, _ = run(8, limit=3)
    reasons = check_cell(result.requests, result.facts)
    assert "4 requests were in flight at once, the limit is 3" in reasons
    assert "a burst of 8 met limit 3: 5 refusals were due, 4 were counted" in reasons


def test_slots_that_are_counted_wrongly_over_time_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_flight_for_longer(self: Admission, now: float) -> None:
        self._integral_s += 1.0

    monkeypatch.setattr(Admission, "_integrate", in_flight_for_longer)
    result, _ = run(4)
    assert any("request-seconds in flight" in reason for reason in check_cell(result.requests, result.facts))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda attempts: attempts[:-1], "1 offered request of 6 without a row (request_index 5)"),
        (
            lambda attempts: [*attempts, attempts[0]],
            "1 row of requests that were never offered (request_index 6)",
        ),
    ],
)
def test_a_row_too_few_or_too_many_is_caught(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[list[Attempt]], list[Attempt]], says: str
) -> None:  # case D8
    play = Client.play

    def faulty(self: Client) -> Played:
        played = play(self)
        return played._replace(attempts=fault(played.attempts))

    monkeypatch.setattr(Client, "play", faulty)
    result, _ = run(6)
    assert says in check_cell(result.requests, result.facts)
