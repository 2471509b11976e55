"""What a command does, prints and leaves behind, from the model's loading on: on a scripted engine in its place."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pandas as pd
import pytest

from roseinfer.bench import session
from roseinfer.bench.store import RunFolder
from roseinfer.bench.target import InProcessTarget
from roseinfer.errors import InputError, RunError
from roseinfer.executor import StepPlan
from roseinfer.sim.cost_model import CostModel, StepCost
from tests.bench.asking import Answer, Ask
from tests.bench.experiments import ScriptedDescription, ScriptedInferenceEngine

SIZES = "--max-inflight 0,2 --burst-size 4 --repeats 2 --prompt-len 3 --run-id run -o out"
"""A sweep of four cells."""


class Lab:
    """`ask`, with a scripted engine in place of a model."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.engine = ScriptedInferenceEngine()
        self.load: Callable[[], ScriptedInferenceEngine] = lambda: self.engine

    def from_pretrained(self, model: str, **_: object) -> ScriptedInferenceEngine:
        return self.load()

    def sweep(self, *words: str) -> Answer:
        return self.ask("sweep", *SIZES.split(), "--quiet", *words)

    def resume(self, *words: str) -> Answer:
        return self.ask("sweep", "--resume", "out/sweep/run", "--quiet", *words)

    @property
    def folder(self) -> RunFolder:
        return RunFolder.open(Path("out/sweep/run"))


@pytest.fixture
def lab(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(ask)
    monkeypatch.setitem(sys.modules, "roseinfer.engine", SimpleNamespace(InferenceEngine=made))
    monkeypatch.setattr(
        session, "draw_figures", lambda folder, place: [folder.path / "figures" / "a_figure.png"]
    )
    monkeypatch.setattr("roseinfer.bench.pacing._BURST_SPREAD_S", 60.0)  # a loaded machine sends slowly
    monkeypatch.setattr("roseinfer.bench.pacing._SEND_LAG_S", 60.0)
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)  # all of torch is on this heap, in every test
    return made


def test_a_valid_sweep_ends_with_0_and_prints_table_conclusion_and_places(lab: Lab) -> None:
    answer = lab.sweep()
    assert answer.code == 0
    assert answer.err == ""  # --quiet
    lines = answer.out.splitlines()
    assert lines[0] == "burst 4, prompt tokens 3, new tokens 4"
    assert any(
        line.startswith("With max inflight 2 instead of no limit, throughput went from") for line in lines
    )
    assert lines[-2:] == ["Run: out/sweep/run", "Figures: out/sweep/run/figures: a_figure (.png, .svg, .csv)"]


def test_progress_is_plain_lines_where_there_is_no_terminal(lab: Lab) -> None:
    answer = lab.ask(*"sweep --max-inflight 0,2 --burst-size 4 --repeats 2 --prompt-len 3".split())
    lines = [line.split(" s  ")[1] for line in answer.err.splitlines()]
    assert lines[:2] == ["loading the model", "warm-up 1/1"]
    assert [line.split(",")[0] for line in lines[2:-2]] == [f"cell {number} of 4" for number in (1, 2, 3, 4)]
    assert lines[-2:] == ["summing up", "drawing"]


