"""The record: one row per offered request, one row per engine step, and the formulas derived from them.

Times are float64 seconds on one monotonic clock per cell and repeat, zero at its first scheduled arrival.
"Not measured" is null, never 0 or -1. What the targets fill:

    column                                        in process                        over HTTP
    scheduled_s, permitted_s, sent_s              every row that was sent           the same; of the first try
    last_sent_s                                   rows with more than one try       the same
    reserved_s, admitted_s, released_s            admitted rows                     null
    rejected_s, reject_reason, reject_stage       refused rows                      refused rows: head of a 429 or 503
    tokenized_s                                   admitted rows, prompt as text     null
    first_scheduled_s .. finished_s               admitted rows, as far as they got null
    ended_s, received_first_s, received_last_s    as the one consumer thread saw it as the client read it
    token_times_s                                 admitted rows with tokens         null
    chunk_times_s, chunk_tokens                   admitted rows with tokens         rows with text; tokens where known
    prompt_tokens, output_tokens                  counted from ids                  what the server counts, or null
    cached_tokens                                 rows that were scheduled          what the server counts, or null
    waiting_at_send                               rows that were sent, first try    null
    inflight_at_send                              admission's own count, first try  what this client had outstanding
    predicted_ttft_s                              admitted rows, under slo: from    null
                                                  reserved_s on
    priority                                      the name of its class, null where all are alike; the same
    status_code, server_queue_s, server_prefill_s null                              as the server says

Where clients retry, a row has the stamps of its last try, but for the columns of the first; `attempts.parquet` has a
row a try.

A refusal of the stage "queued" has the columns of an admitted row too, as far as it got. `reject_stage` "submit" is
known to the caller before anything is done for the request. What the server's queue timeout dropped has the outcome
timeout, and a `reject_reason` and stage as well, which the client's own deadline has not.

The simulated target fills what the in-process one does, but with --no-token-times no list: token_times_s,
chunk_times_s, chunk_tokens and the members of steps are null.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

SCHEMA_VERSION: Final = 1


class Outcome(StrEnum):
    COMPLETED = "completed"
    REJECTED = "rejected"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    INCOMPLETE = "incomplete"


HTTP: Final = "http"
"""The target of rows that a client wrote alone: nothing of what went on in the server is in them."""

FACTORS: Final = ("admission", "burst_size", "prompt_len", "output_len", "request_rate")
"""The columns that tell the cells of a sweep apart."""

FACTOR_NAMES: Final = {
    "burst_size": "burst",
    "prompt_len": "prompt tokens",
    "output_len": "new tokens",
    "request_rate": "requests/s",
}
"""What tables and figures call them, but for the limit, whose values have names of their own."""

_KEY = [
    ("run_id", pa.string()),
    ("cell_id", pa.string()),
    ("repeat", pa.int32()),
]
_FACTOR_FIELDS = [
    ("target", pa.string()),
    ("model", pa.string()),
    ("admission", pa.string()),
    ("max_inflight", pa.int64()),  # null: no limit, or another than of requests alone
    ("burst_size", pa.int64()),
    ("prompt_len", pa.int64()),
    ("output_len", pa.int64()),
    ("arrival", pa.string()),
    ("request_rate", pa.float64()),
    ("priority", pa.string()),
]
_TIMES = (
    "scheduled_s permitted_s sent_s last_sent_s reserved_s admitted_s released_s rejected_s tokenized_s"
    " first_scheduled_s first_token_s last_token_s finished_s ended_s received_first_s received_last_s"
).split()

REQUEST_SCHEMA: Final = pa.schema(
    [
        *_KEY,
        ("request_index", pa.int64()),
        *_FACTOR_FIELDS,
        *[(name, pa.float64()) for name in _TIMES],
        ("outcome", pa.string()),
        ("reject_reason", pa.string()),
        ("reject_stage", pa.string()),
        ("status_code", pa.int32()),
        ("error", pa.string()),
        ("attempts", pa.int32()),
        ("prompt_tokens", pa.int64()),
        ("cached_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("finish_reason", pa.string()),
        ("inflight_at_send", pa.int64()),
        ("waiting_at_send", pa.int64()),
        ("predicted_ttft_s", pa.float64()),
        ("token_times_s", pa.list_(pa.float64())),
        ("chunk_times_s", pa.list_(pa.float64())),
        ("chunk_tokens", pa.list_(pa.int64())),
        ("server_queue_s", pa.float64()),
        ("server_prefill_s", pa.float64()),
    ]
)

_MEMBER = pa.struct([("request_index", pa.int64()), ("start", pa.int64()), ("n_tokens", pa.int64())])

STEP_SCHEMA: Final = pa.schema(
    [
        *_KEY,
        ("step", pa.int64()),
        ("plan_start_s", pa.float64()),
        ("exec_start_s", pa.float64()),
        ("exec_end_s", pa.float64()),
        ("published_s", pa.float64()),
        ("prefill_requests", pa.int64()),
        ("prefill_tokens", pa.int64()),
        ("prefill_attention_pairs", pa.int64()),
        ("decode_requests", pa.int64()),
        ("context_tokens", pa.int64()),
        ("cached_tokens", pa.int64()),
        ("waiting", pa.int64()),
        ("running", pa.int64()),
        ("kv_tokens", pa.int64()),
        ("inflight_limit", pa.int64()),  # null: none that moves
        ("members", pa.list_(_MEMBER)),
    ]
)

ATTEMPT_SCHEMA: Final = pa.schema(
    [
        *_KEY,
        ("request_index", pa.int64()),
        ("attempt", pa.int32()),  # 1 is the first
        *[(name, pa.float64()) for name in "sent_s received_first_s received_last_s ended_s".split()],
        ("outcome", pa.string()),
        ("reject_reason", pa.string()),
        ("status_code", pa.int32()),
        ("error", pa.string()),
        ("retry_after_s", pa.float64()),  # what the server asked to wait
        ("output_tokens", pa.int64()),
    ]
)
"""One row per try of a request, where clients retry."""

TTFT_PARTS: Final = (
    "cap_wait_s",
    "send_lag_s",
    "retry_wait_s",
    "reserve_s",
    "tokenize_s",
    "queue_wait_s",
    "prefill_s",
    "delivery_s",
)
"""They sum to `ttft_s` (a null tokenize_s counts as nothing: the prompt came as token ids)."""


def derive(requests: pd.DataFrame, only: Collection[str] = ()) -> pd.DataFrame:
    """`requests` with the derived durations added, or `only` some, in seconds; null wherever an operand is null.

    The formulas are those of the design: the eight TTFT_PARTS, `ttft_s`, `ttft_from_send_s`, `decode_s`,
    `last_delivery_s`, `e2el_s`, `tpot_s` (null under 2 tokens), `largest_itl_s` (the longest wait between two
    tokens, null under 2), `reject_s` (of the last try; stage submit only), `time_to_drop_s` (the same of stage queued,
    queue timeouts too), `add_request_s` (of the last try), from the first sending to the last token
    `time_to_success_s`, and to the end of what failed `time_to_error_s`, `time_to_timeout_s`.
    """
    r = requests
    last_sent_s = r["last_sent_s"].fillna(r["sent_s"])
    tokens = r["output_tokens"].astype("float64")

    def until_rejected_s(stage: str) -> Any:
        return (r["rejected_s"] - last_sent_s).where(r["reject_stage"] == stage)

    def until_end_s(outcome: Outcome) -> Any:
        return (r["ended_s"] - r["sent_s"]).where(r["outcome"] == outcome)

    formulas: dict[str, Callable[[], Any]] = {
        "cap_wait_s": lambda: r["permitted_s"] - r["scheduled_s"],
        "send_lag_s": lambda: r["sent_s"] - r["permitted_s"],
        "retry_wait_s": lambda: last_sent_s - r["sent_s"],
        "reserve_s": lambda: r["reserved_s"] - last_sent_s,
        "tokenize_s": lambda: r["tokenized_s"] - r["reserved_s"],
        "queue_wait_s": lambda: r["first_scheduled_s"] - r["tokenized_s"].fillna(r["reserved_s"]),
        "prefill_s": lambda: r["first_token_s"] - r["first_scheduled_s"],
        "delivery_s": lambda: r["received_first_s"] - r["first_token_s"],
        "ttft_s": lambda: r["received_first_s"] - r["scheduled_s"],
        "ttft_from_send_s": lambda: r["received_first_s"] - r["sent_s"],
        "decode_s": lambda: r["last_token_s"] - r["first_token_s"],
        "last_delivery_s": lambda: r["received_last_s"] - r["last_token_s"],
        "e2el_s": lambda: r["received_last_s"] - r["scheduled_s"],
        "tpot_s": lambda: ((r["received_last_s"] - r["received_first_s"]) / (tokens - 1)).where(tokens >= 2),
        "largest_itl_s": lambda: _largest_gaps_s(r["token_times_s"]),
        "time_to_success_s": lambda: r["received_last_s"] - r["sent_s"],
        "reject_s": lambda: until_rejected_s("submit"),
        "time_to_drop_s": lambda: until_rejected_s("queued"),
        "add_request_s": lambda: r["admitted_s"] - last_sent_s,
        "time_to_error_s": lambda: until_end_s(Outcome.ERROR),
        "time_to_timeout_s": lambda: until_end_s(Outcome.TIMEOUT),
    }
    return r.assign(**{name: formulas[name]() for name in only or formulas})


def cached_share(requests: pd.DataFrame) -> float | None:
    """The share of their prompt tokens that came from a prefix cache, of the requests of which that is known."""
    known = requests[requests["cached_tokens"].notna()]
    total = float(known["prompt_tokens"].sum())
    return float(known["cached_tokens"].sum()) / total if total else None


def rows_at(frame: pd.DataFrame, places: Any) -> pd.DataFrame:
    """These rows of `frame`; without a copy where they lie together, as those of a file do."""
    first, last = int(places[0]), int(places[-1])
    return frame.iloc[first : last + 1] if last - first + 1 == len(places) else frame.iloc[places]


def gaps_s(times_s: pd.Series[Any]) -> NDArray[np.float64]:
    """All gaps between consecutive tokens (ITL) or deliveries, pooled over requests: float64[sum of (times - 1)]."""
    return _gaps(times_s)[0]


def _largest_gaps_s(token_times_s: pd.Series[Any]) -> NDArray[np.float64]:
    """The largest gap of each request: float64[requests], NaN under 2 tokens."""
    gaps, counts = _gaps(token_times_s)
    largest = np.full(len(counts), np.nan)
    has_gap = counts > 0
    if has_gap.any():
        starts = np.cumsum(counts[has_gap]) - counts[has_gap]
        largest[has_gap] = np.maximum.reduceat(gaps, starts)
    return largest


def _gaps(times_s: pd.Series[Any]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The gaps within each request, one request after another, and how many each has."""
    every_s, sizes = flattened(times_s, pa.float64())
    ends = np.cumsum(sizes)[sizes > 0]
    # From the last of one request to the first of the next is no gap.
    return np.delete(np.diff(every_s), ends[:-1] - 1), np.maximum(sizes - 1, 0)


def flattened(lists: pd.Series[Any], kind: pa.DataType) -> tuple[Any, NDArray[np.int64]]:
    """The items of a column of lists, one after another, as numpy has them, and the length of each list.

    A null has length 0. `kind` is the arrow type of an item; a struct comes as an arrow array.
    """
    array = pa.array(lists, type=pa.list_(kind), from_pandas=True)
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    items = array.flatten()
    return items if pa.types.is_struct(kind) else items.to_numpy(zero_copy_only=False), lengths


def as_frame(table: pa.Table) -> pd.DataFrame:
    """A table of records as a frame. Lists stay as arrow holds them: an object a list is slow and large."""
    frame: pd.DataFrame = table.to_pandas(
        types_mapper=lambda kind: pd.ArrowDtype(kind) if pa.types.is_list(kind) else None,
        ignore_metadata=True,
    )
    return frame
