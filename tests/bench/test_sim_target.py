"""The simulated target: rows like a real engine's, equal on every machine; and the command line over it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from roseinfer.bench import row_groups, sim_target
from roseinfer.bench.records import REQUEST_SCHEMA, STEP_SCHEMA, TTFT_PARTS, derive
from roseinfer.bench.rows import Attempt, CellResult, request_row
from roseinfer.bench.sim_rows import SENT_COLUMNS, sent_values
from roseinfer.bench.sim_target import SimTarget
from roseinfer.bench.store import RunFolder
from roseinfer.bench.validity import check_cell
from roseinfer.bench.workload import Workload, WorkloadSource
from roseinfer.errors import InvariantError, SchedulerManagerOverloadedError
from roseinfer.request import Request, TokenEvent
from roseinfer.sim.client import ClientRules
from roseinfer.sim.cost_model import BetweenStepsCost, CostModel, StepCost, SubmitCost
from roseinfer.sim.noise import Noise
from roseinfer.sim.virtual import TOKEN_ID, Arrival, Sent, SimLimits, SimRun, simulate
from roseinfer.stream import Timings
from tests.bench.asking import Answer, Ask
from tests.bench.experiments import experiment
from tests.sim.scripted_costs import Scripted, one_second

COST = CostModel("tenth of a second a step", StepCost(0.1, 0.0, 0.0, 0.0, 0.0))


@pytest.fixture
def cost_file(tmp_path: Path) -> Path:
    path = tmp_path / "tenth.json"
    COST.write(path)
    return path


def measured(cost_file: Path, scheduled_s: list[float] | None, *, n: int = 0, **flags: Any) -> CellResult:
    """One cell of requests of 8 prompt and 3 output tokens."""
    made = experiment(target="sim", cost_model=cost_file, prompt_len="8", max_new_tokens="3", **flags)
    count = len(scheduled_s) if scheduled_s is not None else n
    due_s = None if scheduled_s is None else np.array(scheduled_s)
    arrival = made.load.arrival or "trace"
    workload = Workload(due_s, [], np.full(count, 8), np.full(count, 3), 0, arrival)
    (cell,) = made.cells
    return SimTarget(COST, made).run(cell, workload)


def burst(cost_file: Path, size: int, **flags: Any) -> CellResult:
    return measured(cost_file, [0.0] * size, burst_size=str(size), **flags)


def test_a_burst_leaves_the_rows_that_an_engine_leaves(cost_file: Path) -> None:
    result = burst(cost_file, 6, max_inflight="4", max_batch_size=2)
    rows = result.requests
    assert set(rows.columns) <= set(REQUEST_SCHEMA.names)
    assert set(result.steps.columns) <= set(STEP_SCHEMA.names)
    assert rows["outcome"].tolist() == ["completed"] * 4 + ["rejected"] * 2
    assert rows["target"].unique().tolist() == ["sim"]
    assert rows["model"].unique().tolist() == [COST.name]
    assert rows["inflight_at_send"].tolist() == [0, 1, 2, 3, 4, 4]
    assert rows["token_times_s"][0] == pytest.approx([0.1, 0.2, 0.3])
    assert rows["first_scheduled_s"].tolist()[:4] == pytest.approx([0.0, 0.0, 0.3, 0.3])
    assert check_cell(complete(rows), result.facts) == []


def complete(rows: pd.DataFrame) -> pd.DataFrame:
    """All columns of the record, as a reader has them."""
    return rows.reindex(columns=REQUEST_SCHEMA.names)


def test_the_parts_sum_to_ttft(cost_file: Path) -> None:
    derived = derive(complete(burst(cost_file, 6, max_batch_size=2).requests))
    assert np.allclose(derived[list(TTFT_PARTS)].fillna(0).sum(axis=1), derived["ttft_s"], rtol=0, atol=1e-12)


def test_a_deadline_is_a_timeout_with_the_tokens_that_came(cost_file: Path) -> None:  # case A18
    rows = burst(cost_file, 2, max_batch_size=1, timeout=0.25).requests
    assert rows["outcome"].tolist() == ["timeout"] * 2
    assert rows["output_tokens"].tolist() == [2, 0]
    assert rows["ended_s"].tolist() == [0.25, 0.25]
    assert rows["first_scheduled_s"].isna().tolist() == [False, True]  # no prefill for the one that waited


def test_what_the_cap_held_back_to_the_end_has_a_row_with_the_reason(cost_file: Path) -> None:  # case C11
    result = burst(cost_file, 4, max_concurrency=1, duration=0.5)
    rows = result.requests
    assert rows["outcome"].tolist() == ["completed"] * 2 + ["incomplete"] * 2
    assert (
        rows["error"].tolist()[2:] == ["not sent: --max-concurrency 1 was reached until --duration ended"] * 2
    )
    assert rows["sent_s"].isna().tolist() == [False, False, True, True]
    assert rows["permitted_s"].tolist()[:2] == pytest.approx([0.0, 0.3])
    assert (result.facts.offered, result.facts.peak_outstanding) == (4, 1)


def test_a_closed_loop_offers_what_it_came_to(cost_file: Path) -> None:  # case C7
    result = measured(cost_file, None, n=50, max_concurrency=2, duration=1.0)
    rows = result.requests
    assert len(rows) == result.facts.offered < 50
    assert (rows["scheduled_s"] == rows["sent_s"]).all()
    assert result.facts.peak_outstanding == 2
    assert (rows["sent_s"] < 1.0).all()
    assert check_cell(complete(rows), result.facts) == []


def test_a_closed_loop_that_runs_out_of_requests_is_invalid(cost_file: Path) -> None:
    result = measured(cost_file, None, n=5, max_concurrency=1, duration=60.0)
    (fault,) = check_cell(complete(result.requests), result.facts)
    assert fault == "the closed loop had sent all its 5 requests at 1.2 s, before --duration ended"
    counted = measured(cost_file, None, n=5, max_concurrency=1, duration=60.0, num_requests=5)
    assert check_cell(complete(counted.requests), counted.facts) == []


@pytest.mark.parametrize("lost", [1, 4])
def test_a_request_that_gets_lost_is_noticed(
    cost_file: Path, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that others wait for, and the last."""

    def losing(*args: Any, on_request: Callable[[Sent], None], **kwargs: Any) -> SimRun:
        def on_others(sent: Sent) -> None:
            if sent.index != lost:
                on_request(sent)

        return simulate(*args, on_request=on_others, **kwargs)

    monkeypatch.setattr(sim_target, "simulate", losing)
    with pytest.raises(InvariantError, match=r"^5 requests were offered, and"):
        burst(cost_file, 5)
    with pytest.raises(InvariantError, match=r"^5 requests were offered, and"):
        measured(cost_file, None, n=5, max_concurrency=1, num_requests=5)


