from __future__ import annotations

from pathlib import Path

import pytest

from roseinfer.bench.summary import SUMMARY_SCHEMA
from roseinfer.bench.thresholds import DEFAULT_RULES, HIGHER_IS_BETTER, Rule, read_thresholds
from roseinfer.errors import InputError


def rules_of(tmp_path: Path, text: str) -> list[Rule]:
    path = tmp_path / "gate.toml"
    path.write_text(text)
    return read_thresholds(path)


def test_a_file_of_rules(tmp_path: Path) -> None:
    text = """
[[rule]]
metric = "p99_ttft_ms"
max_ratio = 1.10
cells = { max_inflight = 64, burst_size = 128 }

[[rule]]
metric = "output_throughput"
min = 40
observe = true
"""
    assert rules_of(tmp_path, text) == [
        Rule(
            metric="p99_ttft_ms",
            bound=1.1,
            is_ratio=True,
            cells={"admission": "inflight:64", "burst_size": 128.0},
        ),
        Rule(metric="output_throughput", bound=40.0, is_ratio=False, observe=True),
    ]


@pytest.mark.parametrize("value", ["0", '"none"'])
def test_no_limit_is_0_or_none(tmp_path: Path, value: str) -> None:  # case A10
    (rule,) = rules_of(
        tmp_path, f'[[rule]]\nmetric = "p99_ttft_ms"\nmax = 9\ncells = {{ max_inflight = {value} }}'
    )
    assert rule.applies_to({"admission": "none"})
    assert not rule.applies_to({"admission": "inflight:64"})


def test_a_rule_may_be_about_a_token_budget(tmp_path: Path) -> None:
    (rule,) = rules_of(
        tmp_path,
        '[[rule]]\nmetric = "p99_ttft_ms"\nmax = 9\ncells = { admission = "tokens:4096+inflight:8" }',
    )
    assert rule.applies_to({"admission": "inflight:8+tokens:4096"})
    assert not rule.applies_to({"admission": "inflight:8"})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('metric = "p99_tttft_ms"\nmax = 1', "p99_tttft_ms.*did you mean p99_ttft_ms"),  # case G2
        ("max = 1", "rule 1: metric 'None': no such metric"),
        ('metric = "p99_ttft_ms"\nmaximum = 1', "maximum.*did you mean.*max"),
        ('metric = "p99_ttft_ms"', "needs one of max_ratio, max, min_ratio, min"),
        ('metric = "p99_ttft_ms"\nmax = 1\nmax_ratio = 1.1', "max_ratio and max"),
        ('metric = "p99_ttft_ms"\nmin_ratio = 0.9', "less is better: use max_ratio"),  # case G4
        ('metric = "output_throughput"\nmax = 9', "more is better: use min"),  # case G4
        ('metric = "peak_inflight"\nmax = 9', "neither better nor worse"),
        ('metric = "p99_ttft_ms_hi"\nmax = 9', "neither better nor worse, or is the bound of an interval"),
        ('metric = "p99_ttft_ms"\nmax_ratio = 0.9', "must be at least 1"),
        ('metric = "output_throughput"\nmin_ratio = 1.5', r"must lie in \(0, 1\]"),
        ('metric = "p99_ttft_ms"\nmax = nan', "must be a number >= 0"),  # case G2
        ('metric = "p99_ttft_ms"\nmax = "9"', "must be a number >= 0"),
        ('metric = "p99_ttft_ms"\nmax = true', "must be a number >= 0"),
        ('metric = "p99_ttft_ms"\nmax = 9\nobserve = 1', "observe 1: must be true or false"),
        ('metric = "p99_ttft_ms"\nmax = 9\ncells = { max_inflght = 4 }', "did you mean max_inflight"),
        ('metric = "p99_ttft_ms"\nmax = 9\ncells = { max_inflight = "many" }', 'number or "none"'),
        ('metric = "p99_ttft_ms"\nmax = 9\ncells = { admission = "slots:4" }', "must be none, or parts"),
        ('metric = "p99_ttft_ms"\nmax = 9\ncells = { admission = 64 }', "must look like"),
        (
            'metric = "p99_ttft_ms"\nmax = 9\ncells = { admission = "none", max_inflight = 4 }',
            "names a limit twice",
        ),
        ('metric = "p99_ttft_ms"\nmax = 9\ncells = 4', "must be a table"),
    ],
)
def test_a_wrong_rule_is_refused_by_name(tmp_path: Path, table: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rules_of(tmp_path, f"[[rule]]\n{table}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no"),
        ("rule = []", "holds no"),
        ("[rules]", r"only \[\[rule\]\]"),
        ("= 1", "not valid TOML"),
    ],
)
def test_a_file_without_rules_is_refused(tmp_path: Path, text: str, message: str) -> None:  # case G1
    with pytest.raises(InputError, match=message):
        rules_of(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--thresholds.*No such file"):
        read_thresholds(tmp_path / "none.toml")


def test_every_latency_of_the_summary_can_have_a_rule() -> None:
    latencies = {
        name
        for name in SUMMARY_SCHEMA.names
        if name.endswith("_ms") and not name.startswith(("median", "client"))
    }
    assert latencies <= HIGHER_IS_BETTER.keys()


def test_more_is_better_for_what_was_served_and_for_nothing_else() -> None:  # case G4
    better = {name for name, higher in HIGHER_IS_BETTER.items() if higher}
    served = {"output_throughput", "request_throughput", "request_goodput", "good_share", "good"}
    assert better == served | {"completed", "admitted"}


def test_default_rules_are_of_metrics_that_exist() -> None:
    assert [(rule.metric, rule.demand) for rule in DEFAULT_RULES] == [
        ("p99_ttft_ms", "at most x1.1"),
        ("output_throughput", "at least x0.9091"),
    ]


def test_a_file_whose_rules_only_observe_is_refused(tmp_path: Path) -> None:  # case G10
    with pytest.raises(InputError, match="every rule only observes"):
        rules_of(tmp_path, '[[rule]]\nmetric = "p99_ttft_ms"\nmax = 1\nobserve = true')


def test_the_rules_of_exact_figures_leave_one_percent() -> None:
    rules = read_thresholds(Path(__file__).parents[2] / "experiments" / "deterministic.toml")
    assert [(rule.metric, rule.bound, rule.is_ratio) for rule in rules] == [
        ("p99_ttft_ms", 1.01, True),
        ("output_throughput", 0.99, True),
    ]
