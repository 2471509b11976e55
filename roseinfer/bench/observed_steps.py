"""Steps of a server that nobody looked into, as its deliveries show them.

A server hands out the tokens of a step together: deliveries that follow each other closely are one step, unless a
request gets its second. A request's first delivery is its prefill, the whole prompt; every other is a decode. So a
prompt computed in several chunks counts in the last of them, and steps that delivered nothing belong to the next one
that did. A step begins with the end of the one before if a request of it was there by then, else with the sending of
the first of its requests; what lies between steps and on the way to the client is in it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa

from roseinfer.bench.records import flattened

LEAST_GAP_S: Final = 0.002
GAP_SHARE: Final = 0.25
"""A silence ends a step if it is longer than this share of what usually lies between two tokens of a request, and than
LEAST_GAP_S. Writing a step's tokens to many streams takes less, though tens of milliseconds of a busy server.
"""


def observed_steps(requests: pd.DataFrame) -> pd.DataFrame:
    """Rows of STEP_SCHEMA, as far as they are known, from `requests` of REQUEST_SCHEMA.

    Requests without a delivery or a count of prompt tokens leave no trace. A delivery without a count is one token.
    """
    known = requests[requests["chunk_times_s"].notna() & requests["prompt_tokens"].notna()]
    cells = [
        _of_cell(cell).assign(cell_id=cell["cell_id"].iloc[0], repeat=cell["repeat"].iloc[0])
        for _, cell in known.groupby(["cell_id", "repeat"], sort=True)
    ]
    return pd.concat(cells, ignore_index=True) if cells else pd.DataFrame()


def _of_cell(cell: pd.DataFrame) -> pd.DataFrame:
    deliveries = _deliveries(cell)
    itl_s = deliveries.groupby("request")["time_s"].diff().median()
    gap_s = np.fmax(LEAST_GAP_S, GAP_SHARE * itl_s)  # of single tokens there is no ITL, but NaN
    number = _step_numbers(deliveries["time_s"].to_numpy(), deliveries["request"].to_numpy(), gap_s)
    is_first = deliveries["place"] == 0
    prompt = deliveries["prompt_tokens"].where(is_first, 0)
    step = (
        deliveries.assign(
            prefill_requests=is_first.astype(np.int64),
            prefill_tokens=prompt,
            prefill_attention_pairs=prompt * (prompt + 1) // 2,
            decode_requests=(~is_first).astype(np.int64),
            # The token that is computed now attends to itself as well.
            context_tokens=(deliveries["prompt_tokens"] + deliveries["before"]).where(~is_first, 0),
            here_since_s=deliveries["sent_s"],
        )
        .groupby(number)
        .agg(
            exec_end_s=("time_s", "max"),
            here_since_s=("here_since_s", "min"),
            **{
                name: (name, "sum")
                for name in (
                    *("prefill_requests", "prefill_tokens", "prefill_attention_pairs"),
                    *("decode_requests", "context_tokens"),
                )
            },
        )
    )
    ended_before_s = step["exec_end_s"].shift(1, fill_value=-np.inf)
    return step.assign(
        step=step.index,
        exec_start_s=np.maximum(ended_before_s, step["here_since_s"]),
        waiting=0,  # not known: nothing between these steps is
    ).drop(columns="here_since_s")


def _deliveries(cell: pd.DataFrame) -> pd.DataFrame:
    """A row per delivery in the order of time: its request, its place there, and the tokens before it."""
    times_s, counts = flattened(cell["chunk_times_s"], pa.float64())
    row = np.repeat(np.arange(len(cell)), counts)
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    tokens, token_counts = flattened(cell["chunk_tokens"], pa.int64())
    is_counted = np.array_equal(counts, token_counts)
    frame = pd.DataFrame(
        {
            "time_s": times_s,
            "request": row,
            "place": place,
            "tokens": np.nan_to_num(tokens.astype(np.float64), nan=1.0) if is_counted else 1.0,
            "prompt_tokens": cell["prompt_tokens"].to_numpy(np.int64)[row],
            "sent_s": cell["sent_s"].to_numpy()[row],
        }
    )
    frame["before"] = (frame.groupby("request")["tokens"].cumsum() - frame["tokens"]).astype(np.int64)
    return frame.sort_values("time_s", kind="stable", ignore_index=True)


def _step_numbers(times_s: np.ndarray, requests: np.ndarray, gap_s: float) -> np.ndarray:
    """The step of each delivery, from 0: int64[deliveries]."""
    numbers = np.zeros(len(times_s), dtype=np.int64)
    seen: set[int] = set()
    number = 0
    for n, request in enumerate(requests.tolist()):
        if n and (times_s[n] - times_s[n - 1] > gap_s or request in seen):
            number += 1
            seen.clear()
        seen.add(request)
        numbers[n] = number
    return numbers
