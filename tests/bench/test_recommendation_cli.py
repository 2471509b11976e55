"""`capacity` and `recommend` on the command line: on the virtual clock, where every run gives the same."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench import session
from roseinfer.bench.probe import Probe, Prober
from roseinfer.bench.store import RunFolder
from roseinfer.errors import InputError, RunError
from tests.bench.asking import Answer, Ask, ask_in
from tests.bench.stored import stopped

COST_MODEL = str(Path(__file__).parents[2] / "experiments" / "gpt2_cpu.cost.json")
SIM = ("--target", "sim", "--cost-model", COST_MODEL, "--quiet")
PROBE = (
    *("--num-requests", "20", "--repeats", "3", "--tolerance", "0.2", "--run-id", "it", "-o", "out"),
    *("--arrival", "constant"),  # all repeats alike: no interval has a width
)


GOAL = ("--slo", "p95_ttft:250")


@pytest.fixture(autouse=True, scope="module")
def quick_probes() -> Iterator[None]:
    """All of torch is on this heap, and every cell collects it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda generation=2: 0)
        yield


def capacity(ask: Ask, *words: str) -> Answer:
    return ask("capacity", *SIM, *PROBE, *words)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of a whole search: the same words read them."""
    folder = tmp_path_factory.mktemp("searched")
    ask_in(folder, "capacity", *SIM, *PROBE, "-o", str(folder), *GOAL)
    return folder


@pytest.fixture
def again(ask: Ask, searched: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """The search that is over, with further words. It has nothing to measure any more."""
    monkeypatch.setattr(session.Session, "measure", lambda self: pytest.fail("measured once more"))
    return lambda *words: ask("capacity", *SIM, *PROBE, "-o", str(searched), *GOAL, *words)


def found(answer: Answer) -> dict[str, Any]:
    answered: dict[str, Any] = json.loads(
        answer.out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON")
    )
    return answered


# --- capacity: rates


def test_the_answer_is_an_interval_with_figures_at_both_ends(again: Ask, searched: Path) -> None:
    answer = again()
    assert answer.code == 0
    assert answer.err == ""
    lines = answer.out.splitlines()
    assert lines[0].split() == "probe p95 ttft ms interval n not served completed/s verdict".split()
    rest = answer.out[answer.out.index("The largest rate") :].splitlines()
    assert rest[0].startswith(
        "The largest rate that keeps p95_ttft:250 with at most 5 % not served lies between"
    )
    assert "it holds, over 3 x 20 requests: p95 ttft" in rest[1]
    assert "(95 % interval" in rest[1]
    assert "it fails: p95 ttft" in rest[2]
    runs = list((searched / "capacity").iterdir())
    assert (
        "intervals at 95 %, by resampling whole repeats: they cover less than that, under 10 repeats far less"
        in answer.out
    )
    assert lines[-2:] == [f"All {len(runs)} probes were simulated.", f"Runs: {searched / 'capacity'}"]


def test_the_ends_are_as_measured(again: Ask) -> None:
    answered = found(again("--json"))
    holds, fails = answered["request_rate"]["holds"], answered["request_rate"]["fails"]
    probes = {probe["probe"]: probe for probe in answered["probes"]}
    assert answered["complete"] is answered["decided"] is answered["possible"] is True
    assert holds < fails <= 1.2 * holds
    assert probes[f"simulated rate {holds:g}"]["percentiles"][0]["hi"] <= 250
    assert probes[f"simulated rate {fails:g}"]["percentiles"][0]["lo"] > 250


def test_every_probe_is_a_run_like_any_other(again: Ask) -> None:
    for probe in found(again("--json"))["probes"]:
        folder = RunFolder.open(Path(probe["run"]))
        assert folder.is_done
        assert "tolerance" not in folder.manifest["configuration"]
        assert folder.manifest["slos"] == ["p95_ttft:250"]


def test_a_run_id_of_other_flags_is_refused(again: Ask, searched: Path) -> None:
    answer = again("--prompt-len", "64")
    assert answer.code == 2
    assert answer.complaint.startswith(f"--run-id '{searched / 'capacity' / 'it-one_user'}': --prompt-len")


def test_an_slo_that_one_request_alone_misses_is_impossible(ask: Ask) -> None:
    answer = capacity(ask, "--slo", "p95_ttft:10")
    assert answer.code == 0
    assert "cannot be met at any rate: even of one request at a time" in answer.out


def test_an_slo_that_always_holds_says_how_far_it_was_tried(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roseinfer.bench.capacity.SPAN", 4.0)
    answer = capacity(ask, "--slo", "p95_ttft:600000")
    assert answer.code == 0
    assert "holds up to the largest rate that was tried" in answer.out
    assert "the queue grows for as long as such a load lasts" in answer.out


def test_with_a_limit_refusals_bound_the_rate(ask: Ask) -> None:
    answered = found(
        capacity(
            ask,
            *("--slo", "p95_ttft:600000", "--max-inflight", "4", "--max-reject-rate", "0.1", "--json"),
            *("--tolerance", "1"),
        )
    )
    probes = {probe["probe"]: probe for probe in answered["probes"]}
    ends = [probes[f"simulated rate {answered['request_rate'][end]:g}"] for end in ("holds", "fails")]
    assert ends[0]["not_served"]["hi"] <= 0.1 < ends[1]["not_served"]["lo"]


def test_progress_says_what_was_tried_and_what_came_of_it(ask: Ask) -> None:
    words = [word for word in SIM if word != "--quiet"]
    answer = ask("capacity", *words, *PROBE, "--slo", "p95_ttft:10")
    assert "simulated one user: p95 ttft" in answer.err
    assert answer.err.splitlines()[-1].endswith("fails")


# --- capacity: limits


def test_at_a_given_rate_the_limits_that_keep_the_goal(ask: Ask) -> None:
    answered = found(capacity(ask, *GOAL, "--request-rate", "40", "--max-reject-rate", "0.7", "--json"))
    assert answered["smallest_limit"] == {"holds": 2, "fails": 1}
    assert answered["largest_limit"] == {"holds": 10, "fails": 12}


def test_of_a_burst_the_smallest_limit_follows_from_the_burst_law(ask: Ask) -> None:
    answer = ask(
        "capacity", *SIM, *("--burst-size", "64", "--repeats", "3", "-o", "out", "--tolerance", "0.01"),
        *("--slo", "p99_ttft:600000", "--max-reject-rate", "0.25", "--json"),
    )  # fmt: skip
    assert found(answer)["smallest_limit"] == {"holds": 48, "fails": 47}
    assert found(answer)["largest_limit"] == {"holds": "no limit", "fails": None}


# --- capacity: what is refused


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "--slo: is needed, such as p99_ttft:250"),
        ("--slo p99_speed:3", "--slo 'p99_speed:3': unknown metric"),
        ("--slo p99_ttft:250 --max-inflight 2,4", "--max-inflight '2,4': capacity takes one value"),
        ("--slo p99_ttft:250 --request-rate 4 --max-inflight 2", "--max-inflight '2': is what is searched for"),
        ("--slo p99_ttft:250 --tolerance 0", "--tolerance 0.0: must lie in (0, 1]"),
        ("--slo p99_ttft:250 --max-reject-rate 1", "--max-reject-rate 1.0: must lie in [0, 1)"),
        ("--slo p99_ttft:250 --repeats 1", "--repeats 1: one repeat gives no interval"),
        ("--slo p99_ttft:250 --num-requests 33", "--num-requests 33: too few: 99 in 3 repeats, a p99 takes 100"),
        ("--slo p99.9_ttft:250", "--num-requests 20: too few: 60 in 3 repeats, a p99.9 takes 1000"),
        ("--slo p99_ttft:250 --burstiness 0", "--burstiness 0.0: must be a number > 0"),
        ("--slo p95_tpot:9 --max-new-tokens 1", "--slo 'p95_tpot:9': no request completed at simulated one user"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(ask: Ask, words: str, complaint: str) -> None:
    answer = capacity(ask, *words.split())
    assert answer.code == 2
    assert answer.complaint.startswith(complaint)


def test_a_probe_too_small_for_its_percentile_once_warm_up_is_cut_names_the_flag(
    again: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roseinfer.bench import recommend

    monkeypatch.setattr(recommend, "steady_rows", lambda derived: derived.iloc[:10])
    answer = again()
    assert answer.code == 2
    assert answer.complaint == (
        "--num-requests 20: too few: 10 completed requests count at simulated one user, a p95 takes 20"
    )


def test_ctrl_c_tells_what_is_known_and_how_to_go_on(again: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Prober, rate: float) -> Probe:
        raise KeyboardInterrupt

    monkeypatch.setattr(Prober, "at_rate", interrupted)
    answer = again()
    assert answer.code == 130
    assert "simulated one user" in answer.out
    assert "What is known so far:" in answer.out
    assert answer.complaint == "interrupted. To go on: the same command with --run-id it"


def test_a_probe_that_cannot_be_judged_tells_what_is_known_and_ends_with_2(
    again: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_few(self: Prober, rate: float) -> Probe:
        raise InputError("--num-requests", 20, "too few")

    monkeypatch.setattr(Prober, "at_rate", too_few)
    answer = again()
    assert answer.code == 2
    assert "simulated one user" in answer.out
    assert "What is known so far:" in answer.out
    assert answer.complaint == "--num-requests 20: too few"


def test_a_failure_tells_what_is_known_and_ends_with_1(again: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(self: Prober, rate: float) -> Probe:
        raise RunError("the server died")

    monkeypatch.setattr(Prober, "at_rate", failed)
    answer = again()
    assert answer.code == 1
    assert "simulated one user" in answer.out
    assert answer.complaint == "the server died"


# --- recommend


SWEEP = "--burst-size 64 --max-inflight 0,8,16,48 --repeats 3 --run-id run -o out --slo p95_ttft:700"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a sweep."""
    folder = tmp_path_factory.mktemp("swept")
    assert ask_in(folder, "sweep", *SIM, *SWEEP.split()).code == 0
    return str(folder / "out" / "sweep" / "run")