def test_a_refused_user_pauses_as_on_an_engine(cost_file: Path) -> None:
    rows = measured(cost_file, None, n=6, max_concurrency=2, num_requests=6, max_inflight="1").requests
    assert rows["outcome"].tolist() == ["completed"] + ["rejected"] * 5
    assert rows["sent_s"].tolist() == pytest.approx([0.0, 0.0, 0.05, 0.1, 0.15, 0.2])


def attempt_of(sent: Sent) -> Attempt:
    """The same request as the client of an engine would have seen it."""
    fate = sent.fate
    attempt = Attempt(sent.due_s, sent.permitted_s, sent.sent_s, sent.returned_s, sent.waiting)
    attempt.prompt_tokens = sent.prompt_tokens
    if not isinstance(fate, Request):
        attempt.failure = fate
        attempt.inflight = fate.inflight if isinstance(fate, SchedulerManagerOverloadedError) else None
        return attempt
    attempt.timings, attempt.inflight = Timings.of(fate), fate.ticket.inflight_before
    attempt.cached_tokens = fate.cached_tokens
    attempt.predicted_ttft_s = fate.ticket.predicted_ttft_s
    attempt.gave_up_s = sent.gave_up_s
    tokens = zip(sent.received_s, fate.token_times_s, strict=False)
    attempt.deliveries = [(at_s, [TokenEvent(0, TOKEN_ID, time_s)]) for at_s, time_s in tokens]
    if sent.ended_s is not None:
        is_token = sent.error is None
        end = TokenEvent(0, TOKEN_ID if is_token else None, fate.token_times_s[-1] if is_token else 0.0)
        end = end._replace(finish_reason=fate.finish_reason, error=sent.error)
        attempt.deliveries[len(attempt.deliveries) - is_token :] = [(sent.ended_s, [end])]
    return attempt


