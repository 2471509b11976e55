"""The commands that judge, from the command line: exit codes, what is printed where, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from roseinfer.bench.ab import BlockedRuns
from roseinfer.sim.cost_model import CostModel
from tests.bench.asking import Ask
from tests.bench.made_sides import ENVIRONMENT, stored_run
from tests.bench.rows import facts_of, measured
from tests.bench.stored import create

STEADY = (0.0100, 0.0101, 0.0099, 0.0100, 0.0101, 0.0099)
SLOWER = tuple(1.5 * s for s in STEADY)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    stored_run(place, "base", STEADY)
    stored_run(place, "same", STEADY)
    stored_run(place, "slower", SLOWER)
    stored_run(place, "few", STEADY[:2])
    stored_run(place, "elsewhere", STEADY, environment={**ENVIRONMENT, "cpu_model": "quipu"})
    create(place)
    (place / "p99.toml").write_text('[[rule]]\nmetric = "p99_ttft_ms"\nmax_ratio = 1.1\n')
    return place


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """gate/base, gate/same, gate/slower, gate/few, gate/elsewhere, and burst/run1 without a cell."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("check gate/same --baseline gate/base", 0),
        ("check gate/slower --baseline gate/base", 1),
        ("check gate/few --baseline gate/base", 3),
        ("check gate/few --baseline gate/base --unknown pass", 0),
        ("check gate/few --baseline gate/base --unknown fail", 1),
        ("check gate/elsewhere --baseline gate/base", 2),
        ("check gate/elsewhere --baseline gate/base --allow-other-machine", 0),
        ("check burst/run1 --baseline gate/base", 5),  # case G13
        ("check gate/same --baseline gate/base --thresholds p99.toml", 0),
        ("compare gate/base gate/slower", 0),
        ("compare gate/base burst/run1", 5),
    ],
)
def test_exit_codes(ask: Ask, command: str, code: int) -> None:
    assert ask(*command.split()).code == code


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("check gate/none --baseline gate/base", "RUN 'gate/none'"),
        ("check gate/same --baseline gate/none", "--baseline 'gate/none'"),
        ("check gate/same", "--baseline: is needed"),
        ("check gate/same --baseline gate/base --thresholds none.toml", "--thresholds 'none.toml'"),
        ("check gate/same --baseline gate/base --unknown maybe", "--unknown 'maybe'"),
        ("check gate/same --baseline gate/base --json --markdown -", "--markdown '-'"),
        ("check gate/same --baseline gate/base --markdown none/page.md", "--markdown 'none/page.md'"),
        ("compare gate/base gate/none", "B 'gate/none'"),
        ("compare gate/base gate/same --margin 0", "--margin 0.0"),
        ("ab --blocks 0", "--blocks 0"),
        ("ab --seed -1", "--seed -1"),
        ("ab --repeats 3", "--repeats: belongs to ab itself"),
        ("ab --b-flags=--repeats=3", "--repeats=3: belongs to ab itself"),
        ("ab --a no-such-revision", "--a 'no-such-revision'"),
        ("ab --b gate", "--b 'gate': holds no package"),
        ("ab --a-flags '\"", "--a-flags"),
        ("ab --run-id a/b", "--run-id 'a/b-a'"),
        ("ab -o p99.toml/below", "--output-dir 'p99.toml/below'"),
    ],
)
def test_bad_input_is_one_line_that_names_flag_and_value(ask: Ask, command: str, names: str) -> None:
    answer = ask(*command.split())
    assert answer.code == 2
    assert names in answer.complaint
    assert answer.out == ""


@pytest.mark.usefixtures("runs")
def test_the_table_names_verdict_ratio_interval_and_repeats(ask: Ask) -> None:
    lines = ask(
        "check", "gate/slower", "--baseline", "gate/base", "--thresholds", "p99.toml"
    ).out.splitlines()
    columns = "verdict cell metric measured interval demanded n R refused served"
    assert lines[0].split() == columns.split()
    assert lines[2].startswith("FAIL     no limit  p99_ttft_ms  x1.4")
    assert lines[2].endswith("at most x1.1  48  6  0.0 %    100.0 %")
    assert lines[3].strip() == "p99 is the max of 8 in a repeat"
    assert lines[-1] == "FAIL: slower against base"


@pytest.mark.usefixtures("runs")
def test_unknown_says_what_to_collect_and_that_it_passes(ask: Ask) -> None:  # case G8
    out = ask(
        "check", "gate/few", "--baseline", "gate/base", "--thresholds", "p99.toml", "--unknown", "pass"
    ).out
    assert "2 against 6 repeats cannot carry a level of 95 %, 4 each would; collect 2 more repeats" in out
    assert "Note: UNKNOWN counts as a pass here (--unknown)" in out


