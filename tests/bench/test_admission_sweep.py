"""A sweep over kinds of limits, from the flag to records, tables, figures and the recommended limit."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

from roseinfer.bench.experiment import Experiment
from roseinfer.bench.records import REQUEST_SCHEMA
from roseinfer.bench.row_files import record_table
from roseinfer.bench.rows import CellResult
from roseinfer.bench.store import RunFolder
from roseinfer.bench.target import InProcessTarget
from roseinfer.bench.validity import check_cell
from tests.bench.asking import Answer, Ask, ask_in
from tests.bench.experiments import burst, experiment
from tests.scripted import ScriptedEngine

COST_MODEL = str(Path(__file__).parents[2] / "experiments" / "gpt2_cpu.cost.json")
LIMITS = ["inflight:4", "tokens:400", "tokens:800", "inflight:6+tokens:600", "none"]
"""In the order in which tables show them."""

SWEEP = (
    *("sweep", "--admission", "none,tokens:800,inflight:4,tokens:400,tokens:600+inflight:6"),
    *("--burst-size", "24", "--prompt-len", "80", "--prompt-len-dist", "lognormal:0.6", "--repeats", "3"),
    *("--max-new-tokens", "8", "--target", "sim", "--cost-model", COST_MODEL, "--quiet"),
    *("-o", "out", "--run-id", "run", "--slo", "p50_ttft:600"),
)


@pytest.fixture(autouse=True, scope="module")
def little_garbage() -> Iterator[None]:
    """All of torch is on this heap, and every cell collects it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda generation=2: 0)
        yield


class Swept(NamedTuple):
    folder: Path
    answer: Answer


@pytest.fixture(scope="module")
def swept_once(tmp_path_factory: pytest.TempPathFactory, little_garbage: None) -> Swept:
    folder = tmp_path_factory.mktemp("swept")
    answer = ask_in(folder, *SWEEP)
    assert answer.code == 0, answer.out + answer.err
    return Swept(folder, answer)


@pytest.fixture
def swept(swept_once: Swept, tmp_path: Path, ask: Ask) -> Answer:
    """What SWEEP said, and a copy of what it left where `ask` asks."""
    shutil.copytree(swept_once.folder, tmp_path, dirs_exist_ok=True)
    return swept_once.answer


@pytest.fixture
def run(swept: Answer) -> RunFolder:
    return RunFolder.open(Path("out/sweep/run"))


def test_every_limit_has_its_column_as_it_is_typed(swept: Answer) -> None:
    heads = [line.split()[1:] for line in swept.out.splitlines() if line.startswith("admission ")]
    assert [limit for head in heads for limit in head] == LIMITS
    assert "With admission tokens:400 instead of none, throughput" in swept.out


def test_records_hold_the_limit_and_a_number_where_it_is_of_requests_alone(run: RunFolder) -> None:
    rows = run.read_requests()
    limits = rows.groupby("admission")["max_inflight"].agg(["min", "max"])
    assert sorted(limits.index) == sorted(LIMITS)
    assert limits["max"].dropna().to_dict() == {"inflight:4": 4}


def test_a_budget_refuses_for_its_own_reason(run: RunFolder) -> None:
    rows = run.read_requests()
    reasons = rows[rows["outcome"] == "rejected"].groupby("admission")["reject_reason"].agg(set)
    assert reasons["inflight:4"] == {"inflight"}
    assert "tokens" in reasons["tokens:800"]
    assert "none" not in reasons.index


def test_what_was_held_stayed_within_the_budget_by_admissions_own_count_and_by_the_rows(
    run: RunFolder,
) -> None:  # case A7
    rows, facts = run.read_requests(), run.read_facts()
    assert run.read_summary() is not None
    for (cell_id, repeat), known in facts.items():
        budget = known["token_limit"]
        admitted = rows[
            (rows["cell_id"] == cell_id) & (rows["repeat"] == repeat) & rows["reserved_s"].notna()
        ]
        if budget is not None:
            # A burst at once: what got in was in flight together.
            assert (admitted["prompt_tokens"] + 8).sum() == known["peak_held_tokens"] <= budget


def test_limits_of_a_repeat_meet_the_same_requests(run: RunFolder) -> None:
    rows = run.read_requests()
    served = rows[rows["prompt_tokens"].notna()]
    assert (served.groupby(["repeat", "request_index"])["prompt_tokens"].nunique() == 1).all()