def test_the_limit_the_evidence_the_price_and_how_sure(ask: Ask, swept: str) -> None:
    answer = ask("recommend", swept, "--slo", "p95_ttft:700")
    assert answer.code == 0
    lines = answer.out.splitlines()
    columns = "limit p95 ttft ms interval n refused served in goal wasted work how"
    assert lines[0].split() == columns.split()
    assert [line.split()[0] for line in lines if line.endswith("measured")] == ["8", "16", "48", "no"]
    assert any(line.startswith("recommended for p95_ttft:700: 16.") for line in lines)
    assert any(
        line.startswith("The price: 75.0 % refused, 0.0 % of the computed tokens wasted; 0.0 % and")
        for line in lines
    )
    assert any(line.startswith("Not sure: 12.5 points more") for line in lines)  # of 3 repeats
    assert lines[-1].endswith("they cover less than that, under 10 repeats far less")


def test_recommend_as_json(ask: Ask, swept: str) -> None:
    answer = ask("recommend", swept, "--slo", "p95_ttft:700", "--json")
    (only,) = found(answer)["recommendations"]
    assert only["max_inflight"] == 16
    assert only["runner_up"] == "8"
    assert [one["limit"] for one in only["evidence"]] == ["8", "16", "48", "no limit"]


def test_limits_between_are_predicted_and_said_to_be(ask: Ask, swept: str) -> None:
    answer = ask("recommend", swept, "--slo", "p95_ttft:700", "--cost-model", COST_MODEL)
    assert answer.code == 0
    predicted = [line.split()[0] for line in answer.out.splitlines() if line.endswith("predicted")]
    assert predicted[:4] == ["10", "11", "13", "21"]
    assert (
        "No limit between those measured is predicted to keep the goal and to serve more within it."
        in answer.out
    )