@pytest.mark.parametrize(
    ("limits", "kinds"),
    [
        (SimLimits(max_inflight_requests=8, max_batch_size=3, max_model_len=64), 7),
        (
            SimLimits(
                admission="aimd+priority+queue-timeout:3s",
                max_batch_size=3,
                max_model_len=64,
                cost_model=COST,
            ),
            5,
        ),
    ],
)
def test_a_row_is_what_a_real_client_would_have_written(limits: SimLimits, kinds: int) -> None:
    """Refused, dropped, given up early and late, never fitting as ids and as text, and served: all of them."""
    costs = Scripted(
        one_second,
        between=lambda plan: 0.25,
        submit=lambda n: 0.125,
        tokenize=lambda n: 0.5 * (n % 2),
        refuse_seconds=0.0625,
    )
    lengths = [4, 5, 99, 98, 4, 5, 4, 4, 6, 7] * 5
    arrivals = [Arrival(0.3 * n, length, 3, n % 2) for n, length in enumerate(lengths)]
    run = simulate(arrivals, limits, costs, ClientRules(timeout_s=4.0))
    outcomes = set()
    for sent in run.sent:
        row = dict(zip(SENT_COLUMNS, sent_values(sent, keeps_times=True), strict=True))
        expected = request_row(attempt_of(sent), 0.0)
        assert row == dict.fromkeys(SENT_COLUMNS) | expected | {"request_index": sent.index}
        outcomes.add((row["outcome"], row["output_tokens"], row["tokenized_s"] is None))
        outcomes.add((row["reject_reason"], row["predicted_ttft_s"] is None, True))
    assert len(outcomes) > kinds


def test_without_token_times_no_list_is_kept_and_all_else_is_the_same(cost_file: Path) -> None:
    whole = burst(cost_file, 6, max_inflight="4", max_batch_size=2)
    short = burst(cost_file, 6, max_inflight="4", max_batch_size=2, no_token_times=True)
    lists = ["token_times_s", "chunk_times_s", "chunk_tokens"]
    assert short.requests[lists].isna().all(axis=None)
    assert short.steps["members"].isna().all()
    pd.testing.assert_frame_equal(short.requests.drop(columns=lists), whole.requests.drop(columns=lists))
    pd.testing.assert_frame_equal(short.steps.drop(columns="members"), whole.steps.drop(columns="members"))
    assert short.facts == whole.facts


NOISY = replace(
    COST,
    between_steps=BetweenStepsCost(0.01, 0.001),
    submit=SubmitCost(0.0005, 0.001, 0.0001),
    noise=Noise((0.9, 1.0, 1.3), 0.1, (0.5,)),
)


def noisy(cost_file: Path, limit: str, repeat: int, **flags: Any) -> CellResult:
    made = experiment(target="sim", cost_model=cost_file, max_inflight=limit, burst_size="6", **flags)
    workload = Workload(np.zeros(6), [], np.full(6, 8), np.full(6, 3), 0, "burst", repeat)
    return SimTarget(NOISY, made).run(made.cells[0], workload)


