"""From attempts to rows: what a client saw, in the columns of the record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.experiment import Cell
from roseinfer.bench.records import REQUEST_SCHEMA
from roseinfer.bench.rows import Attempt, factor_columns, request_row
from roseinfer.bench.workload import Workload
from roseinfer.errors import ManagerClosedError, SchedulerManagerOverloadedError
from roseinfer.request import FinishReason, TokenEvent
from roseinfer.stream import Timings

T0 = 100.0


def answered(tokens: int, **changes: Any) -> Attempt:
    """Due at 1 s, sent at 1.5 s, a token each at 2 s, 3 s ... and received half a second later. Clock 100 s ahead."""
    timings = Timings(101.5, 101.6, 101.7, 102.0, 101.0 + tokens, 101.0 + tokens, 102.0 + tokens)
    ends = [None] * (tokens - 1) + [FinishReason.LENGTH]
    fields: dict[str, Any] = {
        "sent_s": 101.5,
        "returned_s": 101.55,
        "waiting": 2,
        "inflight": 3,
        "timings": timings,
        "prompt_tokens": 7,
        "deliveries": [(102.5 + i, [TokenEvent(0, 1, 102.0 + i, end)]) for i, end in enumerate(ends)],
    }
    return Attempt(1.0, **(fields | changes))


def test_a_completed_request() -> None:
    row = request_row(answered(3), T0)
    assert set(row) <= set(REQUEST_SCHEMA.names)
    assert (row["scheduled_s"], row["permitted_s"], row["sent_s"], row["admitted_s"]) == pytest.approx(
        (1.0, 1.0, 1.5, 1.55)
    )
    assert (row["outcome"], row["finish_reason"], row["attempts"]) == ("completed", "length", 1)
    assert row["token_times_s"] == [2.0, 3.0, 4.0]
    assert row["chunk_times_s"] == [2.5, 3.5, 4.5]
    assert (row["received_first_s"], row["received_last_s"], row["ended_s"]) == (2.5, 4.5, 4.5)
    assert (row["waiting_at_send"], row["inflight_at_send"], row["prompt_tokens"]) == (2, 3, 7)


def test_a_request_that_the_client_held_back_counts_from_its_schedule() -> None:
    row = request_row(answered(1, permitted_s=101.25), T0)
    assert (row["scheduled_s"], row["permitted_s"]) == (1.0, 1.25)


def test_what_came_after_the_client_gave_up_is_not_in_the_row() -> None:  # cases A18, D7
    read = answered(3).deliveries[:2]
    row = request_row(answered(3, gave_up_s=103.75, deliveries=read), T0)
    assert (row["outcome"], row["finish_reason"], row["ended_s"]) == ("timeout", "abort", 3.75)
    assert row["output_tokens"] == 2
    assert row["token_times_s"] == [2.0, 3.0]
    assert row["last_token_s"] == 3.0  # the engine had a third one, at 4 s
    assert row["released_s"] == 5.0


def test_a_request_given_up_before_its_first_token_has_none() -> None:  # case A18
    row = request_row(answered(3, gave_up_s=102.25, deliveries=[]), T0)
    assert row["outcome"] == "timeout"
    assert [row[name] for name in ("first_token_s", "last_token_s", "received_first_s", "token_times_s")] == [
        None
    ] * 4
    assert row["output_tokens"] == 0


def test_a_stream_that_was_closed_from_outside_is_cancelled() -> None:
    row = request_row(answered(1, deliveries=[(103.0, [TokenEvent(0, None, 102.9, FinishReason.ABORT)])]), T0)
    assert (row["outcome"], row["ended_s"], row["token_times_s"]) == ("cancelled", 3.0, None)


def test_an_error_after_the_first_token_keeps_the_token() -> None:  # case D7
    end = TokenEvent(0, None, 103.0, FinishReason.ERROR, ValueError("broke in /home/me/secret"))
    row = request_row(answered(2, deliveries=[*answered(2).deliveries[:1], (103.5, [end])]), T0)
    assert (row["outcome"], row["output_tokens"], row["ended_s"]) == ("error", 1, 3.5)
    assert row["error"].startswith("ValueError: broke in ")
    assert "me" not in row["error"].split("/")  # a path of this machine is nobody's business


def test_a_refusal() -> None:
    refusal = SchedulerManagerOverloadedError(limit=4, inflight=4, reason="inflight", retry_after_s=None)
    row = request_row(
        Attempt(1.0, sent_s=101.5, returned_s=101.75, waiting=1, inflight=4, failure=refusal), T0
    )
    assert (row["outcome"], row["reject_reason"], row["reject_stage"]) == ("rejected", "inflight", "submit")
    assert row["rejected_s"] == row["ended_s"] == 1.75
    assert row["inflight_at_send"] == 4


def test_a_failed_submission_has_an_end() -> None:  # case D6
    closed = ManagerClosedError("the manager is closed")
    row = request_row(Attempt(1.0, sent_s=101.5, returned_s=101.75, failure=closed), T0)
    assert (row["outcome"], row["ended_s"]) == ("error", 1.75)
    assert row["error"] == "ManagerClosedError: the manager is closed"


def test_a_request_that_was_never_sent_has_a_row() -> None:  # cases C11, D9
    row = request_row(Attempt(1.0, gave_up_s=102.0, unsent_because="not sent: because"), T0)
    assert row == {
        "scheduled_s": 1.0,
        "attempts": 0,
        "outcome": "incomplete",
        "error": "not sent: because",
        "ended_s": 2.0,
    }


@pytest.mark.parametrize(
    ("cell", "arrival", "is_one_text", "prompt_len"),
    [
        (Cell(AdmissionSpec(4), 8, 32, 4), "burst", False, 32),
        (Cell(AdmissionSpec(4), 8, None, 4), "burst", True, 7),  # --prompt: the length of its text
        (Cell(AdmissionSpec(4), None, None, 4), "trace", False, None),
        (Cell(AdmissionSpec(4), None, None, None), "poisson", False, None),  # a replayed workload
        (
            Cell(AdmissionSpec(4), None, None, 4),
            "poisson",
            False,
            None,
        ),  # another, that has one of the two lengths
    ],
)
def test_the_length_of_a_cell_is_what_was_asked_for(
    cell: Cell, arrival: str, is_one_text: bool, prompt_len: int | None
) -> None:
    load = Workload(np.zeros(2), [], np.array([7, 7]), np.array([4, 4]), 0, arrival)
    columns = factor_columns("in-process", "model", cell, load, is_one_text=is_one_text)
    assert columns["prompt_len"] == prompt_len
    assert columns["output_len"] == cell.output_len
    assert columns["arrival"] == arrival


def test_the_rate_is_the_cells() -> None:
    load = Workload(np.zeros(1), [], np.array([7]), np.array([4]), 0, "poisson")
    columns = factor_columns("in-process", "model", Cell(AdmissionSpec(), None, 32, 4, 2.5), load)
    assert (columns["request_rate"], columns["max_inflight"], columns["admission"]) == (2.5, None, "none")
