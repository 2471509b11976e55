"""What is said of limits that nobody measured."""

from __future__ import annotations

from dataclasses import replace

from roseinfer.bench.predicted_limits import Prediction, peak_without_limit
from roseinfer.bench.recommend import Evidence, Recommendation, best, parse_slo

NO_SLO_KEPT = ("p99_ttft:250 is missed",)


def evidence(limit: int, served: int, *, qualifies: bool = True) -> Evidence:
    """Of 100 offered."""
    return Evidence(
        limit=f"inflight:{limit}",
        offered=100,
        served=served,
        repeats={},
        reject_rate=0.0,
        wasted_share=0.0,
        judgements=(),
        why_not=() if qualifies else NO_SLO_KEPT,
    )


def found(*tried: Evidence) -> Recommendation:
    return Recommendation({}, (parse_slo("p99_ttft:250"),), tried, best(tried))


MEASURED = found(evidence(8, 50), evidence(16, 70), evidence(32, 20, qualifies=False))  # 16 is chosen


def test_a_limit_between_that_is_predicted_to_serve_more_is_named() -> None:
    predicted = found(evidence(8, 50), evidence(16, 60), evidence(24, 65), evidence(32, 20))

    assert Prediction(MEASURED, predicted).sentence() == (
        "Predicted, not measured: 24 would do better, 65.0 % served within the goal against 60.0 % predicted for 16."
    )


def test_it_is_named_where_another_measured_one_is_predicted_to_be_the_best() -> None:
    predicted = found(evidence(8, 50), evidence(16, 60), evidence(24, 65), evidence(32, 90))

    assert "24 would do better" in Prediction(MEASURED, predicted).sentence()


def test_one_that_is_predicted_to_serve_as_many_is_not_better() -> None:
    predicted = found(evidence(8, 50), evidence(16, 60), evidence(24, 60), evidence(32, 20))

    assert Prediction(MEASURED, predicted).sentence() == (
        "No limit between those measured is predicted to keep the goal and to serve more within it."
    )


def test_one_that_misses_the_goal_is_not_better() -> None:
    predicted = found(evidence(8, 50), evidence(16, 60), evidence(24, 80, qualifies=False))

    assert "No limit between those measured" in Prediction(MEASURED, predicted).sentence()


def test_where_none_that_was_measured_keeps_the_goal_one_between_may() -> None:
    nothing = replace(MEASURED, chosen=None)
    predicted = found(evidence(8, 50), evidence(16, 60), evidence(24, 55))
    neither = found(evidence(8, 50), evidence(24, 55, qualifies=False))

    assert Prediction(nothing, predicted).sentence() == (
        "Predicted, not measured: 24 would keep it, with 55.0 % served within the goal. Measure it."
    )
    assert Prediction(nothing, neither).sentence() == (
        "Predicted, not measured: none of the limits between keeps the goal either."
    )


def test_what_a_server_had_in_flight_is_what_its_client_had_outstanding() -> None:
    limited = {"limit": 8, "peak_inflight": None, "peak_outstanding": 99}
    server = {"limit": None, "peak_inflight": None, "peak_outstanding": 32}
    engine = {"limit": None, "peak_inflight": 24, "peak_outstanding": 32}
    assert [peak_without_limit([limited, cell]) for cell in (server, engine)] == [32, 24]
    assert peak_without_limit([limited]) == 1