def test_noise_is_the_same_for_all_limits_of_a_block_and_another_in_each_repeat(cost_file: Path) -> None:
    def durations(result: CellResult) -> list[float]:
        return (result.steps["exec_end_s"] - result.steps["exec_start_s"]).round(9).tolist()

    unlimited, limited = (durations(noisy(cost_file, limit, 0)) for limit in ("0", "4"))
    n = min(len(unlimited), len(limited))
    assert unlimited[:n] == limited[:n]
    assert len(set(unlimited)) > 1
    assert durations(noisy(cost_file, "0", 1)) != unlimited
    assert durations(noisy(cost_file, "0", 0, seed=1)) != unlimited


def test_every_cost_of_the_model_is_in_the_rows(cost_file: Path) -> None:
    result = noisy(cost_file, "5", 0)
    rows = derive(complete(result.requests))
    assert rows["add_request_s"].tolist()[:5] == pytest.approx([0.0005] * 5)
    assert rows["reject_s"].tolist()[5] == pytest.approx(0.0001)
    assert rows["sent_s"].tolist() == pytest.approx([0.0005 * n for n in range(6)])
    assert rows["send_lag_s"].tolist() == rows["sent_s"].tolist()
    assert rows["tokenized_s"].tolist()[:2] == pytest.approx([0.0085, 0.0165])  # one worker, 8 ms a prompt
    assert rows["delivery_s"].tolist()[0] == pytest.approx(0.011)
    assert np.allclose(
        rows[list(TTFT_PARTS)].fillna(0).sum(axis=1)[:5], rows["ttft_s"][:5], rtol=0, atol=1e-12
    )
    assert check_cell(complete(result.requests), result.facts) == []


