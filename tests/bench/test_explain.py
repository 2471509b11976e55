from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from roseinfer.bench.explain import PARTS, WAITED_FOR, explain, explain_sentence
from roseinfer.bench.records import STEP_SCHEMA, as_frame, derive
from roseinfer.bench.report import explain_lines
from roseinfer.bench.stats import percentile
from tests.bench.rows import as_read, measured

NO_STEPS = pd.DataFrame()


def only(requests: pd.DataFrame, steps: pd.DataFrame = NO_STEPS) -> pd.Series[Any]:
    found = explain(requests, steps)
    assert len(found) == 1
    return found.iloc[0]


def row(index: int, due_s: float, scheduled_s: float, first_s: float, **more: Any) -> dict[str, Any]:
    """A request as token ids, whose stages lie at these times."""
    reached = dict.fromkeys(("scheduled_s", "permitted_s", "sent_s", "reserved_s", "admitted_s"), due_s)
    done = dict.fromkeys(("first_token_s", "received_first_s", "last_token_s", "received_last_s"), first_s)
    key = {"run_id": "run", "cell_id": "cell", "repeat": 0, "request_index": index, "arrival": "burst"}
    served = {"first_scheduled_s": scheduled_s, "outcome": "completed", "output_tokens": 1}
    return {**key, **reached, **served, **done, **more}


def step(start_s: float, end_s: float, prefills: list[int], decodes: list[int]) -> dict[str, Any]:
    members = [{"request_index": i, "start": 9, "n_tokens": 1} for i in decodes]
    members += [{"request_index": i, "start": 0, "n_tokens": 8} for i in prefills]
    key = {"run_id": "run", "cell_id": "cell", "repeat": 0}
    stamps = {"exec_start_s": start_s, "exec_end_s": end_s}
    return {**key, **stamps, "prefill_requests": len(prefills), "members": members}


def steps_of(*rows: dict[str, Any]) -> pd.DataFrame:
    return as_frame(table_of(*rows))


def table_of(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=STEP_SCHEMA)


def shares(found: pd.Series[Any], names: Any) -> dict[str, float]:
    return {name: found[f"{name}_share"] for name in names if found[f"{name}_share"] != 0}


# --- parts


def test_parts_of_a_ttft_sum_to_it() -> None:  # case E15
    found = only(measured(burst_size=200))
    assert sum(found[f"{part}_share"] for part in PARTS) == pytest.approx(1)


def test_parts_are_those_of_the_requests_around_the_p99() -> None:
    burst = measured(burst_size=1000)
    found = only(burst)
    derived = derive(burst).sort_values("ttft_s").iloc[984:995]  # p98.5 to p99.5
    assert found["explained"] == len(derived)
    assert found["queue_wait_share"] == pytest.approx(derived["queue_wait_s"].sum() / derived["ttft_s"].sum())
    assert found["p99_ttft_ms"] == percentile(1e3 * derive(burst)["ttft_s"], 99)


def test_at_most_25_ranks_on_each_side_are_explained() -> None:
    assert only(measured(burst_size=20_000, output_tokens=1))["explained"] == 51


def test_the_p99_is_pooled_over_repeats() -> None:
    rows = pd.concat([measured(burst_size=100), measured(burst_size=100, repeat=1, service_s=0.1)])
    assert only(rows)["p99_ttft_ms"] == percentile(1e3 * derive(rows)["ttft_s"], 99)


def test_prompts_sent_as_token_ids_have_no_tokenising() -> None:
    found = only(as_read([row(0, 0.0, 0.3, 0.4)]))
    assert shares(found, PARTS) == pytest.approx({"queue_wait": 0.75, "prefill": 0.25})


def test_a_part_that_was_not_measured_leaves_all_shares_null() -> None:
    found = only(as_read([row(0, 0.0, np.nan, 0.4, first_token_s=np.nan)]))
    assert found[[f"{part}_share" for part in PARTS]].isna().all()
    assert explain_sentence(found) == "TTFT max (n=1) is 400.0 ms; its parts were not measured"


def test_a_ttft_of_zero_has_no_shares() -> None:
    assert only(as_read([row(0, 1.0, 1.0, 1.0)]))[[f"{part}_share" for part in PARTS]].isna().all()


