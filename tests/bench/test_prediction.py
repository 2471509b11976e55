"""How far a prediction was off: errors of made-up servers whose every latency is known, their table and verdict."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.prediction import compare_json, error_text, errors, table, verdict, verdict_lines
from tests.bench.load_shapes import served
from tests.bench.rows import measured


def side(*cells: dict[str, Any], repeats: int = 2) -> pd.DataFrame:
    """These cells of a server that takes 10 ms for a request, in so many repeats."""
    rows = [
        measured(**{"burst_size": 100, "repeat": repeat, **cell})
        for cell in cells
        for repeat in range(repeats)
    ]
    return pd.concat(rows, ignore_index=True)


def only(found: pd.DataFrame) -> pd.Series[Any]:
    assert len(found) == 1
    return found.iloc[0]


def test_an_error_is_predicted_over_measured_less_one() -> None:
    row = only(errors(side({}), side({"service_s": 0.011})))
    # The queue wait of request i is i times the service time, but for the moment until the server starts.
    assert row["error_p50_ttft_ms"] == pytest.approx(0.1, abs=0.01)
    assert row["error_p99_queue_wait_ms"] == pytest.approx(0.1, abs=0.01)
    assert row["measured_p90_ttft_ms"] == pytest.approx(10 + 90 * 10 + 0.1)
    assert row["predicted_p90_ttft_ms"] == pytest.approx(10 + 90 * 11 + 0.1)


def test_percentiles_are_of_all_repeats_together() -> None:
    fast_and_slow = pd.concat([side({}, repeats=1), side({"service_s": 0.02, "repeat": 1}, repeats=1)])
    row = only(errors(fast_and_slow, side({})))
    assert row["measured_n_ttft"] == 200
    assert row["measured_p99_ttft_ms"] == pytest.approx(10 + 98 * 20 + 0.1)  # the 198th of 200


def test_a_percentile_that_its_sample_cannot_carry_is_null() -> None:  # case F10
    row = only(errors(side({"burst_size": 49}), side({"burst_size": 49})))
    assert math.isnan(row["measured_p99_ttft_ms"])
    assert math.isnan(row["error_p99_ttft_ms"])
    assert row["error_p90_ttft_ms"] == 0


def test_what_a_server_does_not_say_is_null() -> None:
    remote = side({}).assign(first_scheduled_s=np.nan, reserved_s=np.nan, tokenized_s=np.nan)
    row = only(errors(remote, side({})))
    assert math.isnan(row["measured_p50_queue_wait_ms"])
    assert math.isnan(row["error_p50_queue_wait_ms"])
    assert row["error_p50_ttft_ms"] == 0


def test_an_error_to_zero_is_null() -> None:
    waitless = side({})
    waitless = waitless.assign(first_scheduled_s=waitless["tokenized_s"])
    row = only(errors(waitless, side({})))
    assert row["measured_p50_queue_wait_ms"] == 0
    assert math.isnan(row["error_p50_queue_wait_ms"])


def test_refusals_are_means_of_a_repeat_and_their_difference_a_share_of_the_offered() -> None:
    row = only(errors(side({"limit": 64}, repeats=4), side({"limit": 64}).iloc[:-7]))
    assert (row["offered"], row["measured_rejected"], row["predicted_rejected"]) == (100, 36, 32.5)
    assert row["reject_difference"] == pytest.approx(65 / 193 - 0.36)


def test_cells_match_by_their_id_in_the_order_measured() -> None:
    found = errors(side({"limit": 64}, {}, {"limit": 16}), side({}, {"limit": 32}, {"limit": 64}))
    assert found["cell_id"].tolist() == ["limit=64,prompt=32", "limit=None,prompt=32"]
    assert found["admission"].tolist() == ["inflight:64", "none"]


def test_the_verdict_is_the_median_over_cells_and_the_worst_cell() -> None:
    cells: list[dict[str, Any]] = [{"prompt_len": n} for n in (1, 2, 3)]
    predicted = side(
        *[{**cell, "service_s": s} for cell, s in zip(cells, (0.0101, 0.0110, 0.0080), strict=True)]
    )
    found = verdict(errors(side(*cells), predicted))
    assert found.cells == 3
    assert found.median_error["p99_ttft_ms"] == pytest.approx(0.1, abs=0.01)
    assert found.worst_error == pytest.approx(-0.2, abs=0.01)
    assert found.worst_cell == "no limit, prompt of 3 tokens"
    assert (found.reject_difference, found.reject_cell) == (0, "no limit, prompt of 1 tokens")


def test_of_an_even_number_of_cells_the_median_lies_between_the_middle_two() -> None:
    cells: list[dict[str, Any]] = [{"prompt_len": n} for n in (1, 2)]
    predicted = side(*[{**cell, "service_s": s} for cell, s in zip(cells, (0.0102, 0.0108), strict=True)])
    found = verdict(errors(side(*cells), predicted))
    assert found.median_error["p99_ttft_ms"] == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize("slow", ["measured", "predicted"])
def test_both_sides_are_without_what_was_warm_up_where_it_was_measured(slow: str) -> None:
    """40 of 200 requests take a second longer at the start: of the prediction that is no warm-up."""
    steady = served([0.5 * n for n in range(200)], arrival="poisson", request_rate=2.0)
    late = (steady["request_index"] < 40).astype(float)
    slower = steady.assign(received_first_s=steady["received_first_s"] + late)
    sides = {"measured": steady, "predicted": steady} | {slow: slower}
    row = only(errors(sides["measured"], sides["predicted"]))
    kept = 160 if slow == "measured" else 200
    assert (row["measured_n_ttft"], row["predicted_n_ttft"]) == (kept, kept)
    assert row["error_p99_ttft_ms"] == pytest.approx(0 if slow == "measured" else 100)


def test_the_verdict_in_sentences() -> None:
    predicted = pd.concat([side({"limit": 64, "service_s": 0.0110}), side({"limit": 16}).iloc[:-10]])
    lines = verdict_lines(errors(side({"limit": 64}, {"limit": 16}), predicted))
    assert lines[0].startswith(
        "Predicted over measured, median over 2 cells of the size of the error: p50 TTFT 4.8 %"
    )
    assert lines[1].startswith("The farthest off: +9.9 % in p99 queue wait")
    assert lines[1].endswith(" at limit 64.")
    assert lines[2] == "Refusals: at most -0.8 % of the offered at limit 16."


def test_what_was_not_measured_is_said_to_be_so() -> None:  # case G1
    (line, refusals) = verdict_lines(errors(side({"limit": 1}, repeats=1), side({"limit": 1}, repeats=1)))
    assert line.endswith(
        "p50 TTFT not measured, p99 TTFT not measured, p50 queue wait not measured, p99 queue wait not measured."
    )
    assert refusals == "Refusals: as many as measured, in every cell."


def test_no_cell_in_common() -> None:
    found = errors(side({"limit": 1}), side({"limit": 2}))
    assert found.empty
    assert table(found) == ""
    assert verdict_lines(found) == ["Predicted over measured: no cell in common."]
    assert compare_json(found, "a", "b", [])["cells"] == []


def test_the_table_has_a_column_per_limit_and_a_part_per_combination() -> None:
    cells: list[dict[str, Any]] = [
        {"limit": limit, "prompt_len": n} for n in (32, 64) for limit in (50, None)
    ]
    parts = table(errors(side(*cells), side(*cells))).split("\n\n")
    assert [part.splitlines()[0] for part in parts] == ["prompt of 32 tokens", "prompt of 64 tokens"]
    lines = [line.split() for line in parts[0].splitlines()]
    assert ["max", "inflight", "50", "no", "limit"] in lines
    assert ["rejected,", "predicted", "50", "0"] in lines
    assert ["p50,", "measured", "260.1", "510.1"] in lines


def test_limits_that_do_not_fit_go_on_below() -> None:
    cells = [{"limit": limit} for limit in range(1, 20)]
    found = table(errors(side(*cells, repeats=1), side(*cells, repeats=1)), 60)
    assert max(map(len, found.splitlines())) <= 60
    assert found.count("max inflight") > 1


def test_a_small_sample_is_named_in_the_table() -> None:  # case F10
    found = table(errors(side({"burst_size": 30}), side({"burst_size": 30})))
    (line,) = [line for line in found.splitlines() if "p99, measured" in line and "n=60" in line][:1]
    assert line.endswith("n/a (n=60)")


def test_json_holds_null_for_what_was_not_measured() -> None:
    same = side({"limit": 1}, repeats=1)
    found = compare_json(errors(same, same), "real", "guess", ["a note"])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["cells"][0]["measured_p50_ttft_ms"] is None
    assert found["cells"][0]["measured_rejected"] == 99
    assert found["verdict"]["worst_error"] is None


@pytest.mark.parametrize(
    ("error", "text"), [(0.0, "0 %"), (0.1234, "+12.3 %"), (-0.05, "-5.0 %"), (math.nan, "n/a")]
)
def test_errors_have_a_sign(error: float, text: str) -> None:
    assert error_text(error) == text