def test_what_a_prediction_does_not_know_of_is_told(
    ask: Ask, swept: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # case I6
    monkeypatch.setattr("roseinfer.bench.resimulate.cache_notes", lambda requests: [f"{len(requests)} rows"])
    words = ("recommend", swept, "--slo", "p95_ttft:700")
    assert "rows" not in ask(*words).out
    assert "Note: 768 rows" in ask(*words, "--cost-model", COST_MODEL).out


def test_the_slo_of_the_run_is_the_default(ask: Ask, swept: str) -> None:
    assert "recommended for p95_ttft:700: 16." in ask("recommend", swept).out


def test_sizes_are_for_predicting_with_a_cost_model(ask: Ask, swept: str) -> None:
    answer = ask("recommend", swept, "--max-batch-size", "8")
    assert (answer.code, answer.complaint) == (2, "--max-batch-size 8: needs --cost-model, to predict with")
    answer = ask("recommend", swept, "--max-batch-size", "8", "--cost-model", COST_MODEL)
    assert answer.complaint == "--max-batch-size 8: run was measured on an engine, whose sizes it holds"


def test_recommend_without_an_slo_is_refused(ask: Ask, swept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunFolder, "manifest", {**RunFolder.open(Path(swept)).manifest, "slos": []})
    answer = ask("recommend", swept)
    assert (answer.code, answer.complaint.partition(":")[0]) == (2, "--slo")


def test_an_empty_run_is_refused_in_one_line(ask: Ask, tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "sweep", "empty", {"slos": [], "seed": 0, "configuration": {}})
    answer = ask("recommend", "sweep/empty", "--slo", "p95_ttft:250")
    assert answer.code == 2
    assert answer.complaint == "RUN 'sweep/empty': holds no finished cell: nothing was measured"


def test_an_invalid_run_is_refused_as_check_does(
    ask: Ask, swept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roseinfer.bench.sides import Side

    monkeypatch.setattr(Side, "invalid_reason", lambda self: "the client was late")
    answer = ask("recommend", swept, "--slo", "p95_ttft:250")
    assert answer.code == 4
    assert answer.complaint == "INVALID: run: the client was late"


def test_a_cell_that_was_interrupted_is_no_evidence(ask: Ask, swept: str, tmp_path: Path) -> None:
    run = stopped(RunFolder.open(Path(swept)), tmp_path)
    answer = ask("recommend", str(run.path), "--slo", "p95_ttft:700", "--cost-model", COST_MODEL)
    assert answer.code == 0
    assert "recommended for p95_ttft:700: 16." in answer.out
    assert "Note: run is not finished: 11 of 12 cells and repeats are" in answer.out.splitlines()


def test_no_run_is_refused(ask: Ask) -> None:
    assert ask("recommend", "nothing", "--slo", "p95_ttft:250").complaint.startswith("RUN 'nothing': no run")
