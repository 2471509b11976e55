"""The order of a check, and what keeps it from passing: cases of kind G."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.check import Report, check
from roseinfer.bench.judgement import Verdict
from roseinfer.bench.sides import Side
from roseinfer.bench.thresholds import DEFAULT_RULES, Rule
from roseinfer.bench.verdicts import check_notes, check_table
from roseinfer.errors import InputError
from tests.bench.made_sides import ENVIRONMENT, NO_LIMIT, around, measured_side, side
from tests.bench.rows import measured

P99 = Rule(metric="p99_ttft_ms", bound=1.10, is_ratio=True)


def cell(p99_ms: float = 100.0, spread: float = 0.01, n: int = 10, **figures: Any) -> dict[str, Any]:
    return {"p99_ttft_ms": around(p99_ms, spread, n), **figures}


def base(*limits: int, **figures: Any) -> Side:
    return side({limit: cell(**figures) for limit in limits or (NO_LIMIT,)}, name="base")


def verdicts(report: Report) -> list[tuple[str, str, str]]:
    return [(one.cell, one.metric, str(one.verdict)) for one in report.judgements]


# --- what comes before the rules


def test_the_same_figures_pass() -> None:
    report = check(side({NO_LIMIT: cell()}), base(), DEFAULT_RULES)
    assert (report.verdict, report.exit_code()) == (Verdict.PASS, 0)


def test_an_invalid_run_is_not_judged() -> None:
    report = check(side({NO_LIMIT: cell(500.0)}, invalid="a slot leaked"), base(), [P99])
    assert report.exit_code(unknown=0) == 4
    assert (
        "run: 10 of 10 cells and repeats, the first is inflight_none repeat 1: a slot leaked"
        in report.headline
    )
    assert report.judgements == ()


def test_an_invalid_run_is_no_baseline() -> None:  # case G6
    invalid = side({NO_LIMIT: cell()}, name="base", invalid="a slot leaked")
    report = check(side({NO_LIMIT: cell()}), invalid, [P99])
    assert report.exit_code() == 4
    assert "the baseline, base" in report.headline


@pytest.mark.parametrize(("run_cells", "baseline_cells"), [(0, 1), (1, 0)])
def test_nothing_measured_has_a_code_of_its_own(run_cells: int, baseline_cells: int) -> None:  # case G13
    report = check(
        side({NO_LIMIT: cell()}, finished=run_cells), side({NO_LIMIT: cell()}, finished=baseline_cells), [P99]
    )
    assert report.exit_code(unknown=0) == 5


def test_another_machine_is_refused_unless_allowed() -> None:
    other = side({NO_LIMIT: cell()}, name="base", environment={**ENVIRONMENT, "cpu_model": "quipu"})
    with pytest.raises(InputError, match=r"another machine \(cpu model abacus, of the baseline quipu\)"):
        check(side({NO_LIMIT: cell()}), other, [P99])
    report = check(side({NO_LIMIT: cell()}), other, [P99], allow_other_machine=True)
    assert report.verdict is Verdict.PASS
    assert any("cpu" in note for note in report.notes)


def test_what_else_differs_is_named() -> None:  # case I6
    run = side(
        {NO_LIMIT: cell()},
        configuration={"max-batch-size": 8},
        model={"dtype": "bfloat16"},
        workload_sha256="b",
    )
    baseline = side(
        {NO_LIMIT: cell()},
        configuration={"max-batch-size": 32},
        model={"dtype": "float32"},
        workload_sha256="a",
    )
    notes = "\n".join(check(run, baseline, [P99]).notes)
    for part in (
        "--max-batch-size was 32, now 8",
        "model dtype was float32, now bfloat16",
        "workload is another",
    ):
        assert part in notes


def test_other_cache_states_are_named() -> None:  # case I6
    cold, warm = measured(burst_size=2).assign(prompt_tokens=32, cached_tokens=0), measured(burst_size=2)
    warm = warm.assign(prompt_tokens=32, cached_tokens=16)
    report = check(side({NO_LIMIT: cell()}, requests=warm), side({NO_LIMIT: cell()}, requests=cold), [P99])
    assert "prompt tokens from a cache: baseline 0.0 %, run 50.0 %" in report.notes


def test_a_ratio_needs_a_baseline() -> None:
    with pytest.raises(InputError, match=r"--baseline.*the rule on p99_ttft_ms is a ratio"):
        check(side({NO_LIMIT: cell()}), None, [P99])


# --- cells


def test_a_missing_cell_fails() -> None:  # case G1
    report = check(side({64: cell()}), base(64, NO_LIMIT), [P99])
    assert verdicts(report) == [("limit 64", "p99_ttft_ms", "PASS"), ("no limit", "cell", "FAIL")]
    assert report.exit_code() == 1


def test_a_cell_that_the_baseline_lacks_fails() -> None:
    report = check(side({64: cell(), NO_LIMIT: cell()}), base(64), [P99])
    assert "missing in base" in report.judgements[-1].remark
    assert report.exit_code() == 1


def test_a_rule_that_is_about_no_cell_fails() -> None:  # case G2
    rule = Rule(metric="p99_ttft_ms", bound=1.1, is_ratio=True, cells={"admission": "inflight:65"})
    report = check(side({64: cell()}), base(64), [rule])
    assert "no cell is as" in report.judgements[0].remark
    assert report.exit_code() == 1


def test_a_rule_with_a_filter_leaves_other_cells_alone() -> None:
    rule = Rule(metric="p99_ttft_ms", bound=1.1, is_ratio=True, cells={"admission": "none"})
    report = check(side({64: cell(900.0), NO_LIMIT: cell()}), base(64, NO_LIMIT), [rule])
    assert verdicts(report) == [("no limit", "p99_ttft_ms", "PASS")]
    assert report.level == 0.95


def test_a_cell_in_which_nothing_completed_fails() -> None:  # case G1: p99 of nothing is not 0
    nothing = {"p99_ttft_ms": [math.nan] * 10, "completed": 0}
    report = check(side({NO_LIMIT: nothing}), base(), [P99])
    assert report.exit_code(unknown=0) == 1
    assert "not measured" in report.judgements[0].remark


# --- outcomes


def test_latencies_are_not_compared_where_requests_fail() -> None:  # case G9
    run = side({NO_LIMIT: cell(10.0, error_rate=0.2)})
    report = check(run, base(), [P99])
    assert verdicts(report) == [("no limit", "error_rate", "FAIL")]
    assert "from 0.0 % to 20.0 %: latencies are not compared" in report.judgements[0].remark


def test_errors_fail_however_few_the_repeats() -> None:  # case G9
    run = side({NO_LIMIT: cell(n=2, error_rate=[0.1, 0.3])})
    assert check(run, base(n=2), [P99]).exit_code(unknown=0) == 1


def test_more_refusals_fail_before_latencies_are_compared() -> None:  # case D3
    run = side({64: cell(10.0, reject_rate=around(0.5, 0.02, 10))})
    report = check(run, base(64, reject_rate=around(0.4, 0.02, 10)), [P99])
    assert verdicts(report) == [("limit 64", "reject_rate", "FAIL")]


@pytest.mark.parametrize(
    ("metric", "bad", "verdict"),
    [
        ("error_rate", 4, "UNKNOWN"),
        ("error_rate", 6, "FAIL"),
        ("reject_rate", 4, "UNKNOWN"),
        ("reject_rate", 6, "FAIL"),
    ],
)
@pytest.mark.parametrize("blocks", [None, "x"])
def test_what_goes_wrong_in_a_minority_of_repeats_is_seen(
    metric: str, bad: int, verdict: str, blocks: str | None
) -> None:  # case G9
    # All bad repeats in the run: C(10, bad) / C(20, bad) unpaired, 2^-bad in pairs; the level leaves 2.5 %.
    figures: dict[str, Any] = {metric: [0.4] * bad + [0.0] * (10 - bad)}
    run, baseline = (
        side(
            {
                64: cell(**figures),
            },
            blocks=blocks,
        ),
        side({64: cell()}, name="base", blocks=blocks),
    )
    (found, *_) = check(run, baseline, [P99]).judgements
    assert (found.metric, str(found.verdict)) == (metric, verdict)
    assert found.growth == pytest.approx(0.04 * bad)
    assert found.p is not None
    assert (found.p <= 0.025) is (verdict == "FAIL")
    assert (found.collect is not None) is (verdict == "UNKNOWN")
    assert ("collect" in found.remark) is (verdict == "UNKNOWN")


def test_a_level_beyond_the_usual_draws_can_still_be_shown() -> None:  # case G11
    rates = [0.0] * 20 + [0.4] * 20
    run, baseline = side({64: cell(n=40, reject_rate=rates)}), base(64, n=40)
    (found, *_) = check(run, baseline, [P99] * 200).judgements
    assert (found.metric, found.verdict) == ("reject_rate", Verdict.FAIL)


def test_outcomes_are_shown_with_their_growth_and_its_p() -> None:
    figures: dict[str, Any] = {"reject_rate": [0.4] * 6 + [0.0] * 4, "n_ttft": 128}
    table = check_table(check(side({64: cell(**figures)}), base(64), [P99]))
    line = table.splitlines()[2]
    assert "reject_rate  +24.0 points  p 0.00" in line
    assert "went from 0.0 % to 24.0 %" in table


def test_the_table_has_the_refused_and_the_served_of_both_sides() -> None:  # case D3
    run = side({64: cell(reject_rate=0.005, completed=127)})
    table = check_table(check(run, base(64), [P99]))
    assert table.splitlines()[2].endswith("10  0.5 % / 0.0 %  99.2 % / 100.0 %")
    assert "shares of the offered requests" in table


def test_one_repeat_has_too_few_for_refusals_and_enough_for_errors() -> None:
    for metric, verdict in (("reject_rate", "UNKNOWN"), ("error_rate", "FAIL")):
        figures: dict[str, Any] = {metric: [0.4]}
        run = side({64: cell(n=1, **figures)})
        found = check(run, base(64, n=1), [P99]).judgements[0]
        assert (found.metric, str(found.verdict)) == (metric, verdict)


def test_refusals_that_may_be_chance_are_unknown() -> None:
    run = side({64: cell(reject_rate=[0.1, 0.6] * 5)})
    report = check(run, base(64, reject_rate=[0.55, 0.08] * 5), [P99])
    assert verdicts(report) == [("limit 64", "reject_rate", "UNKNOWN"), ("limit 64", "p99_ttft_ms", "PASS")]
    assert report.exit_code() == 3


@pytest.mark.parametrize("metric", ["error_rate", "reject_rate"])
def test_a_point_more_is_let_pass(metric: str) -> None:
    figures: dict[str, Any] = {metric: 0.01}
    run = side({64: cell(**figures)})
    assert verdicts(check(run, base(64), [P99])) == [("limit 64", "p99_ttft_ms", "PASS")]


def test_fewer_refusals_are_no_failure() -> None:
    run = side({64: cell(reject_rate=0.1)})
    assert check(run, base(64, reject_rate=0.5), [P99]).verdict is Verdict.PASS


# --- rules


def test_fifteen_percent_with_a_small_spread_fails() -> None:
    report = check(side({NO_LIMIT: cell(115.0)}), base(), [P99])
    (judgement,) = report.judgements
    assert judgement.verdict is Verdict.FAIL
    assert judgement.figure is not None
    assert judgement.figure.point == pytest.approx(1.15)
    assert judgement.repeats == (10, 10)


def test_a_hidden_jump_is_unknown_and_not_no_change() -> None:  # case G8
    report = check(side({NO_LIMIT: cell(130.0, 0.5, 6)}), base(p99_ms=100.0, spread=0.5, n=6), [P99])
    (judgement,) = report.judgements
    assert (judgement.verdict, report.exit_code()) == (Verdict.UNKNOWN, 3)
    assert judgement.collect is not None


@pytest.mark.parametrize(("unknown", "code"), [(3, 3), (0, 0), (1, 1)])
def test_unknown_is_what_the_user_says(unknown: int, code: int) -> None:
    report = check(side({NO_LIMIT: cell(n=3)}), base(n=3), [P99])
    assert report.verdict is Verdict.UNKNOWN
    assert report.exit_code(unknown) == code


def test_a_level_that_so_few_repeats_cannot_carry_is_named() -> None:  # case G11
    rules = [Rule(metric="p99_ttft_ms", bound=1.1, is_ratio=True)] * 25
    report = check(side({NO_LIMIT: cell(n=6)}), base(n=6), rules)
    assert report.level == pytest.approx(0.998)
    assert "6 repeats cannot carry a level of 99.8 %, 7 would" in report.judgements[0].remark


def test_three_percent_ten_times_is_seen_against_the_first() -> None:  # case G5
    report = check(side({NO_LIMIT: cell(100 * 1.03**10)}), base(), [P99])
    assert report.judgements[0].figure is not None
    assert report.judgements[0].figure.point == pytest.approx(1.344, abs=1e-3)
    assert report.verdict is Verdict.FAIL


def test_a_collapse_of_counts_is_seen() -> None:  # case G3
    run = side({NO_LIMIT: cell(completed=10, output_throughput=4.0)})
    report = check(run, base(), DEFAULT_RULES)
    assert verdicts(report)[1] == ("no limit", "output_throughput", "FAIL")
    assert "suspicious: no limit: 10 requests completed a repeat, 128 in the baseline" in report.notes


def test_a_third_of_the_latency_passes_and_is_flagged() -> None:  # case G4
    report = check(side({NO_LIMIT: cell(33.0)}), base(), [P99])
    assert report.verdict is Verdict.PASS
    assert "suspicious" in report.judgements[0].remark


def test_observed_rules_decide_nothing() -> None:  # case G10
    observed = Rule(metric="p99_ttft_ms", bound=1.1, is_ratio=True, observe=True)
    throughput = Rule(metric="output_throughput", bound=0.9, is_ratio=True)
    report = check(side({NO_LIMIT: cell(900.0)}), base(), [observed, throughput])
    assert verdicts(report)[0] == ("no limit", "p99_ttft_ms", "FAIL")
    assert (report.verdict, report.level) == (Verdict.PASS, 0.95)


def test_one_of_two_rules_alone_fails_a_run() -> None:  # case H4
    rules = [Rule(metric="output_throughput", bound=0.5, is_ratio=True), P99]
    for order in (rules, rules[::-1]):
        assert check(side({NO_LIMIT: cell(130.0)}), base(), order).verdict is Verdict.FAIL


def test_shared_blocks_are_compared_in_pairs() -> None:
    machine = np.random.default_rng(0).lognormal(sigma=0.5, size=10)
    slower = {NO_LIMIT: {"p99_ttft_ms": list(115 * machine)}}
    fast = {NO_LIMIT: {"p99_ttft_ms": list(100 * machine)}}
    paired = check(side(slower, blocks="x"), side(fast, blocks="x"), [P99])
    apart = check(side(slower, blocks="x"), side(fast, blocks="y"), [P99])
    assert (paired.verdict, apart.verdict) == (Verdict.FAIL, Verdict.UNKNOWN)
    assert paired.how == "compared in pairs, block by block"


@pytest.mark.parametrize("which", ["run", "base"])
def test_an_unfinished_run_cannot_pass(which: str) -> None:
    run, baseline = (
        side({NO_LIMIT: cell()}, name=name, done=name != which, finished=2) for name in ("run", "base")
    )
    report = check(run, baseline, [P99])
    assert verdicts(report) == [("all", "run", "UNKNOWN"), ("no limit", "p99_ttft_ms", "PASS")]
    assert report.judgements[0].remark == f"{which} is not finished: 2 of 8 cells and repeats are"
    assert report.exit_code() == 3


def test_an_unfinished_run_can_fail() -> None:
    assert check(side({NO_LIMIT: cell(900.0)}, done=False), base(), [P99]).exit_code() == 1


def test_an_unfinished_block_is_left_out() -> None:
    run = side({NO_LIMIT: {"p99_ttft_ms": around(100, 0.01, 8)}}, blocks="x")
    baseline = side({NO_LIMIT: {"p99_ttft_ms": around(100, 0.01, 9)}}, blocks="x", name="base")
    assert check(run, baseline, [P99]).judgements[0].repeats == (8, 8)


# --- simulated runs


def simulated(service_s: float = 0.010, *, sha: str = "w", cpu: str = "abacus", **rows: Any) -> Side:
    frames = [measured(burst_size=128, repeat=repeat, service_s=service_s, **rows) for repeat in range(2)]
    environment = {**ENVIRONMENT, "cpu_model": cpu}
    together = pd.concat(frames, ignore_index=True)
    return measured_side(together, target="sim", workload_sha256=sha, environment=environment)


def test_simulated_runs_are_compared_row_by_row_on_any_machine() -> None:
    report = check(simulated(cpu="quipu"), simulated(), DEFAULT_RULES)
    assert report.verdict is Verdict.PASS
    assert "0 of 256 simulated requests differ from the baseline's" in report.notes[0]
    assert not any("cpu" in note for note in report.notes)


def test_a_simulated_regression_is_exact() -> None:
    report = check(simulated(0.0112), simulated(), [P99])
    (judgement,) = report.judgements
    assert judgement.figure is not None
    assert (
        judgement.figure.lo == judgement.figure.point == judgement.figure.hi == pytest.approx(1.118, abs=2e-3)
    )
    assert judgement.verdict is Verdict.FAIL
    assert "256 of 256 simulated requests differ" in report.notes[0]


def test_simulated_rows_that_differ_are_counted_though_the_figures_agree() -> None:
    run = simulated()
    moved = run.requests["first_token_s"].to_numpy(dtype=np.float64, copy=True)
    moved[5] += 1e-6
    run.requests["first_token_s"] = moved
    report = check(run, simulated(), [P99])
    assert report.verdict is Verdict.PASS
    assert "1 of 256 simulated requests differ from the baseline's, the first: " in report.notes[0]
    assert report.notes[0].endswith("repeat 1 request 5")


def test_simulated_runs_of_other_requests_are_refused() -> None:
    with pytest.raises(InputError, match="simulated another workload"):
        check(simulated(sha="v"), simulated(), [P99])


def test_simulated_runs_of_other_repeats_are_refused() -> None:
    longer, shorter = simulated(), simulated()
    shorter.summary = shorter.summary[shorter.summary["repeat"] != 1]
    with pytest.raises(InputError, match=r"other repeats in .*, 1 against 2"):
        check(longer, shorter, [P99])


def test_a_simulated_check_has_no_level() -> None:
    report = check(simulated(), simulated(), [P99])
    assert math.isnan(report.level)
    assert "interval" not in "\n".join(check_notes(report, 3))


def test_simulated_and_measured_do_not_mix() -> None:
    with pytest.raises(InputError, match="one of the runs is simulated"):
        check(simulated(), base(), [P99])


def test_a_simulated_absolute_bound_is_exact() -> None:
    rule = Rule(metric="p99_ttft_ms", bound=1300.0, is_ratio=False)
    report = check(simulated(), None, [rule])
    assert report.judgements[0].figure is not None
    assert report.judgements[0].figure.lo == report.judgements[0].figure.hi
    assert report.verdict is Verdict.PASS
