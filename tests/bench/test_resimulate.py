"""A run played again on a virtual clock: the same requests at the same limits and sizes; and the commands over it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

from roseinfer.bench import plots
from roseinfer.bench.cli import _prediction_errors
from roseinfer.bench.engine_sizes import EngineSizes
from roseinfer.bench.records import REQUEST_SCHEMA
from roseinfer.bench.resimulate import at_limits, predicted, resimulated
from roseinfer.bench.sides import Side, differing_rows
from roseinfer.bench.store import RunFolder
from roseinfer.errors import InputError
from roseinfer.sim.cost_model import COMPOSITION, CostModel, Fitted, StepCost, SubmitCost
from tests.bench.asking import Ask, ask_in
from tests.bench.stored import cells_in, stopped

COST = CostModel("a tenth of a second a step", StepCost(0.1, 0.001, 0.0, 0.01, 0.0))
SLOWER = CostModel("slower", StepCost(0.11, 0.0011, 0.0, 0.011, 0.0))


@pytest.fixture
def cost_files(tmp_path: Path) -> None:
    """cost.json and slower.json where `ask` works."""
    COST.write(tmp_path / "cost.json")
    SLOWER.write(tmp_path / "slower.json")


@pytest.fixture
def simulate(ask: Ask, tmp_path: Path, cost_files: None) -> Callable[..., RunFolder]:
    """A sweep on a simulated engine, with these flags; `sim` when it stands for a measured run."""

    def simulated(flags: str, run_id: str = "run") -> RunFolder:
        words = f"sweep --target sim --cost-model cost.json --quiet --run-id {run_id} {flags}"
        answer = ask(*words.split())
        assert answer.code == 0, answer.err
        return RunFolder.open(tmp_path / "results" / "sweep" / run_id)

    return simulated


def changed(run: RunFolder, change: Callable[[dict[str, Any]], None]) -> RunFolder:
    """The run with another run.json."""
    path = run.path / "run.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return RunFolder.open(run.path)


@pytest.mark.parametrize(
    "flags",
    [
        "--max-inflight 4,0 --burst-size 8,16 --prompt-len 8 --repeats 2",
        "--request-rate 20,40 --num-requests 40 --max-inflight 8 --repeats 1 --prompt-len-dist uniform:0.5",
        "--max-concurrency 4 --num-requests 20 --ramp 1 --repeats 2",
        "--max-concurrency 3 --duration 2 --repeats 1",
        "--burst-size 12 --max-concurrency 6 --timeout 1.5 --max-batch-size 2 --repeats 1",
        "--request-rate 20 --burst-size 8 --burst-interval 1 --duration 3 --repeats 1",
    ],
)
def test_a_simulated_run_is_predicted_exactly_by_its_own_cost_model(
    simulate: Callable[..., RunFolder], flags: str
) -> None:
    run = simulate(flags)
    rows = predicted(run, COST)
    again = Side(run)
    again.requests = rows
    differing, of, first = differing_rows(again, Side(run))
    assert (differing, of, first) == (0, len(run.read_requests()), None)
    assert rows.columns.tolist() == REQUEST_SCHEMA.names
    assert (rows["target"] == "sim").all()


def test_cells_can_be_chosen(simulate: Callable[..., RunFolder]) -> None:
    run = simulate("--max-inflight 4,0 --burst-size 8 --repeats 2")
    (one, _) = run.read_requests()["cell_id"].unique()
    assert predicted(run, COST, cells=[one])["cell_id"].unique().tolist() == [one]
    with pytest.raises(InputError, match="'nothing'"):
        predicted(run, COST, cells=["nothing"])


def test_at_other_limits_only_the_times_of_single_tokens_are_left_out(
    simulate: Callable[..., RunFolder],
) -> None:
    run = simulate("--max-inflight 4,0 --burst-size 8 --repeats 2")
    lists = ["token_times_s", "chunk_times_s", "chunk_tokens"]
    key = ["cell_id", "repeat", "request_index"]
    rows, whole = (
        found.sort_values(key, ignore_index=True)
        for found in (at_limits(run, COST, [4, None]), predicted(run, COST))
    )
    assert rows[lists].isna().all(axis=None)
    pd.testing.assert_frame_equal(rows.drop(columns=lists), whole.drop(columns=lists))
    assert set(at_limits(run, COST, [2])["max_inflight"]) == {2}


def test_the_sizes_that_the_engine_chose_are_taken(simulate: Callable[..., RunFolder]) -> None:
    run = simulate("--burst-size 8 --prompt-len 32 --max-batch-size 8 --repeats 1")

    def smaller(content: dict[str, Any]) -> None:
        content["facts"][0]["facts"]["max_num_batched_tokens"] = 64

    steps = resimulated(run, COST).steps
    assert steps["prefill_tokens"].max() == 8 * 32
    assert resimulated(changed(run, smaller), COST).steps["prefill_tokens"].max() == 64


def as_http(content: dict[str, Any]) -> None:
    """As if it had been measured on a server."""
    content["target"] = "http"
    content["configuration"] |= {"target": "http://remote/v1", "api": "completions", "retry": "none"}
    for name in ("max-batch-size", "max-active-requests"):
        del content["configuration"][name]
    for entry in content["facts"]:
        for name in ("max_num_batched_tokens", "kv_cache_tokens"):
            del entry["facts"][name]


def test_of_a_server_the_sizes_are_asked_for(simulate: Callable[..., RunFolder]) -> None:
    run = changed(simulate("--burst-size 8 --prompt-len 8 --repeats 1"), as_http)
    with pytest.raises(InputError, match="does not say how large its batches are"):
        predicted(run, COST)
    steps = resimulated(run, COST, sizes=EngineSizes(max_batch_size=4)).steps
    assert (steps["prefill_requests"] + steps["decode_requests"]).max() == 4


def test_clients_come_back_as_they_did(simulate: Callable[..., RunFolder]) -> None:
    run = simulate(
        "--burst-size 8 --repeats 2 --max-inflight 2 --retry exponential --retry-budget 0.5 --per-try-timeout 2"
    )
    columns = ["request_index", "attempts", "sent_s", "last_sent_s", "outcome"]
    expected, found = (rows[columns] for rows in (run.read_requests(), predicted(run, COST)))
    assert (expected["attempts"] > 1).any()
    pd.testing.assert_frame_equal(found, expected)


def test_a_class_that_was_never_drawn_may_have_a_deadline(simulate: Callable[..., RunFolder]) -> None:
    run = simulate(
        "--burst-size 1 --priority-mix high:0.9,low:0.1 --ttft-deadline high:5s,low:9s --repeats 1"
    )
    assert run.read_requests()["priority"].nunique() == 1
    assert predicted(run, COST)["outcome"].tolist() == ["completed"]


def test_what_was_interrupted_is_not_predicted(simulate: Callable[..., RunFolder], tmp_path: Path) -> None:
    run = stopped(simulate("--burst-size 8 --max-inflight 4,0 --repeats 1"), tmp_path / "stopped")
    (finished,) = run.finished_cells()
    found = resimulated(run, COST)
    assert cells_in(found.requests) == cells_in(found.steps) == {finished}


def test_a_repeat_of_which_nothing_was_finished_is_not_predicted_at_any_limit(
    simulate: Callable[..., RunFolder], tmp_path: Path
) -> None:
    run = stopped(simulate("--burst-size 8 --max-inflight 4 --repeats 2"), tmp_path / "stopped")
    assert set(at_limits(run, COST, [2, 4])["repeat"]) == {0}


def test_predicted_over_measured_leaves_out_what_was_interrupted(
    simulate: Callable[..., RunFolder], tmp_path: Path
) -> None:
    run = stopped(simulate("--burst-size 8 --max-inflight 4 --repeats 2"), tmp_path / "stopped")
    (cell,) = _prediction_errors(run, tmp_path / "slower.json", None).to_dict("records")
    assert (cell["offered"], cell["measured_n_ttft"], cell["predicted_n_ttft"]) == (8, 4, 4)


def test_a_run_without_its_workload_is_refused(simulate: Callable[..., RunFolder]) -> None:
    run = simulate("--burst-size 8 --repeats 1")
    (run.path / "workload.parquet").unlink()
    with pytest.raises(InputError, match="is not finished"):
        predicted(run, COST)


def test_an_empty_run_is_refused(tmp_path: Path) -> None:  # case G13
    with pytest.raises(InputError, match="no finished cell"):
        predicted(RunFolder.create(tmp_path, "burst", "run1", {"configuration": {}}), COST)


def test_steps_never_seen_in_the_fit_are_told(simulate: Callable[..., RunFolder]) -> None:
    run = simulate("--burst-size 8 --prompt-len 8 --max-new-tokens 4 --repeats 1")
    bounds = dict.fromkeys(COMPOSITION, (0.0, 1000000000.0)) | {"prefill_tokens": (0.0, 1.0)}
    fitted = Fitted(("other",), 100, bounds, None, None, None)
    (note,) = resimulated(run, CostModel("fitted", COST.step, fitted=fitted)).notes
    assert note == (
        "predicted steps lie outside of what the cost model was fitted on: 25.0 % in prefill_tokens"
    )
    assert resimulated(run, COST).notes == []


def test_what_a_prefix_cache_spared_the_measured_engine_is_told(
    simulate: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:  # case I6
    run = simulate("--burst-size 4 --prompt-len 8 --repeats 1")
    assert resimulated(run, COST).notes == []
    read = RunFolder.read_requests
    monkeypatch.setattr(
        RunFolder, "read_requests", lambda self, **flags: read(self, **flags).assign(cached_tokens=2)
    )
    assert resimulated(run, COST).notes == [
        "25.0 % of the measured prompt tokens came from a prefix cache, simulated ones are all computed"
    ]


def test_text_is_tokenised_and_token_ids_are_not(simulate: Callable[..., RunFolder]) -> None:
    run = simulate("--burst-size 8 --prompt-len 8 --repeats 1")
    costly = CostModel("costly text", COST.step, submit=SubmitCost(token_s=0.01))
    sent = {}
    for pretok in (False, True):

        def measured(content: dict[str, Any], pretok: bool = pretok) -> None:
            content["target"] = "engine"
            content["configuration"] |= {"target": "engine", "pretok": pretok, "tokenize-workers": 0}

        rows = predicted(changed(run, measured), costly)
        sent[pretok] = rows["sent_s"].max()
    assert sent[False] == pytest.approx(7 * 8 * 0.01)  # the sender tokenises one after another
    assert sent[True] == 0


# --- the commands -----------------------------------------------------------------------------------------


def test_plot_draws_predicted_over_measured(
    simulate: Callable[..., RunFolder], ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("points", "nines", "gantt", "timeline"):  # of which other tests see more than enough
        nothing = pd.DataFrame(columns=["combination"])
        monkeypatch.setattr(plots, f"{other}_data", lambda *_, nothing=nothing: nothing)
    run = simulate("--burst-size 128 --max-inflight 64,0 --repeats 2")
    answer = ask("plot", str(run.path), "--cost-model", "slower.json", "--no-explain", "-o", "figures")
    assert answer.code == 0
    assert "figures/prediction.png" in answer.out.splitlines()
    assert "p99 TTFT 10.0 %" in answer.err
    assert "Refusals: as many as measured, in every cell." in answer.err
    rows = pd.read_csv("figures/prediction.csv")
    assert rows.loc[rows["measure"] == "ttft", "error"].dropna().tolist() == pytest.approx([0.1] * 6)


def test_plot_predicts_a_server_with_the_sizes_that_its_user_says(
    simulate: Callable[..., RunFolder], ask: Ask
) -> None:
    run = changed(simulate("--burst-size 8 --repeats 1"), as_http)
    words = ("plot", str(run.path), "-o", "figures", "--cost-model", "cost.json")
    assert "--max-batch-size N does" in ask(*words).complaint
    assert ask(*words[:-2], "--max-batch-size", "4").complaint == (
        "--max-batch-size 4: needs --cost-model, to predict with"
    )
    assert ask(*words, "--max-batch-size", "4", "--max-num-batched-tokens", "4").complaint == (
        "--max-num-batched-tokens 4: must exceed --max-batch-size (4)"
    )


def test_plot_refuses_a_cost_model_of_another_schema(
    simulate: Callable[..., RunFolder], ask: Ask, tmp_path: Path
) -> None:
    run = simulate("--burst-size 8 --repeats 1")
    (tmp_path / "old.json").write_text('{"name": "old", "constant_s": 1}')
    answer = ask("plot", str(run.path), "--cost-model", "old.json", "-o", "figures")
    assert answer.code == 2
    assert answer.complaint.startswith("--cost-model 'old.json': schema version")
    assert not (tmp_path / "figures").exists()


class Pair(NamedTuple):
    """A run as an engine left it, and a simulated one, which has other limits too."""

    measured: str
    simulated: str


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    COST.write(folder / "cost.json")
    for name, limits in {"simulated": "64,32", "real": "64,0"}.items():
        words = (
            f"sweep --target sim --cost-model cost.json --quiet --run-id {name} --burst-size 128 --repeats 2"
        )
        assert ask_in(folder, *words.split(), "--max-inflight", limits).code == 0
    place = folder / "results" / "sweep" / "measured"
    shutil.move(place.with_name("real"), place)
    changed(RunFolder.open(place), lambda content: content.update(target="engine", run_id="measured"))
    return Pair(str(place), str(place.with_name("simulated")))


@pytest.mark.parametrize("order", [1, -1])
def test_compare_says_how_far_a_simulated_run_is_from_a_measured_one(
    ask: Ask, tmp_path: Path, pair: Pair, order: int
) -> None:
    answer = ask("compare", *pair[::order], "-o", "figures")
    assert answer.code == 0
    assert answer.out.splitlines()[0].split() == ["max", "inflight", "64"]
    assert (
        "Predicted over measured, median over 1 cell of the size of the error: p50 TTFT 0.0 %" in answer.out
    )
    assert "Note: only in measured: no limit" in answer.out
    assert "Note: only in simulated: limit 32" in answer.out
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        *("prediction_of_measured.csv", "prediction_of_measured.png", "prediction_of_measured.svg")
    }


def test_compare_of_a_prediction_as_json_and_markdown(ask: Ask, pair: Pair) -> None:
    found = json.loads(ask("compare", *pair, "-o", "figures", "--json").out)
    assert (found["measured"], found["predicted"]) == ("measured", "simulated")
    assert found["verdict"]["median_error"]["p99_ttft_ms"] == 0
    page = ask("compare", *pair, "-o", "figures", "--markdown", "-").out
    assert page.startswith("### measured as predicted by simulated\n")


def test_compare_of_a_prediction_refuses_a_bad_margin(ask: Ask, pair: Pair) -> None:
    answer = ask("compare", *pair, "--margin", "0")
    assert (answer.code, "--margin 0.0" in answer.complaint) == (2, True)
