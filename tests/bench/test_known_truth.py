"""What is reported is what happened: a server of scripted durations, through the real manager, threads and clock.

A busy machine makes every sleep longer than scripted. That is no error of the measurement, so the server, the sender
and the reader keep diaries of their own, and the record has to agree with these. Of the script it can be no faster.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from roseinfer.bench.client import Client
from roseinfer.bench.records import REQUEST_SCHEMA, TTFT_PARTS, derive, gaps_s
from roseinfer.bench.row_files import record_table
from roseinfer.bench.target import InProcessTarget
from roseinfer.bench.workload import Workload
from roseinfer.executor import StepPlan
from roseinfer.manager import SchedulerManager
from roseinfer.request import TokenEvent
from roseinfer.sim.client import ClientRules
from roseinfer.sim.virtual import Arrival, SimLimits, simulate
from roseinfer.stream import Mailbox, RequestStream
from tests.bench.experiments import experiment, workload
from tests.scripted import ScriptedEngine, ScriptedTokenizer

TOKENIZE_S = 0.001
STEPS_S = (0.005, 0.003, 0.003)
"""A prefill, and two decodes after it."""

clock = time.perf_counter


class Diary:
    """When things happened, as those wrote it down who did them; by request, in clock seconds."""

    def __init__(self) -> None:
        self.t0 = 0.0
        self.sent_s: list[float] = []
        self.encoded_s: dict[int, float] = {}
        self.began_s: dict[int, list[float]] = defaultdict(list)  # of each step
        self.ended_s: dict[int, list[float]] = defaultdict(list)
        self.taken_s: dict[int, list[float]] = defaultdict(list)  # of each token

    def stages(self, due_s: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Every derived stage, as it was."""
        n = len(due_s)
        due, sent = self.t0 + due_s, np.array(self.sent_s)
        encoded = np.array([self.encoded_s[k] for k in range(n)])
        began = np.array([self.began_s[k][0] for k in range(n)])
        (first, last), (got_first, got_last) = (
            (np.array([book[k][i] for k in range(n)]) for i in (0, -1))
            for book in (self.ended_s, self.taken_s)
        )
        nothing = np.zeros(n)
        return {
            **dict.fromkeys(("cap_wait_s", "retry_wait_s", "reserve_s"), nothing),
            "send_lag_s": sent - due,
            "tokenize_s": encoded - sent,
            "queue_wait_s": began - encoded,
            "prefill_s": first - began,
            "delivery_s": got_first - first,
            "ttft_s": got_first - due,
            "ttft_from_send_s": got_first - sent,
            "decode_s": last - first,
            "last_delivery_s": got_last - last,
            "e2el_s": got_last - due,
        }


def measured(
    patch: pytest.MonkeyPatch, load: Workload, steps_s: Sequence[Sequence[float]], **flags: Any
) -> tuple[pd.DataFrame, Diary]:
    """The rows of one cell, with their derived columns. `steps_s`: what each step of each request lasts."""
    diary = Diary()
    start, submit, take = Client._start, SchedulerManager.submit, Mailbox.take

    def started(self: Client, permits_from_s: list[float]) -> float:
        until_s = start(self, permits_from_s)
        diary.t0 = self._t0
        return until_s

    def submitted(self: SchedulerManager, *args: Any, **kwargs: Any) -> RequestStream:
        diary.sent_s.append(clock())
        return submit(self, *args, **kwargs)

    def taken(self: Mailbox, timeout_s: float | None = None) -> list[TokenEvent]:
        events = take(self, timeout_s)
        now = clock()
        for event in events:
            diary.taken_s[event.request_id].append(now)
        return events

    class Tokenizer(ScriptedTokenizer):
        def encode(self, text: str) -> list[int]:
            time.sleep(TOKENIZE_S)
            diary.encoded_s[int(text)] = clock()
            return super().encode(text)

    def compute(plan: StepPlan) -> None:
        (span,) = plan.spans
        request_id = span.request.request_id
        diary.began_s[request_id].append(clock())
        time.sleep(steps_s[request_id][len(span.request.output_ids)])  # the service itself
        diary.ended_s[request_id].append(clock())

    patch.setattr(Client, "_start", started)
    patch.setattr(SchedulerManager, "submit", submitted)
    patch.setattr(Mailbox, "take", taken)
    engine = ScriptedEngine(compute)
    engine.make_tokenizer = Tokenizer
    made = experiment(num_requests=len(steps_s), max_batch_size=1, **flags)
    result = InProcessTarget(engine, made).run(made.cells[0], load)
    rows: pd.DataFrame = record_table(result.requests, REQUEST_SCHEMA).to_pandas()
    assert (rows["outcome"] == "completed").all()
    return derive(rows), diary