def test_row_groups_hold_the_same_rows_in_the_order_of_requests(
    cost_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = experiment(target="sim", cost_model=cost_file, burst_size="100", max_batch_size=7)
    source = WorkloadSource(made, None, vocab_size=0, max_model_len=1024)
    target, (cell,) = SimTarget(COST, made), made.cells
    whole = target.run(cell, source.draw(cell, 0))
    monkeypatch.setattr(row_groups, "ROW_GROUP_ROWS", 16)
    monkeypatch.setattr(row_groups, "CHUNK_ROWS", 8)
    folder = RunFolder.create(tmp_path, "sweep", "run", {})
    with folder.cell(cell.cell_id, 0) as writer:
        facts, notes = target.record(cell, source.blocks(cell, 0), writer)
        writer.facts = {**facts.to_json(), **notes}
    file = pq.ParquetFile(folder.path / "cells" / f"{cell.cell_id}@0" / "requests.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [16] * 6 + [4]
    other = RunFolder.create(tmp_path, "sweep", "other", {})
    other.write_cell(cell.cell_id, 0, whole.requests, whole.steps, {})
    for read in (RunFolder.read_requests, RunFolder.read_steps):
        pd.testing.assert_frame_equal(
            read(folder).drop(columns="run_id"), read(other).drop(columns="run_id"), check_exact=True
        )
    assert facts == whole.facts


# ---- the command line ----


@pytest.fixture
def simulated(ask: Ask, cost_file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`roseinfer-bench` with a command that is simulated."""
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)  # slow where other tests have loaded torch

    def asked(command: str, *words: str) -> Answer:
        return ask(*command.split(), "--target", "sim", "--cost-model", str(cost_file), "--quiet", *words)

    return asked


SWEEP = "sweep --max-inflight 0,4 --burst-size 16 --repeats 3 --max-batch-size 4 -o out --run-id"


def rows_of(run: str, name: str = "requests") -> pd.DataFrame:
    """A table of a run, without its name."""
    table = pq.read_table(f"out/sweep/{run}/{name}.parquet").drop_columns(["run_id"])
    return pd.DataFrame(table.to_pylist())


def test_two_runs_of_the_same_flags_are_equal(simulated: Any) -> None:  # case C15
    assert simulated(f"{SWEEP} a").code == simulated(f"{SWEEP} b").code == 0
    for name in ("requests", "steps", "summary"):
        pd.testing.assert_frame_equal(rows_of("a", name), rows_of("b", name), check_exact=True)


def test_another_seed_is_another_run(simulated: Any) -> None:
    words = "sweep --request-rate 20 --num-requests 30 --repeats 1 -o out --run-id"
    assert simulated(f"{words} a").code == simulated(f"{words} b --seed 1").code == 0
    assert rows_of("a")["sent_s"].tolist() != rows_of("b")["sent_s"].tolist()


def test_the_run_says_what_computed_and_keeps_no_path(simulated: Any, cost_file: Path) -> None:
    answer = simulated(f"{SWEEP} a")
    assert f"{COST.name} on virtual clock" in " ".join(answer.out.split())
    assert "Figures: roseinfer-bench plot out/sweep/a" in answer.out
    folder = RunFolder.open(Path("out/sweep/a"))
    manifest = folder.manifest
    assert manifest["target"] == "sim"
    assert manifest["model"]["step"]["constant_s"] == 0.1
    assert manifest["model"]["model"] == COST.name
    assert manifest["configuration"]["cost-model"] == "tenth.json"
    assert not manifest["configuration"].keys() & {
        "model",
        "device",
        "dtype",
        "num-threads",
        "tokenize-workers",
    }
    assert str(cost_file.parent) not in (folder.path / "run.json").read_text()


def test_run_reports_each_repeat(simulated: Any) -> None:
    answer = simulated("run --num-requests 8 --max-inflight 4 --repeats 2")
    assert answer.code == 0
    assert answer.out.count("=== streaming benchmark ===\n") == 2
    assert "warmup" not in answer.out
    assert f"\nModel: {COST.name}\n" in answer.out
    assert "\nDevice: virtual clock\n" in answer.out


@pytest.mark.parametrize(
    "load",
    [
        "--burst-size 8 --burst-interval 1 --num-requests 24",
        "--request-rate 20 --num-requests 20",
        "--request-rate 20 --arrival constant --duration 1",
        "--request-rate 20 --burstiness 0.5 --num-requests 20",
        "--request-rate 20 --ramp 1 --duration 2",
        "--request-rate 5 --burst-size 8 --burst-interval 1 --duration 3",
        "--submit-interval-ms 50 --num-requests 10",
        "--request-rate 40 --num-requests 40 --max-concurrency 2",
        "--max-concurrency 3 --num-requests 20",
        "--max-concurrency 3 --duration 2 --ramp 1",
        "--burst-size 16 --timeout 60",
        "--prompt-len-dist lognormal:0.5 --output-len-dist uniform:0.5 --burst-size 16",
    ],
)
def test_every_shape_of_load_runs_and_is_valid(simulated: Any, load: str) -> None:
    answer = simulated(f"sweep --max-inflight 0,8 --repeats 2 -o out --run-id a {load}")
    assert answer.code == 0, answer.out + answer.err
    assert RunFolder.open(Path("out/sweep/a")).is_done


def test_a_run_without_token_times_is_summed_up_and_explained_as_far_as_it_goes(simulated: Any) -> None:
    assert simulated(f"{SWEEP} a").code == 0
    answer = simulated(f"{SWEEP} b --no-token-times")
    assert answer.code == 0, answer.out + answer.err
    whole, short = (rows_of(run, "summary") for run in "ab")
    unknown = [column for column in whole if "itl" in str(column) or "chunk_gap" in str(column)]
    pd.testing.assert_frame_equal(short.drop(columns=unknown), whole.drop(columns=unknown), check_exact=True)
    assert rows_of("b", "steps")["members"].isna().all()
    assert RunFolder.open(Path("out/sweep/b")).manifest["configuration"]["no-token-times"] is True


@pytest.mark.parametrize("target", ["engine", "http://127.0.0.1:9/v1"])
def test_token_times_of_what_is_measured_are_always_kept(ask: Ask, target: str) -> None:
    answer = ask("sweep", "--target", target, "--no-token-times", "-o", "out")
    assert answer.code == 2
    assert answer.complaint.startswith("--no-token-times True: needs --target sim")
    assert not Path("out").exists()


def test_goodput_is_in_the_summary_and_in_the_manifest(simulated: Any) -> None:  # case D4
    answer = simulated(f"{SWEEP} a --goodput ttft:150 --json")
    assert answer.code == 0
    pooled = {row["max_inflight"]: row for row in json.loads(answer.out)["summary"] if row["repeat"] is None}
    assert pooled[4]["good_share"] == pooled[4]["good"] / pooled[4]["offered"] == 0.25
    assert RunFolder.open(Path("out/sweep/a")).manifest["goodput"] == ["ttft:150"]


def test_a_closed_loop_of_more_users_than_the_limit_is_told_what_that_means(simulated: Any) -> None:
    words = "--max-concurrency 8 --num-requests 30 --repeats 1 -o out --run-id a"
    assert "Note: a limit below the 8 users" in simulated(f"sweep --max-inflight 4 {words}").out
    assert "Note:" not in simulated(f"sweep --max-inflight 8 {words} --experiment-name other").out


def test_a_prompt_that_can_never_fit_is_refused_before_anything_is_written(
    simulated: Any,
) -> None:  # case A15
    answer = simulated("sweep --prompt-len 100 --max-model-len 64 -o out")
    assert (answer.code, answer.complaint.split(":")[0]) == (2, "--prompt-len '100'")
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "words",
    ["--cost-model missing.json", "--cost-model .", "--device cpu", "--prompt Hello", "--target other"],
)
def test_bad_input_is_one_line_that_names_the_flag(simulated: Any, words: str) -> None:
    answer = simulated("sweep -o out", *words.split())
    assert answer.code == 2
    assert answer.complaint.startswith(words.split(maxsplit=1)[0])
    assert not Path("out").exists()


def test_a_run_whose_requests_all_time_out_measured_nothing(simulated: Any) -> None:
    assert simulated(f"{SWEEP} a --timeout 0.01").code == 5


def test_an_interrupted_simulation_says_which_file_to_name_again(
    simulated: Any, ask: Ask, cost_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, calls = SimTarget.record, iter(range(100))

    def stopped(self: SimTarget, *args: Any) -> object:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return record(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SimTarget, "record", stopped)
        answer = simulated(f"{SWEEP} a")
    assert answer.code == 130
    again = f"--resume out/sweep/a --cost-model {cost_file}"
    assert answer.complaint == (
        f"interrupted; 2 of 6 cells are on disk. To go on: roseinfer-bench sweep {again}"
    )
    answer = ask("sweep", "--resume", "out/sweep/a")
    assert answer.code == 2
    assert answer.complaint == (
        "--resume 'out/sweep/a': was made with --cost-model tenth.json, and a run keeps no places of files:"
        " add --cost-model PATH"
    )
    assert ask("sweep", *again.split(), "--quiet").code == 0
    assert len(RunFolder.open(Path("out/sweep/a")).finished_cells()) == 6


def test_resuming_with_another_cost_model_says_what_differs(simulated: Any, ask: Ask, tmp_path: Path) -> None:
    simulated(f"{SWEEP} a")
    other = tmp_path / "else" / "tenth.json"
    other.parent.mkdir()
    replace(COST, step=replace(COST.step, constant_s=0.2)).write(other)
    answer = ask("sweep", "--resume", "out/sweep/a", "--cost-model", str(other), "--quiet")
    assert answer.code == 2
    assert "model step was constant_s=0.1 " in answer.complaint


def test_a_simulation_never_imports_torch(cost_file: Path, tmp_path: Path) -> None:
    script = f"""
import sys
from roseinfer.bench.cli import main
sys.argv = ["roseinfer-bench", "sweep", "--target", "sim", "--cost-model", {str(cost_file)!r}, "--repeats", "1",
            "--max-inflight", "0,16", "--quiet"]
try:
    main()
except SystemExit as end:
    print(end.code or 0, sorted({{"torch", "transformers", "matplotlib"}} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
