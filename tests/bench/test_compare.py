from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from roseinfer.bench.compare import DISTRIBUTION, METRICS, Answer, Difference, Differences, answer_of, compare
from roseinfer.bench.sides import Comparison
from roseinfer.bench.stats import Interval
from roseinfer.bench.verdicts import compare_notes
from roseinfer.errors import InputError
from tests.bench.made_sides import NO_LIMIT, around, measured_side, side
from tests.bench.rows import measured

INF = math.inf


def compared(
    interval: Interval, *, repeats: int = 10, needed: int = 6, margin: float = 0.10
) -> tuple[Answer, int | None]:
    return answer_of(Comparison(interval, (1000, 1000), (repeats, repeats), needed, 6), margin)


@pytest.mark.parametrize(
    ("interval", "answer"),
    [
        (Interval(1.01, 1.05, 1.09), Answer.DIFFERENT),  # for certain, although by little
        (Interval(0.80, 0.90, 0.99), Answer.DIFFERENT),
        (Interval(0.92, 1.00, 1.09), Answer.SAME),
        (Interval(1.00, 1.02, 1.10), Answer.SAME),
        (Interval(0.90, 1.00, 1.09), Answer.UNKNOWN),  # 1 / 1.1 is 0.909
        (Interval(0.95, 1.20, 1.50), Answer.UNKNOWN),  # case G8
        (Interval(-INF, 1.0, INF), Answer.UNKNOWN),  # case F9
        (Interval(0.0, 1.0, INF), Answer.UNKNOWN),  # zeros
        (Interval(0.0, 0.0, 1.0), Answer.UNKNOWN),
        (Interval(1.0, INF, INF), Answer.UNKNOWN),
        (Interval(INF, INF, INF), Answer.DIFFERENT),
    ],
)
def test_the_three_answers(interval: Interval, answer: Answer) -> None:
    assert compared(interval)[0] is answer


def test_the_margin_is_the_users() -> None:
    assert compared(Interval(0.90, 1.00, 1.09), margin=0.2)[0] is Answer.SAME


def test_unknown_says_how_many_more_repeats() -> None:  # case G8
    # 0.05 from 1 and +-0.10 wide (logs): 4 x as many exclude 1, and 4.9 x as many fit into log 1.1.
    interval = Interval(*(math.exp(x) for x in (-0.05, 0.05, 0.15)))
    assert compared(interval) == (Answer.UNKNOWN, 30)


def test_unknown_without_bounds_says_how_many_repeats_it_takes() -> None:  # case G11
    assert compared(Interval(-INF, 1.0, INF), repeats=2, needed=9) == (Answer.UNKNOWN, 7)


def rows_of(found: Differences, metric: str) -> list[Difference]:
    return [row for row in found.rows if row.metric == metric]


def cell(p99_ms: float = 100.0, spread: float = 0.005, n: int = 10, **figures: Any) -> dict[str, Any]:
    made = {
        metric: around(50.0, spread, n)
        for metric in ("p99_queue_wait_ms", "p50_ttft_ms", "output_throughput")
    }
    return {**made, "p99_ttft_ms": around(p99_ms, spread, n), **figures}


def test_every_cell_and_metric_has_an_answer() -> None:
    found = compare(side({64: cell(), NO_LIMIT: cell()}), side({64: cell(120.0), NO_LIMIT: cell()}))
    answers = {(row.cell, row.metric): row.answer for row in found.rows if row.metric != DISTRIBUTION}
    assert len(answers) == 2 * len(METRICS)
    assert {key for key, answer in answers.items() if answer is not Answer.SAME} == {
        ("limit 64", "p99_ttft_ms")
    }
    assert answers["limit 64", "p99_ttft_ms"] is Answer.DIFFERENT
    assert found.level == pytest.approx(1 - 0.05 / 12)  # the distributions count too


def test_the_ratio_is_of_b_to_a() -> None:
    found = compare(side({NO_LIMIT: cell(100.0)}), side({NO_LIMIT: cell(150.0)}))
    (row,) = rows_of(found, "p99_ttft_ms")
    assert row.figure is not None
    assert row.figure.point == pytest.approx(1.5)
    assert (row.a, row.b) == pytest.approx((100.0, 150.0), rel=0.01)


def test_what_was_not_measured_is_unknown() -> None:  # case G1
    found = compare(side({NO_LIMIT: cell(p99_queue_wait_ms=math.nan)}), side({NO_LIMIT: cell()}, name="b"))
    (row,) = rows_of(found, "p99_queue_wait_ms")
    assert (row.answer, row.remark) == (Answer.UNKNOWN, "run has no p99_queue_wait_ms: not measured")