def test_a_limit_of_any_kind_may_be_recommended(ask: Ask, swept: Answer) -> None:
    answer = ask("recommend", "out/sweep/run", "--slo", "p50_ttft:600", "--json")
    (only,) = json.loads(answer.out)["recommendations"]
    assert [one["limit"] for one in only["evidence"]] == [
        *("4", "tokens 400", "tokens 800", "inflight 6, tokens 600", "no limit"),
    ]
    assert only["admission"] in LIMITS
    assert only["max_inflight"] == (4 if only["admission"] == "inflight:4" else None)


def test_a_budget_is_not_predicted_between_limits(ask: Ask, swept: Answer) -> None:
    answer = ask("recommend", "out/sweep/run", "--slo", "p50_ttft:600", "--cost-model", COST_MODEL)
    assert answer.code == 2
    assert "predicts limits of requests, not tokens:400" in answer.err


def test_figures_are_drawn_of_all_kinds(ask: Ask, swept: Answer) -> None:
    assert ask("plot", "out/sweep/run").code == 0
    points = pd.read_csv("out/sweep/run/figures/p99_vs_limit.csv", dtype=str)
    assert list(dict.fromkeys(points["limit"])) == [
        *("4", "tokens 400", "tokens 800", "inflight 6, tokens 600", "no limit"),
    ]


def test_a_run_is_the_same_as_itself(ask: Ask, swept: Answer) -> None:
    answer = ask("compare", "out/sweep/run", "out/sweep/run")
    assert answer.code == 0, answer.out + answer.err
    Path("gate.toml").write_text(
        '[[rule]]\nmetric = "p99_ttft_ms"\nmax_ratio = 1.1\ncells = { admission = "tokens:400" }\n'
    )
    answer = ask(
        *("check", "out/sweep/run", "--baseline", "out/sweep/run", "--thresholds", "gate.toml"),
    )
    assert (answer.code, "tokens 400" in answer.out) == (0, True)


def test_both_forms_of_a_limit_end_with_2_and_one_line_that_names_both(ask: Ask) -> None:
    answer = ask("sweep", "--admission", "tokens:400", "--max-inflight", "4", "-o", "out")
    assert answer.code == 2
    assert answer.complaint.startswith("--admission 'tokens:400': contradicts --max-inflight 4")
    assert not Path("out").exists()


def test_a_running_servers_limit_is_not_ours_to_set(ask: Ask) -> None:
    answer = ask("run", "--admission", "tokens:400", "--target", "http://127.0.0.1:9/v1", "-o", "out")
    assert (answer.code, answer.complaint.split(":")[0]) == (2, "--admission 'tokens")


# ---- on the engine ----


def measured(n: int, **flags: Any) -> tuple[CellResult, Experiment]:
    """A burst of `n` requests of 5 prompt and 2 output tokens, none of which is served before all are sent."""
    engine = ScriptedEngine()
    made = experiment(num_requests=n, max_batch_size=4, **flags)
    (cell,) = made.cells
    load = burst(engine, n)
    result = InProcessTarget(engine, made).run(cell, load)
    frame: pd.DataFrame = record_table(result.requests, REQUEST_SCHEMA).to_pandas()
    return result._replace(requests=frame), made


def test_the_engine_keeps_the_budget_that_the_flag_asks_for() -> None:
    result, _ = measured(8, admission="tokens:30", pretok=True)
    rows = result.requests
    assert rows["admission"].unique().tolist() == ["tokens:30"]
    assert rows["outcome"].tolist() == ["completed"] * 4 + ["rejected"] * 4  # 28 of 30 tokens
    assert rows["reject_reason"].dropna().unique().tolist() == ["tokens"]
    assert (result.facts.token_limit, result.facts.peak_held_tokens) == (30, 28)
    assert [reason for reason in check_cell(rows, result.facts) if "send" not in reason] == []


def test_a_text_that_never_fits_is_a_refusal_of_a_later_stage() -> None:
    result, _ = measured(1, admission="tokens:6", tokenize_workers=0)
    (row,) = result.requests.to_dict("records")
    assert (row["outcome"], row["reject_reason"], row["reject_stage"]) == (
        *("rejected", "tokens-never-fits", "queued"),
    )
    assert row["rejected_s"] == row["ended_s"]
    assert row["reserved_s"] <= row["ended_s"]
    assert row["reserved_s"] <= row["released_s"]
    assert pd.isna(row["error"])
    assert [reason for reason in check_cell(result.requests, result.facts) if "send" not in reason] == []