@pytest.mark.usefixtures("runs")
def test_json_is_all_that_is_on_stdout(ask: Ask) -> None:
    found = json.loads(ask("check", "gate/few", "--baseline", "gate/base", "--json").out)
    assert (found["verdict"], found["exit_code"]) == ("UNKNOWN", 3)
    assert found["rules"][0]["figure"]["hi"] is None  # unbounded
    assert found["rules"][0]["collect"] == 3  # two rules: 97.5 %


def test_markdown_for_the_summary_of_a_step(ask: Ask, runs: Path) -> None:
    answer = ask("check", "gate/same", "--baseline", "gate/base", "--markdown", "page.md")
    page = (runs / "page.md").read_text()
    assert page.startswith("### PASS: same against base\n\n| verdict | cell |")
    assert "| PASS | no limit | p99_ttft_ms | x1.000 |" in page
    assert answer.out.startswith("verdict")
    assert ask("check", "gate/same", "--baseline", "gate/base", "--markdown", "-").out == page + "\n"


def test_an_invalid_run_says_why(ask: Ask, runs: Path) -> None:
    broken = stored_run(runs, "broken", STEADY[:1])
    facts = broken.path / "cells" / "limit=None,prompt=32@0" / "facts.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "offered": 9}))
    answer = ask("check", "gate/broken", "--baseline", "gate/base", "--unknown", "pass")
    assert answer.code == 4
    assert "INVALID: the run, broken: 1 of 1 cells and repeats" in answer.out


def test_compare_draws_where_ttft_moved(ask: Ask, runs: Path) -> None:
    answer = ask("compare", "gate/base", "gate/slower", "-o", "figures", "--json")
    found = json.loads(answer.out)
    answers = {row["metric"]: row["answer"] for row in found["rows"]}
    assert answers["p99_ttft_ms"] == "DIFFERENT"
    assert answers["reject_rate"] == "SAME"
    assert {path.name for path in (runs / "figures").iterdir()} == {
        "shift_from_base.csv",
        "shift_from_base.png",
        "shift_from_base.svg",
    }


def test_an_unfinished_run_is_said_to_be_so(ask: Ask, runs: Path) -> None:
    stored_run(runs, "begun", STEADY, done=False, configuration={"max-error-share": 0.01, "repeats": 20})
    answer = ask("check", "gate/begun", "--baseline", "gate/base")
    assert answer.code == 3
    assert "begun is not finished: 6 of 20 cells and repeats are" in answer.out


def test_rules_of_which_none_decides_are_refused(ask: Ask, runs: Path) -> None:  # case G10
    (runs / "watch.toml").write_text('[[rule]]\nmetric = "p99_ttft_ms"\nmax_ratio = 1.1\nobserve = true\n')
    answer = ask("check", "gate/same", "--baseline", "gate/base", "--thresholds", "watch.toml")
    assert (answer.code, "only observes" in answer.complaint) == (2, True)


def test_the_deterministic_gate_sees_seven_percent_more_prefill(ask: Ask, tmp_path: Path) -> None:
    experiments = Path(__file__).parents[2] / "experiments"
    costs = CostModel.read(experiments / "gpt2_cpu.cost.json")
    for name, factor in (("base", 1.0), ("head", 1.07)):
        step = replace(costs.step, prefill_token_s=factor * costs.step.prefill_token_s)
        replace(costs, step=step).write(tmp_path / f"{name}.json")
        words = f"sweep --target sim --cost-model {name}.json --max-inflight 16 --burst-size 24 --repeats 1".split()
        assert ask(*words, "--run-id", name, "--quiet").code == 0
    rules = ["--thresholds", str(experiments / "deterministic.toml")]
    judge = ["check", "results/sweep/head", "--baseline", "results/sweep/base"]
    assert ask(*judge, *rules).code == 1
    assert ask(*judge).code == 0  # x1.10: for figures with noise


@pytest.mark.parametrize(
    "command", ["check gate/stopped --baseline gate/base", "compare gate/base gate/stopped"]
)
def test_what_was_interrupted_is_not_compared(ask: Ask, runs: Path, command: str) -> None:
    stored_run(runs, "thereof", STEADY[:2])
    finished = ask(*command.replace("stopped", "thereof").split()).out
    stopped = stored_run(runs, "stopped", STEADY[:2])
    rows = measured(repeat=2, service_s=1.0)
    facts = replace(facts_of(rows), interrupted_s=0.5)
    stopped.write_cell(rows["cell_id"].iloc[0], 2, rows, pd.DataFrame(), facts.to_json())
    assert ask(*command.split()).out == finished.replace("thereof", "stopped")


def test_an_interrupted_comparison_says_what_is_on_disk(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: BlockedRuns) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockedRuns, "check", interrupted)
    answer = ask("ab")
    assert (answer.code, answer.complaint) == (130, "interrupted; no block was finished")
