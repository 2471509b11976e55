"""What a client saw, as rows of the record."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from roseinfer.bench.http.exchange import Failure, HttpAttempt, HttpRequest
from roseinfer.bench.http.rows import attempt_rows, outcome_of, request_row
from roseinfer.bench.records import ATTEMPT_SCHEMA, REQUEST_SCHEMA, TTFT_PARTS, Outcome, derive
from tests.bench.rows import as_read

T0 = 100.0


def answered(sent_s: float = 100.5, **more: Any) -> HttpAttempt:
    known: dict[str, Any] = {
        "sent_s": sent_s,
        "head_s": sent_s + 0.25,
        "ended_s": sent_s + 1.0,
        "status_code": 200,
        "deliveries": [(sent_s + 0.25, 1), (sent_s + 0.75, 2)],
        "prompt_tokens": 8,
        "output_tokens": 3,
        "finish_reason": "length",
    }
    return HttpAttempt(**{**known, **more})


def failed(failure: Failure, status_code: int | None = None, **more: Any) -> HttpAttempt:
    head_s = None if status_code is None else 100.75
    known: dict[str, Any] = {"sent_s": 100.5, "head_s": head_s, "ended_s": 101.0}
    return HttpAttempt(**{**known, "failure": failure, "status_code": status_code, **more})


def row_of(*tries: HttpAttempt, **more: Any) -> dict[str, Any]:
    return request_row(HttpRequest(0.25, tries=list(tries), **more), T0)


def derived(*tries: HttpAttempt, **more: Any) -> pd.Series[Any]:
    return derive(as_read([row_of(*tries, **more)])).iloc[0]


def test_an_answer_is_a_row_with_a_client_s_stamps() -> None:
    row = row_of(answered(), inflight=4)
    assert row["outcome"] is Outcome.COMPLETED
    assert [row[f"{name}_s"] for name in ("scheduled", "permitted", "sent", "ended")] == [
        0.25,
        0.25,
        0.5,
        1.5,
    ]
    assert (row["received_first_s"], row["received_last_s"]) == (0.75, 1.25)
    assert (row["chunk_times_s"], row["chunk_tokens"]) == ([0.75, 1.25], [1, 2])
    assert (row["prompt_tokens"], row["output_tokens"], row["inflight_at_send"]) == (8, 3, 4)
    assert row["attempts"] == 1
    assert row["error"] is None
    assert row.keys() <= set(REQUEST_SCHEMA.names)


def test_what_only_a_server_knows_is_null() -> None:  # case E6
    row = derived(answered())
    for name in ("reserve_s", "tokenize_s", "queue_wait_s", "prefill_s", "delivery_s", "largest_itl_s"):
        assert pd.isna(row[name]), name
    assert row["tpot_s"] == 0.25


def test_tokens_to_a_chunk_are_null_where_nobody_says_them() -> None:
    row = row_of(answered(deliveries=[(100.75, None), (101.25, 2)]))
    assert row["chunk_tokens"] is None
    assert row["chunk_times_s"] == [0.75, 1.25]


def test_an_answer_without_text_has_no_ttft() -> None:  # case E14
    row = derived(answered(deliveries=[], output_tokens=0))
    assert row["outcome"] == Outcome.COMPLETED
    assert pd.isna(row["ttft_s"])
    assert pd.isna(row["tpot_s"])


@pytest.mark.parametrize(
    ("attempt", "outcome", "error"),
    [
        (failed(Failure.STATUS, 429, error="full"), Outcome.REJECTED, "status 429: full"),
        (failed(Failure.STATUS, 503, error="full"), Outcome.REJECTED, "status 503: full"),
        (failed(Failure.STATUS, 503, reject_reason="draining"), Outcome.ERROR, "status 503"),
        (failed(Failure.STATUS, 503, reject_reason="engine_dead"), Outcome.ERROR, "status 503"),
        (failed(Failure.STATUS, 500, error="oops"), Outcome.ERROR, "status 500: oops"),
        (failed(Failure.RESET), Outcome.ERROR, "connection reset"),
        (
            failed(Failure.REFUSED, error="Connection refused"),
            Outcome.ERROR,
            "connection refused: Connection refused",
        ),
        (failed(Failure.TIMEOUT, 200), Outcome.TIMEOUT, "timeout"),
        (failed(Failure.CLIENT_LIMIT), Outcome.ERROR, "client limit"),  # case K3
        (failed(Failure.OTHER), Outcome.ERROR, "other"),
        (failed(Failure.STREAM_ERROR, 200, error_code="500"), Outcome.ERROR, "stream error 500"),
        (failed(Failure.STREAM_ERROR, 200, error_code="503"), Outcome.REJECTED, "stream error 503"),
        (
            failed(Failure.STREAM_ERROR, 200, error_code="503", reject_reason="draining"),
            Outcome.ERROR,
            "stream error 503",
        ),
        (failed(Failure.INTERRUPTED, 200), Outcome.INCOMPLETE, "interrupted"),
    ],
)
def test_each_end_has_its_outcome_and_says_its_reason(  # case D12
    attempt: HttpAttempt, outcome: Outcome, error: str
) -> None:
    row = row_of(attempt)
    assert (row["outcome"], row["error"], row["status_code"]) == (outcome, error, attempt.status_code)


def test_an_error_in_a_stream_keeps_what_had_come() -> None:  # case D7
    attempt = answered(failure=Failure.STREAM_ERROR, error="the engine died", error_code="503")
    row = row_of(attempt)
    assert outcome_of(attempt) is Outcome.ERROR
    assert row["chunk_times_s"] == [0.75, 1.25]
    assert row["error"] == "stream error 503: the engine died"


def test_a_refusal_is_known_with_its_head() -> None:
    row = derived(failed(Failure.STATUS, 429, reject_reason="max_inflight"))
    assert row["reject_s"] == 0.25
    assert (row["reject_reason"], row["reject_stage"]) == ("max_inflight", "submit")


def test_a_refusal_is_as_fast_as_its_last_try() -> None:
    row = derived(failed(Failure.STATUS, 429), failed(Failure.STATUS, 429, sent_s=104.0, head_s=104.25))
    assert (row["retry_wait_s"], row["reject_s"]) == (3.5, 0.25)


def test_other_failures_have_no_reject_reason() -> None:
    assert row_of(failed(Failure.STATUS, 503, reject_reason="draining"))["reject_reason"] is None


def test_an_error_names_no_place_and_no_host() -> None:
    text = row_of(failed(Failure.STATUS, 500, error="in /home/alice/app.py via https://gpu7.example.org/x"))
    assert text["error"] == "status 500: in app.py via https://remote/x"


def test_one_that_was_never_sent_says_why() -> None:  # case C11
    row = row_of(gave_up_s=103.0, unsent_because="not sent: it was over")
    assert (row["outcome"], row["error"], row["ended_s"], row["attempts"]) == (
        Outcome.INCOMPLETE,
        "not sent: it was over",
        3.0,
        0,
    )


def test_time_to_success_counts_from_the_first_try() -> None:  # cases J3, J4
    row = derived(failed(Failure.STATUS, 429), answered(102.0))
    assert (row["outcome"], row["attempts"]) == (Outcome.COMPLETED, 2)
    assert (row["sent_s"], row["last_sent_s"], row["retry_wait_s"]) == (0.5, 2.0, 1.5)
    assert (row["ttft_s"], row["ttft_from_send_s"]) == (2.0, 1.75)


def test_the_parts_known_outside_are_null_or_exact() -> None:
    row = derived(failed(Failure.STATUS, 429), answered(102.0), permitted_s=100.375)
    assert [row[part] for part in TTFT_PARTS[:3]] == [0.125, 0.125, 1.5]
    assert all(pd.isna(row[part]) for part in TTFT_PARTS[3:])


def test_the_server_s_own_durations_travel_with_the_answer() -> None:  # cases E15, K5
    row = derived(answered(timings={"queue_s": 0.125, "prefill_s": 0.0625, "decode_s": 0.5}))
    assert (row["server_queue_s"], row["server_prefill_s"]) == (0.125, 0.0625)
    assert row["server_queue_s"] + row["server_prefill_s"] <= row["ttft_from_send_s"]


@pytest.mark.parametrize("value", ["0.1", -1, None, float("nan"), float("inf"), True, [1]])
def test_what_is_no_duration_is_not_taken_for_one(value: object) -> None:
    assert row_of(answered(timings={"queue_s": value}))["server_queue_s"] is None


def test_every_try_is_a_row() -> None:  # case J3
    request = HttpRequest(0.25, tries=[failed(Failure.STATUS, 429, retry_after_s=2.0), answered(103.0)])
    rows = list(attempt_rows(7, request, T0))
    assert [(row["request_index"], row["attempt"], row["outcome"]) for row in rows] == [
        (7, 1, Outcome.REJECTED),
        (7, 2, Outcome.COMPLETED),
    ]
    assert (rows[0]["retry_after_s"], rows[0]["sent_s"], rows[1]["sent_s"]) == (2.0, 0.5, 3.0)
    assert rows[0].keys() | {"run_id", "cell_id", "repeat"} == set(ATTEMPT_SCHEMA.names)
