"""The command line without a model: what it refuses before one loads, and its exit codes on an engine without one."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import pandas as pd
import pytest

from roseinfer.bench import session
from roseinfer.bench.cli import main
from roseinfer.bench.store import RunFolder
from roseinfer.bench.target import InProcessTarget
from roseinfer.errors import RunError
from roseinfer.executor import StepPlan
from tests.bench.experiments import ScriptedDescription, ScriptedInferenceEngine


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line that a user gets to read."""
        (line,) = self.err.splitlines()
        assert line.startswith("roseinfer-bench: ")
        return line.removeprefix("roseinfer-bench: ")


Ask = Callable[..., Answer]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ask:
    """`roseinfer-bench` with these words, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def asked(*words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["roseinfer-bench", *words])
        with pytest.raises(SystemExit) as exit_:
            main()
        code = exit_.value.code
        assert code is None or isinstance(code, int)
        return Answer(code or 0, *capsys.readouterr())

    return asked


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes on to measure, and so to load a model, fails."""

    def measure(self: session.Session) -> None:
        raise AssertionError("went on to load a model")

    monkeypatch.setattr(session.Session, "measure", measure)


BAD_INPUT = [
    ("sweep --max-inflight -1", "--max-inflight '-1'"),
    ("sweep --max-inflight=", "--max-inflight ''"),
    ("sweep --max-inflight 0,sixteen", "--max-inflight '0,sixteen'"),
    ("run --max-inflight-requests x", "--max-inflight 'x'"),
    ("run --max-inflight 0,16", "--max-inflight '0,16'"),
    ("sweep --burst-size 0", "--burst-size '0'"),
    ("sweep --repeats many", "'--repeats' / '--repeat-runs': 'many'"),
    ("sweep --max-error-share much", "'--max-error-share': 'much'"),
    ("sweep --prompt-len 1021", "--prompt-len '1021': with --max-new-tokens 4 exceeds the context of 1024"),
    ("run --prompt Hello --prompt-repeats 1021", "--prompt '1021 tokens': with --max-new-tokens 4 exceeds"),
    ("sweep --kv-cache-tokens 32", "--kv-cache-tokens 32"),
    ("sweep --model builtin:gpt3", "--model 'builtin:gpt3'"),
    ("sweep --model no/such/model", "--model 'no/such/model'"),
    ("sweep --model weightless", "--model 'weightless': the folder has no weights"),
    ("sweep --model ~nobody-here/model", "--model '~nobody-here/model'"),
    ("sweep --output-dir file/below", "--output-dir 'file/below'"),
    ("sweep --experiment-name ../up", "--experiment-name '../up'"),
    ("sweep --run-id taken -o there", "--run-id 'taken'"),
    ("sweep --run-id a/b", "--run-id 'a/b'"),
    ("sweep --prompt-len 4 --prompt Hello", "--prompt-len '4': contradicts --prompt"),
    ("sweep --pretok --tokenize-workers 2", "--tokenize-workers 2: has nothing to do with --pretok"),
    ("sweep --no-such-flag 1", "--no-such-flag"),
    ("sweep --max-inflight", "--max-inflight"),
    ("no-such-command", "no-such-command"),
    ("sweep --slo p99_ttft", "--slo 'p99_ttft'"),
    ("sweep --slo p99_speed:250", "--slo 'p99_speed:250'"),
    ("sweep --metadata gpu", "--metadata 'gpu'"),
    ("sweep --device tpu", "--device 'tpu'"),
    ("sweep --resume there", "--resume 'there'"),
    ("sweep --resume nowhere", "--resume 'nowhere'"),
    ("sweep --resume broken", "--resume 'broken'"),
    ("sweep missing.toml", "'missing.toml': No such file"),
    ("sweep bad.toml", "bad.toml: max-inflght [0, 64]"),
    ("sweep file", "'file': not valid TOML"),
    ("sweep good.toml --prompt-len 4", "--prompt-len '4': contradicts --prompt"),
    ("plot there", "RUN 'there'"),
]


@pytest.fixture
def surroundings(tmp_path: Path) -> Path:
    """What the commands above stumble over."""
    (tmp_path / "file").write_text("a regular file")
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_text("{}")
    (tmp_path / "there" / "sweep" / "taken").mkdir(parents=True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text('{"schema_version": 1}')
    (tmp_path / "broken" / "cells").mkdir()
    (tmp_path / "bad.toml").write_text("max-inflght = [0, 64]")
    (tmp_path / "good.toml").write_text(
        'prompt = "Hello"\nmax-inflight = [0, 64]\nrepeats = 3\nburst-size = 7\n'
    )
    return tmp_path


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(("command", "names"), BAD_INPUT)
def test_bad_input_is_one_line_that_names_flag_and_value(
    ask: Ask, surroundings: Path, command: str, names: str
) -> None:  # case A10
    before = files_in(surroundings)
    answer = ask(*command.split(" "))
    assert answer.code == 2
    assert names in answer.complaint
    assert answer.out == ""
    assert files_in(surroundings) == before  # nothing is half-written


def test_bad_input_never_gets_as_far_as_importing_torch(surroundings: Path) -> None:
    script = """
import json, sys
from roseinfer.bench.cli import main
codes = []
for command in json.load(sys.stdin):
    sys.argv = ["roseinfer-bench", *command.split(" ")]
    try:
        main()
    except SystemExit as end:
        codes.append(end.code)
print(json.dumps([codes, sorted({"torch", "transformers", "matplotlib"} & sys.modules.keys())]))
"""
    commands = [command for command, _ in BAD_INPUT if not command.startswith("plot")]
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=surroundings,
    )
    assert json.loads(done.stdout) == [[2] * len(commands), []]
    assert "Traceback" not in done.stderr