def texts(due_s: NDArray[np.float64], arrival: str, output_tokens: int) -> Workload:
    load = workload([f"{k:03d}" for k in range(len(due_s))], output_tokens=output_tokens)
    return load._replace(scheduled_s=due_s, arrival=arrival)


def wrong_stages(rows: pd.DataFrame, truth: dict[str, NDArray[np.float64]]) -> dict[str, float]:
    """The stages whose median error is 2 ms or more, with that."""
    errors_ms = {stage: 1e3 * float(np.median(np.abs(rows[stage] - truth[stage]))) for stage in truth}
    return {stage: error_ms for stage, error_ms in errors_ms.items() if error_ms >= 2.0}


def scripted_ends_s(due_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """When each request's last step ends, of one tokenizer and one server that lose no time."""
    tokenized_s = accumulate(due_s, lambda free_s, at_s: max(free_s, at_s) + TOKENIZE_S, initial=0.0)
    next(tokenized_s)
    ends_s = accumulate(tokenized_s, lambda free_s, at_s: max(free_s, at_s) + sum(STEPS_S), initial=0.0)
    next(ends_s)
    return np.array(list(ends_s))


ARRIVALS = {
    "burst": np.zeros(20),
    "constant": 0.009 * np.arange(20),
    "poisson": np.concatenate([[0.0], np.cumsum(np.random.default_rng(7).exponential(0.0135, 27))]),
}


@pytest.mark.alone
@pytest.mark.parametrize("arrival", ARRIVALS)
def test_every_stage_comes_back(monkeypatch: pytest.MonkeyPatch, arrival: str) -> None:
    due_s = ARRIVALS[arrival]
    rows, diary = measured(monkeypatch, texts(due_s, arrival, len(STEPS_S)), [STEPS_S] * len(due_s))
    truth = diary.stages(due_s)
    assert set(TTFT_PARTS) < set(truth)
    assert wrong_stages(rows, truth) == {}
    ends_s = scripted_ends_s(due_s)
    assert (ends_s - due_s).max() > 3 * sum(STEPS_S)  # there was a queue to measure
    assert (rows["e2el_s"] >= ends_s - due_s - 1e-6).all()
    assert (rows["ttft_s"] >= ends_s - due_s - sum(STEPS_S[1:]) - 1e-6).all()


@pytest.mark.alone
def test_latency_counts_from_the_schedule_also_where_the_client_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # case C1
    """A tenth of the case's times: 50 ms of service at 100 requests a second, one at a time."""
    due_s = np.arange(8) / 100
    load, flags = texts(due_s, "constant", 1), {"submit_interval_ms": 10.0, "max_concurrency": 1}
    rows, diary = measured(monkeypatch, load, [(0.05,)] * 8, **flags)
    truth = diary.stages(due_s)
    assert wrong_stages(rows, {name: truth[name] for name in ("ttft_s", "ttft_from_send_s")}) == {}
    assert rows["scheduled_s"].to_numpy() == pytest.approx(due_s)
    assert rows["ttft_s"].mean() >= 0.190
    assert rows["ttft_s"].max() >= 0.330
    assert rows["cap_wait_s"].max() >= 0.280
    assert 0.050 <= rows["ttft_from_send_s"].median() < 0.190


def test_latency_from_the_schedule_is_exact_on_a_virtual_clock() -> None:  # case C1
    run = simulate(
        [Arrival(0.1 * k, prompt_tokens=4, max_new_tokens=1) for k in range(8)],
        SimLimits(max_batch_size=1),
        lambda plan: 0.5,
        ClientRules(max_concurrency=1),
    )
    first_token_s = np.array([step.result.exec_end_s for step in run.steps])
    sent_s = np.array([sent.sent_s for sent in run.sent])
    latency_s = first_token_s - 0.1 * np.arange(8)
    assert latency_s.mean() == pytest.approx(1.9, abs=1e-12)
    assert latency_s.max() == pytest.approx(3.3, abs=1e-12)
    assert first_token_s - sent_s == pytest.approx(0.5, abs=1e-12)


@pytest.mark.alone
def test_one_stall_in_twenty_streams_is_the_largest_gap(monkeypatch: pytest.MonkeyPatch) -> None:  # case E7
    steps_s = [[0.001] * 5 for _ in range(20)]
    steps_s[11][3] = 0.250
    rows, diary = measured(monkeypatch, texts(np.zeros(20), "burst", 5), steps_s)
    stalled = rows["largest_itl_s"].to_numpy()
    assert stalled.argmax() == 11
    assert stalled[11] >= 0.250
    assert stalled[11] == pytest.approx(diary.ended_s[11][3] - diary.ended_s[11][2], abs=0.050)
    gaps = gaps_s(rows["token_times_s"])
    assert gaps.max() == stalled[11]
    assert len(gaps) == 20 * 4