def test_json_is_all_of_stdout_and_plain_json(lab: Lab) -> None:
    answer = lab.sweep("--json", "--slo", "p99_ttft:250")
    printed = json.loads(answer.out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert "max inflight" in answer.err
    rows = printed["summary"]
    assert [(row["max_inflight"], row["repeat"]) for row in rows] == [
        *((2, 0), (2, 1), (2, None)),
        *((None, 0), (None, 1), (None, None)),
    ]
    assert all(type(row["offered"]) is int for row in rows)
    assert printed["valid"] is True
    assert printed["run"] == "out/sweep/run"
    assert len(printed["conclusions"]) == len(printed["recommendations"]) == 1


def test_the_recommended_limit_is_printed(lab: Lab) -> None:
    answer = lab.sweep("--slo", "p99_ttft:60000", "--burst-size", "60")
    assert "recommended for p99_ttft:60000: no limit." in answer.out


def test_an_invalid_measurement_is_written_said_and_ends_with_4(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roseinfer.bench.pacing._BURST_SPREAD_S", 0.0)
    monkeypatch.setattr("roseinfer.bench.pacing._BURST_SPREAD_S_PER_REQUEST", 0.0)
    answer = lab.sweep()
    assert answer.code == 4
    assert answer.out.count("\nINVALID: ") == 2  # a line per cell, not per repeat
    assert lab.folder.is_done


def test_nothing_completed_ends_with_5(lab: Lab) -> None:  # cases D2, G13
    def fail(plan: StepPlan) -> None:
        raise ValueError("scripted failure")

    lab.engine.compute = fail
    answer = lab.sweep()
    assert answer.code == 5
    assert "more than 1 % together" in answer.out  # case D1
    assert "Traceback" not in answer.err


def test_a_disk_that_fills_up_meanwhile_ends_with_1_and_leaves_no_half_cell(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, calls = RunFolder.cell, iter(range(100))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def third_fails(self: RunFolder, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            monkeypatch.setattr("roseinfer.bench.row_files.pq.ParquetWriter", full)
        return cell(self, *args, **kwargs)

    monkeypatch.setattr(RunFolder, "cell", third_fails)
    answer = lab.sweep()
    assert answer.code == 1
    assert answer.complaint.endswith("No space left on device")
    assert len(lab.folder.finished_cells()) == 2
    assert len(list(Path("out/sweep/run/cells").iterdir())) == 2


def test_an_engine_that_cannot_be_set_up_leaves_no_run_behind(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(**_: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(lab.engine, "make_executor", no_memory)
    answer = lab.sweep()
    assert answer.code == 1
    assert "can't allocate memory" in answer.complaint
    assert not Path("out").exists()


def test_results_are_printed_also_where_figures_cannot_be_drawn(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: RunFolder, place: Path | None) -> list[Path]:
        raise RunError("figures could not be written")

    monkeypatch.setattr(session, "draw_figures", fail)
    answer = lab.sweep()
    assert (answer.code, answer.complaint) == (1, "figures could not be written")
    assert "throughput (tokens/s)" in answer.out


def test_run_prints_a_report_per_repeat(lab: Lab) -> None:
    answer = lab.ask(*"run --max-inflight 2 --num-requests 4 --repeats 3 --prompt-len 3 --quiet".split())
    assert answer.code == 0
    assert answer.out.count("=== streaming benchmark ===\n") == 3
    assert answer.out.count("\nTokenize workers: 1\n") == 3


def test_an_experiment_file_names_its_runs_and_may_name_them_otherwise(lab: Lab) -> None:
    sizes = 'burst-size = 4\nrepeats = 1\nprompt-len = 3\noutput-dir = "out"\nrun-id = "run"\nquiet = true\n'
    Path("question.toml").write_text(sizes)
    Path("other.toml").write_text(sizes + 'experiment-name = "mine"\n')
    assert "Run: out/question/run\n" in lab.ask("sweep", "question.toml").out
    assert "Run: out/mine/run\n" in lab.ask("sweep", "other.toml").out
    assert "Run: out/flag/run\n" in lab.ask("sweep", "other.toml", "--experiment-name", "flag").out


def test_metadata_and_configuration_are_kept_with_the_run(lab: Lab) -> None:
    lab.sweep("--metadata", "rack=7", "--metadata", "why=a=b")
    manifest = lab.folder.manifest
    assert manifest["metadata"] == {"rack": "7", "why": "a=b"}
    assert manifest["configuration"]["max-inflight"] == "0,2"
    assert manifest["model"]["source"] == "builtin"
    assert manifest["command"].startswith("roseinfer-bench sweep --max-inflight 0,2")


def test_a_run_id_that_exists_is_refused(lab: Lab) -> None:
    assert lab.sweep().code == 0
    answer = lab.sweep()
    assert (answer.code, answer.complaint) == (2, "--run-id 'run': sweep has a run of this id")


# ---- loads of other shapes ----


@pytest.mark.parametrize(
    "load",
    [
        "--request-rate 500 --num-requests 20",
        "--request-rate 500 --arrival constant --duration 0.05",
        "--burst-size 4 --burst-interval 0.02 --num-requests 12",
        "--request-rate 200 --burst-size 4 --burst-interval 0.02 --duration 0.05",
        "--max-concurrency 3 --num-requests 20",
        "--max-concurrency 3 --duration 0.05",
        "--request-rate 500 --num-requests 20 --max-concurrency 2",
        "--burst-size 8 --timeout 30 --prompt-len-dist uniform:0.5",
    ],
)
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_every_shape_of_load_is_measured_and_kept(lab: Lab, command: str, load: str) -> None:
    limits = "--max-inflight 8" if command == "run" else "--max-inflight 0,8"
    words = f"{command} {limits} --prompt-len 4 --repeats 2 --quiet --run-id run -o out {load}"
    answer = lab.ask(*words.split())
    folder = RunFolder.open(Path("out", command, "run"))
    assert answer.code in (0, 4), answer.err  # how well a loaded machine keeps a schedule is not asked
    assert folder.is_done
    assert folder.manifest["target"] == "engine"
    assert set(folder.read_requests()["outcome"]) <= {"completed", "rejected"}
    assert len(pd.read_parquet(folder.path / "workload.parquet")) >= len(folder.read_requests()) / 2


def test_a_dry_run_says_what_decides_how_many_requests_there_are(lab: Lab) -> None:
    answer = lab.ask(*"sweep --request-rate 5,10 --duration 30 --max-inflight 4 --dry-run".split())
    assert answer.out.splitlines() == [
        "inflight_4-prompt_32-output_4-rate_5: requests for 30 s, 8 repeats",
        "inflight_4-prompt_32-output_4-rate_10: requests for 30 s, 8 repeats",
    ]


def test_a_goal_of_single_requests_is_kept_and_reaches_the_table(lab: Lab) -> None:  # case D4
    answer = lab.sweep("--goodput", "ttft:60000", "--goodput", "e2el:60000")
    assert "goodput, share of offered" in answer.out
    assert lab.folder.manifest["goodput"] == ["ttft:60000", "e2el:60000"]
    assert lab.resume().out == answer.out  # and it is not asked for again


def test_a_goal_that_is_none_is_refused_before_a_model_loads(lab: Lab) -> None:
    lab.load = lambda: pytest.fail("loaded a model")
    answer = lab.sweep("--goodput", "speed:250")
    assert (answer.code, answer.complaint.split(":")[0]) == (2, "--goodput 'speed")


# ---- resuming ----


@pytest.fixture
def interrupted(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A sweep of four cells that its user stopped in the third."""
    run, calls = InProcessTarget.run, iter(range(100))

    def stopped(self: Any, *args: Any) -> Any:
        if next(calls) == 3:  # the first call is the warm-up
            raise KeyboardInterrupt
        return run(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(InProcessTarget, "run", stopped)
        answer = lab.sweep("--slo", "p99_ttft:250")
    assert answer.code == 130
    assert answer.complaint == (
        "interrupted; 2 of 4 cells are on disk. To go on: roseinfer-bench sweep --resume out/sweep/run"
    )
    return lab


def test_an_interrupted_sweep_goes_on_where_it_was(interrupted: Lab) -> None:
    before = interrupted.folder.finished_cells()
    answer = interrupted.resume()
    assert answer.code == 0
    assert "p99_ttft:250" in answer.out  # its goal was kept
    assert interrupted.folder.is_done
    assert before < interrupted.folder.finished_cells()
    assert len(interrupted.folder.read_requests()) == 4 * 4


@pytest.mark.usefixtures("interrupted")
def test_a_dry_run_says_what_is_left(interrupted: Lab) -> None:
    lines = interrupted.resume("--dry-run").out.splitlines()
    assert sum(int(line.split()[-2]) for line in lines) == 2
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--max-inflight 0,4", "--max-inflight was 0,2, now 0,4"),
        ("--seed 5", "--seed was 0, now 5"),
        ("--repeats 3", "--repeats was 2, now 3"),
        ("--output-dir else", "--output-dir 'else': contradicts --resume"),
        ("--run-id new", "--run-id 'new': contradicts --resume"),
        ("--metadata a=b", "--metadata ['a=b']: contradicts --resume"),
        ("some.toml", "EXPERIMENT.toml 'some.toml': contradicts --resume"),
    ],
)
def test_resuming_with_other_flags_says_what_differs_before_a_model_loads(
    interrupted: Lab, words: str, says: str
) -> None:
    interrupted.load = lambda: pytest.fail("loaded a model")
    answer = interrupted.resume(*words.split())
    assert answer.code == 2
    assert says in answer.complaint


def test_resuming_with_other_code_says_so_before_a_model_loads(
    interrupted: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted.load = lambda: pytest.fail("loaded a model")
    monkeypatch.setattr("roseinfer.bench.environment._source_sha256", lambda: "other")
    answer = interrupted.resume()
    assert answer.code == 2
    assert "the code of roseinfer changed" in answer.complaint


def test_resuming_with_another_model_behind_the_name_says_so(interrupted: Lab) -> None:
    interrupted.engine.description = ScriptedDescription(dtype="bfloat16")
    answer = interrupted.resume()
    assert answer.code == 2
    assert "model dtype was float32, now bfloat16" in answer.complaint
    assert len(interrupted.folder.finished_cells()) == 2


def test_resuming_a_finished_run_prints_its_results_again(lab: Lab) -> None:
    first = lab.sweep().out
    assert lab.resume().out == first


def test_a_user_who_stops_before_anything_is_measured_is_told_so(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped() -> NoReturn:
        raise KeyboardInterrupt

    lab.load = stopped
    answer = lab.sweep()
    assert (answer.code, answer.complaint) == (130, "interrupted before anything was measured")
    assert not Path("out").exists()


def test_a_run_that_another_process_measures_is_not_resumed(interrupted: Lab) -> None:
    with interrupted.folder.claimed():
        answer = interrupted.resume()
    assert (answer.code, answer.complaint) == (
        2,
        "--resume 'out/sweep/run': another process is measuring it",
    )
    assert interrupted.resume().code == 0


def test_a_new_run_is_claimed_while_it_is_measured(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    run, complaints = InProcessTarget.run, []

    def measured(self: Any, *args: Any) -> Any:
        if Path("out/sweep/run/run.json").exists():  # not yet in the warm-up
            with pytest.raises(InputError, match="another process is measuring it") as error:
                lab.folder.claimed().__enter__()
            complaints.append(error.value)
        return run(self, *args)

    monkeypatch.setattr(InProcessTarget, "run", measured)
    assert lab.sweep().code == 0
    assert len(complaints) == 4


def test_a_resumed_run_needs_its_files_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = tmp_path / "traces" / "code.csv"
    trace.parent.mkdir()
    stamps = [f"2023-11-16 18:17:03.{n}000000,5,2" for n in range(6)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *stamps, ""]))

    def stopped(self: Any, *args: Any) -> NoReturn:
        raise KeyboardInterrupt

    words = "--max-inflight 0,2 --repeats 2 --warmup-runs 0 --run-id run -o out --quiet".split()
    with monkeypatch.context() as patch:
        patch.setattr(InProcessTarget, "run", stopped)
        answer = lab.ask("sweep", *words, "--trace", str(trace))
    assert answer.complaint.endswith(f"sweep --resume out/sweep/run --trace {trace}")
    assert lab.folder.manifest["configuration"]["trace"] == "code.csv"
    assert str(tmp_path) not in (lab.folder.path / "run.json").read_text()
    assert "was made with --trace code.csv" in lab.resume().complaint
    answer = lab.resume("--trace", str(trace))
    assert answer.code == 0, answer.err
    assert len(lab.folder.read_requests()) == 4 * 6

    trace.write_text(trace.read_text().replace(",5,2", ",6,2"))
    assert "the workload is another one" in lab.resume("--trace", str(trace)).complaint


KILLED_SWEEP = """
import itertools, sys, threading, types
from roseinfer.bench.target import InProcessTarget
from tests.bench.experiments import ScriptedInferenceEngine

def run(self, cell, workload):
    if next(bursts) == 3:  # the first was the warm-up
        self._engine._engine.compute = lambda plan: (print("in the third cell", flush=True), threading.Event().wait())
    return measured(self, cell, workload)

bursts, measured = itertools.count(), InProcessTarget.run
InProcessTarget.run = run
sys.modules["roseinfer.engine"] = types.SimpleNamespace(InferenceEngine=ScriptedInferenceEngine)
from roseinfer.bench.cli import main
main()
"""


def test_a_killed_sweep_loses_the_running_cell_only_and_goes_on(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = [sys.executable, "-c", KILLED_SWEEP, "sweep", *SIZES.split(), "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the third cell\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    before = lab.folder.read_requests()
    assert len(lab.folder.finished_cells()) == 2
    assert len(before) == 2 * 4

    assert lab.resume().code == 0
    after = lab.folder.read_requests()
    assert lab.folder.is_done
    assert len(after) == 4 * 4
    pd.testing.assert_frame_equal(after.merge(before[["cell_id", "repeat", "request_index"]]), before)


def test_a_cost_model_beside_an_engine_makes_no_simulation_of_it(lab: Lab) -> None:
    CostModel("made up", StepCost(0.001, 0.0, 0.0, 0.0, 0.0)).write(Path("cost.json"))
    flags = "--burst-size 4 --prompt-len 3 --run-id run -o out --quiet --cost-model cost.json".split()
    answer = lab.ask("sweep", *flags, "--repeats", "1", "--admission", "none,slo:ttft=100s")
    assert answer.code == 0
    requests = lab.folder.read_requests()
    assert set(requests["target"]) == {"in-process"}
    assert requests.groupby("admission")["predicted_ttft_s"].count().to_dict() == {
        "none": 0,
        "slo:ttft=100s": 4,
    }


def test_a_cost_model_that_is_none_is_refused_before_a_model_loads(lab: Lab) -> None:
    Path("cost.json").write_text("{}")
    lab.load = lambda: pytest.fail("a model was loaded")
    flags = "--burst-size 4 --prompt-len 3 -o out --cost-model cost.json --admission aimd".split()
    answer = lab.ask("sweep", *flags)
    assert answer.code == 2
    assert answer.complaint.startswith("--cost-model 'cost.json'")


def test_a_run_with_classes_has_a_table_of_them_and_the_reasons_of_refusals(lab: Lab) -> None:
    flags = (
        "--burst-size 12 --prompt-len 3 --repeats 1 --run-id run -o out --quiet --max-batch-size 1".split()
    )
    mix = ["--priority-mix", "high:0.4,low:0.6", "--goodput", "ttft:60000"]
    answer = lab.ask("sweep", *flags, *mix, "--admission", "inflight:3+priority")
    assert "By class, burst 12, prompt tokens 3, new tokens 4" in answer.out
    assert "Good: served with ttft:60000 (ms)." in answer.out
    assert set(lab.folder.read_requests()["priority"]) == {"high", "low"}
    assert lab.folder.read_workload(["priority"]) is not None