def test_help_imports_nothing_that_is_slow() -> None:
    script = """
import sys
from roseinfer.bench.cli import app
app(["sweep", "--help"], standalone_mode=False)
slow = {"torch", "pandas", "numpy", "pyarrow", "rich", "asyncio", "tokenizers"}
print(sorted(slow & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert "0 means no limit" in " ".join(done.stdout.split())
    assert done.stdout.endswith("\n[]\n")


@pytest.mark.usefixtures("no_model")
def test_a_full_disk_is_found_before_a_model_loads(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("roseinfer.bench.store.tempfile.TemporaryFile", full)
    answer = ask("sweep", "-o", "out")
    assert (answer.code, answer.complaint) == (2, "--output-dir 'out': No space left on device")


def test_no_command_is_an_error_with_help(ask: Ask) -> None:
    answer = ask()
    assert answer.code == 2
    assert answer.err.startswith("Usage: ")
    assert answer.out == ""


def test_version(ask: Ask) -> None:
    answer = ask("--version")
    assert answer.code == 0
    assert answer.out.startswith("roseinfer-bench ")


@pytest.mark.usefixtures("no_model")
def test_a_dry_run_prints_the_cells_and_measures_nothing(ask: Ask, surroundings: Path) -> None:
    answer = ask("sweep", "--max-inflight", "0,16", "--burst-size", "8,32", "--dry-run")
    assert answer.code == 0
    assert answer.out.splitlines() == [
        "inflight_none-burst_8-prompt_32-output_4: 8 requests, 8 repeats",
        "inflight_none-burst_32-prompt_32-output_4: 32 requests, 8 repeats",
        "inflight_16-burst_8-prompt_32-output_4: 8 requests, 8 repeats",
        "inflight_16-burst_32-prompt_32-output_4: 32 requests, 8 repeats",
    ]
    assert "results" not in files_in(surroundings)


@pytest.mark.usefixtures("no_model")
def test_flags_override_the_file(ask: Ask, surroundings: Path) -> None:
    answer = ask("sweep", "good.toml", "--repeats", "2", "--burst-size", "9", "--dry-run")
    assert answer.out.splitlines() == [
        "inflight_none-burst_9-output_4: 9 requests, 2 repeats",
        "inflight_64-burst_9-output_4: 9 requests, 2 repeats",
    ]


# ---- on an engine without a model ----


SIZES = "--max-inflight 0,2 --burst-size 4 --repeats 2 --prompt-len 3 --run-id run -o out"
"""A sweep of four cells."""


class Lab:
    """`ask`, with a scripted engine in place of a model."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.engine = ScriptedInferenceEngine()
        self.load: Callable[..., ScriptedInferenceEngine] = lambda model, **_: self.engine

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
    stands_for_it = SimpleNamespace(from_pretrained=lambda model, **flags: made.load(model, **flags))
    monkeypatch.setitem(sys.modules, "roseinfer.engine", SimpleNamespace(InferenceEngine=stands_for_it))
    monkeypatch.setattr(
        session, "draw_figures", lambda folder, place: [folder.path / "figures" / "a_figure.png"]
    )
    monkeypatch.setattr("roseinfer.bench.validity._BURST_SPREAD_S", 60.0)  # a loaded machine sends slowly
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
    monkeypatch.setattr("roseinfer.bench.validity._BURST_SPREAD_S", 0.0)
    monkeypatch.setattr("roseinfer.bench.validity._BURST_SPREAD_S_PER_REQUEST", 0.0)
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
    write, calls = RunFolder.write_cell, iter(range(100))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def third_fails(self: RunFolder, *args: Any) -> None:
        if next(calls) == 2:
            monkeypatch.setattr("roseinfer.bench.store.pq.ParquetWriter", full)
        write(self, *args)

    monkeypatch.setattr(RunFolder, "write_cell", third_fails)
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
    interrupted.load = lambda *_, **__: pytest.fail("loaded a model")
    answer = interrupted.resume(*words.split())
    assert answer.code == 2
    assert says in answer.complaint


def test_resuming_with_other_code_says_so_before_a_model_loads(
    interrupted: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted.load = lambda *_, **__: pytest.fail("loaded a model")
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
    def stopped(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    lab.load = stopped
    answer = lab.sweep()
    assert (answer.code, answer.complaint) == (130, "interrupted before anything was measured")
    assert not Path("out").exists()


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