# --- waiting


def test_time_in_the_queue_is_told_by_what_the_steps_did() -> None:
    # Request 5 waits from 0 to 10 s.
    request = as_read([row(5, 0.0, 10.0, 11.0)])
    steps = steps_of(
        step(-1.0, 1.0, [1], []),  # 1 s of it: an earlier arrival's prefill
        step(1.0, 3.0, [7], [1]),  # a later arrival's
        step(3.0, 6.0, [], [1, 7]),  # decodes only
        step(7.0, 9.0, [7, 2], [1]),  # both: an earlier one is being prefilled
        step(10.0, 11.0, [5], [1]),  # its own
    )
    found = only(request, steps)
    assert shares(found, WAITED_FOR) == pytest.approx(
        {"earlier_prefill": 0.3, "later_prefill": 0.2, "decode_only": 0.3, "no_step": 0.2}
    )
    assert (found["steps_waited"], found["requests_waited"], found["wait_ms"]) == (4, 3, 10_000)
    assert explain_sentence(found) == (
        "TTFT max (n=1) is 11000.0 ms: 91 % queue wait, 9 % prefill. Of 10000.0 ms in the queue,"
        " 30 % in steps that prefilled earlier arrivals, 30 % in steps that only decoded,"
        " 20 % outside of any step, 20 % in steps that prefilled later arrivals only:"
        " 4 steps, with 3 other requests in them"
    )


def test_a_wait_without_any_step_is_outside_of_steps() -> None:
    found = only(as_read([row(0, 0.0, 2.0, 3.0)]), steps_of(step(5.0, 6.0, [0], [])))
    assert shares(found, WAITED_FOR) == {"no_step": 1.0}
    assert (found["steps_waited"], found["requests_waited"]) == (0, 0)


def test_no_wait_has_no_shares() -> None:
    found = only(as_read([row(0, 0.0, 0.0, 3.0)]), steps_of(step(0.0, 3.0, [0], [])))
    assert found["wait_ms"] == 0
    assert found[[f"{what}_share" for what in WAITED_FOR]].isna().all()
    assert explain_sentence(found) == "TTFT max (n=1) is 3000.0 ms: 100 % prefill"


def test_repeats_wait_for_their_own_steps() -> None:
    rows = pd.concat([as_read([row(0, 0.0, 2.0, 3.0)]), as_read([row(0, 0.0, 2.0, 3.0, repeat=1)])])
    steps = steps_of(step(0.0, 2.0, [1], []), {**step(0.0, 2.0, [], [1]), "repeat": 1})
    found = only(rows, steps)
    assert shares(found, WAITED_FOR) in (
        {"later_prefill": 1.0},
        {"decode_only": 1.0},
    )  # the rank of two is one


def test_steps_as_objects_say_the_same() -> None:
    request = as_read([row(5, 0.0, 10.0, 11.0)])
    steps = table_of(step(0.0, 4.0, [1], []), step(4.0, 10.0, [], [1, 2]))
    pd.testing.assert_frame_equal(explain(request, as_frame(steps)), explain(request, steps.to_pandas()))


# --- cells


def test_a_run_without_steps_explains_the_parts_alone() -> None:
    found = only(measured(burst_size=200))
    assert np.isnan(found["steps_waited"])
    assert explain_sentence(found) == "p99 TTFT is 1990.1 ms: 99 % queue wait, 1 % prefill"


def test_when_all_were_refused_there_is_nothing_to_explain() -> None:  # case D2
    refused = measured(burst_size=8, limit=4)
    found = only(refused[refused["outcome"] == "rejected"])
    assert (found["n"], found["explained"]) == (0, 0)
    assert np.isnan(found["p99_ttft_ms"])
    assert explain_sentence(found) == "nothing completed: there is no TTFT to explain"


def test_every_cell_has_a_line() -> None:
    rows = pd.concat([measured(burst_size=200, limit=limit) for limit in (None, 120)])
    first, second = explain_lines(rows, NO_STEPS)
    assert (
        first == "p99 explained: limit=None,prompt=32: p99 TTFT is 1990.1 ms: 99 % queue wait, 1 % prefill."
    )
    assert second.startswith("p99 explained: limit=120,prompt=32: p99 TTFT is ")