def test_cells_of_one_side_only_are_named() -> None:
    found = compare(side({64: cell(), NO_LIMIT: cell()}, name="a"), side({64: cell()}, name="b"))
    assert "only in a: no limit" in found.notes


def test_runs_without_a_common_cell_are_refused() -> None:
    with pytest.raises(InputError, match="no cell in common"):
        compare(side({64: cell()}), side({NO_LIMIT: cell()}))


@pytest.mark.parametrize("margin", [0.0, -0.1, math.inf, math.nan])
def test_a_margin_that_cannot_be_is_refused(margin: float) -> None:
    with pytest.raises(InputError, match="--margin"):
        compare(side({64: cell()}), side({64: cell()}), margin=margin)


def test_an_invalid_run_is_named() -> None:
    found = compare(side({64: cell()}), side({64: cell()}, name="b", invalid="a slot leaked"))
    assert any(note.startswith("INVALID: b: ") for note in found.notes)


def bursts(service_s: tuple[float, ...], name: str, **manifest: Any) -> Any:
    rows = [measured(burst_size=40, repeat=repeat, service_s=s) for repeat, s in enumerate(service_s)]
    return measured_side(pd.concat(rows, ignore_index=True), name=name, **manifest)


def test_a_change_of_spread_is_found_beside_the_ratio() -> None:  # case G12
    steady = bursts((0.0100, 0.0101, 0.0099, 0.0100) * 5, "a")
    swinging = bursts((0.0010, 0.1000, 0.0011, 0.0900) * 5, "b")
    found = compare(steady, swinging)
    (ratio,), (shape,) = rows_of(found, "p99_ttft_ms"), rows_of(found, DISTRIBUTION)
    assert ratio.answer is Answer.UNKNOWN
    assert shape.answer is Answer.DIFFERENT
    assert shape.distance is not None
    assert shape.n == (800, 800)
    assert shape.repeats == (20, 20)


def test_no_difference_of_distributions_is_never_called_the_same() -> None:  # case G8
    (shape,) = rows_of(compare(bursts((0.01,) * 4, "a"), bursts((0.01,) * 4, "b")), DISTRIBUTION)
    assert (shape.answer, shape.remark) == (Answer.UNKNOWN, "no difference shown")


def test_simulated_runs_are_compared_exactly() -> None:
    found = compare(bursts((0.01, 0.01), "a", target="sim"), bursts((0.01001, 0.01001), "b", target="sim"))
    (row,) = rows_of(found, "p99_ttft_ms")
    assert row.answer is Answer.DIFFERENT
    assert rows_of(found, DISTRIBUTION) == []
    assert "80 of 80 simulated requests differ" in found.notes[0]


def test_simulated_runs_of_other_repeats_are_refused() -> None:
    # Pooled, three repeats of which one is slow and two that are not differ: in what was simulated, not in the code.
    with pytest.raises(InputError, match="other repeats"):
        compare(bursts((0.01, 0.01, 0.02), "a", target="sim"), bursts((0.01, 0.01), "b", target="sim"))


def test_simulated_runs_are_not_said_to_have_intervals() -> None:
    sides = [bursts((0.01, 0.01), name, target="sim") for name in "ab"]
    notes = "\n".join(compare_notes(compare(*sides)))
    assert "simulated: ratios of figures over all repeats, exact;" in notes
    assert "interval" not in notes
    assert DISTRIBUTION not in notes


def test_refusals_in_a_few_repeats_are_not_the_same() -> None:
    refusing = cell(reject_rate=[0.5] * 2 + [0.0] * 8)
    (row,) = rows_of(compare(side({64: cell()}), side({64: refusing})), "reject_rate")
    assert row.answer is Answer.UNKNOWN
    assert "repeats differ too much" in row.remark


def test_a_repeat_that_measured_nothing_makes_no_answer() -> None:  # case G1
    found = compare(side({NO_LIMIT: cell(p50_ttft_ms=[50.0] * 9 + [math.nan])}), side({NO_LIMIT: cell()}))
    (row,) = rows_of(found, "p50_ttft_ms")
    assert row.answer is Answer.UNKNOWN


def test_beside_latencies_stand_the_refused_and_the_served() -> None:  # case D3
    found = compare(side({64: cell()}), side({64: cell(reject_rate=0.25, completed=96)}))
    (row,), (rate,) = rows_of(found, "p99_ttft_ms"), rows_of(found, "output_throughput")
    assert (row.refused, row.served) == ((0.0, 0.25), (1.0, 0.75))
    assert (rate.refused, rate.served) == ((), ())


def test_an_unfinished_run_is_named() -> None:
    found = compare(side({64: cell()}, name="a", done=False), side({64: cell()}))
    assert "a is not finished: 1 of 8 cells and repeats are" in found.notes
