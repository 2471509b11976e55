"""p99 TTFT explained: what the time of the requests around that rank was made of, and whose work they waited for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from roseinfer.bench.records import FACTORS, STEP_SCHEMA, TTFT_PARTS, Outcome, derive, flattened, rows_at
from roseinfer.bench.stats import nearest_rank, percentile_label
from roseinfer.bench.steady_state import steady_rows

NEIGHBOURS: Final = 25
"""Ranks on each side of the p99 that are explained with it, at most; and no more than half a per cent of all."""

PARTS: Final = tuple(part.removesuffix("_s") for part in TTFT_PARTS)
WAITED_FOR: Final = {
    "earlier_prefill": "in steps that prefilled earlier arrivals",
    "later_prefill": "in steps that prefilled later arrivals only",
    "decode_only": "in steps that only decoded",
    "no_step": "outside of any step",
}
"""What was going on while a request waited in the queue, and the words for it."""

_SHOWN: Final = 0.005
_RANKED: Final = "repeat request_index arrival burst_size scheduled_s outcome ttft_s".split()
"""What it takes to find the p99: other columns are looked at around it only."""

_MEMBER: Final = STEP_SCHEMA.field("members").type.value_type
_NO_WAIT: Final = dict.fromkeys(WAITED_FOR, 0.0)


def explain(requests: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """One row per cell, in order of appearance, from raw rows (REQUEST_SCHEMA, STEP_SCHEMA).

    `n` is the number of completed requests with a TTFT, `p99_ttft_ms` their pooled p99, `explained` how many
    around that rank the shares are of: at most 25 ranks and half a per cent on each side. `<part>_share` is the
    share of each of TTFT_PARTS in their TTFT (null tokenize counts as nothing; another null makes all shares
    null). `wait_ms` is their mean wait in the queue, and of that time `<what>_share`, for WAITED_FOR, passed in
    steps with prefill of requests that were due earlier, in those with prefill of later ones alone, in steps that
    only decoded, and outside of steps; `steps_waited` and `requests_waited` are how many steps and how many other
    requests in them an explained request waited for, on average. Null: not measured. As in the summary, warm-up
    is left out.
    """
    step_places = steps.groupby(["cell_id", "repeat"]).indices if len(steps) else {}
    rows = []
    for cell_id, places in requests.groupby("cell_id", sort=False).indices.items():
        cell = rows_at(requests, places).reset_index(drop=True)
        first = cell.iloc[0]
        row = {"cell_id": cell_id, **{factor: first[factor] for factor in FACTORS}}
        steady = steady_rows(derive(cell, ["ttft_s"])[_RANKED])
        completed = steady.loc[(steady["outcome"] == Outcome.COMPLETED) & steady["ttft_s"].notna(), "ttft_s"]
        n = len(completed)
        row |= {"n": n, "p99_ttft_ms": np.nan, "explained": 0}
        if n:
            middle = nearest_rank(99, n)
            lo = max(nearest_rank(98.5, n), middle - NEIGHBOURS)
            hi = min(nearest_rank(99.5, n), middle + NEIGHBOURS)
            ordered = completed.sort_values(kind="stable")
            around = derive(cell.loc[ordered.index[lo - 1 : hi]])
            row |= {
                "p99_ttft_ms": 1e3 * ordered.iloc[middle - 1],
                "explained": len(around),
                **_parts(around),
                **_waits(around, cell_id, steps, step_places),
            }
        rows.append(row)
    return pd.DataFrame(rows, columns=_columns())


def explain_sentence(row: pd.Series[Any]) -> str:
    """A row of `explain` in words."""
    n = int(row["n"])
    if n == 0:
        return "nothing completed: there is no TTFT to explain"
    label = percentile_label(99, n)
    sentence = f"{'p99 TTFT' if label == 'p99' else f'TTFT {label}'} is {row['p99_ttft_ms']:.1f} ms"
    if pd.isna(row[f"{PARTS[0]}_share"]):
        return f"{sentence}; its parts were not measured"
    sentence += f": {_list(row, {part: part.replace('_', ' ') for part in PARTS})}"
    if pd.isna(row["steps_waited"]) or row["wait_ms"] <= 0:
        return sentence
    return (
        f"{sentence}. Of {row['wait_ms']:.1f} ms in the queue, {_list(row, WAITED_FOR)}:"
        f" {_count(row['steps_waited'], 'step')}, with {_count(row['requests_waited'], 'other request')} in them"
    )


def _parts(around: pd.DataFrame) -> dict[str, float]:
    seconds = {
        part: float(around[f"{part}_s"].fillna(0).sum())
        if part == "tokenize"
        else float(around[f"{part}_s"].sum(skipna=False))
        for part in PARTS
    }
    total_s = sum(seconds.values())
    return {f"{part}_share": value / total_s if total_s > 0 else np.nan for part, value in seconds.items()}


def _waits(
    around: pd.DataFrame, cell_id: object, steps: pd.DataFrame, step_places: Mapping[Any, Any]
) -> dict[str, float]:
    waits = []
    for repeat, rows in around.groupby("repeat"):
        places = step_places.get((cell_id, repeat))
        if places is None or rows["queue_wait_s"].isna().any():
            continue
        found = rows_at(steps, places)
        if found["members"].notna().all():
            its_steps = _Steps(found.sort_values("exec_start_s"))
            starts_s = rows["first_scheduled_s"] - rows["queue_wait_s"]
            spans = zip(starts_s, rows["first_scheduled_s"], rows["request_index"], strict=True)
            waits += [its_steps.during(start_s, end_s, int(index)) for start_s, end_s, index in spans]
    figures: dict[str, float] = {"wait_ms": 1e3 * float(around["queue_wait_s"].mean())}
    if len(waits) < len(around):  # some of them have no steps on record
        return figures
    mean = pd.DataFrame(waits).mean()
    waited_s = float(mean["waited_s"])
    figures |= {
        f"{what}_share": float(mean[what]) / waited_s if waited_s > 0 else np.nan for what in WAITED_FOR
    }
    return figures | {name: float(mean[name]) for name in ("steps_waited", "requests_waited")}


class _Steps:
    """The steps of one cell and repeat, in order, as arrays."""

    def __init__(self, steps: pd.DataFrame) -> None:
        self._start_s = steps["exec_start_s"].to_numpy(dtype=np.float64)
        self._end_s = steps["exec_end_s"].to_numpy(dtype=np.float64)
        prefills = steps["prefill_requests"].to_numpy(dtype=np.int64)
        members, sizes = flattened(steps["members"], _MEMBER)
        self._index = pa.array(members).field("request_index").to_numpy(zero_copy_only=False)
        self._ends = np.cumsum(sizes)
        # A plan holds decodes first, so a step's prefills are its last members.
        self._earliest_prefill = np.array(
            [
                self._index[end - count : end].min() if count else -1
                for end, count in zip(self._ends, prefills, strict=True)
            ],
            dtype=np.int64,
        )

    def during(self, start_s: float, end_s: float, index: int) -> dict[str, float]:
        """Seconds of the wait of request `index` from `start_s` to `end_s` by what was going on."""
        first = int(np.searchsorted(self._end_s, start_s, side="right"))
        last = int(np.searchsorted(self._start_s, end_s, side="left"))
        found = {**_NO_WAIT, "waited_s": end_s - start_s, "steps_waited": 0.0, "requests_waited": 0.0}
        if last <= first:
            return found | {"no_step": end_s - start_s}
        within_s = np.minimum(self._end_s[first:last], end_s) - np.maximum(self._start_s[first:last], start_s)
        earliest = self._earliest_prefill[first:last]
        members = self._index[self._ends[first - 1] if first else 0 : self._ends[last - 1]]
        return found | {
            "earlier_prefill": float(within_s[(earliest >= 0) & (earliest < index)].sum()),
            "later_prefill": float(within_s[earliest > index].sum()),
            "decode_only": float(within_s[earliest < 0].sum()),
            "no_step": end_s - start_s - float(within_s[earliest != index].sum()),
            "steps_waited": float(last - first),
            "requests_waited": float(np.count_nonzero(np.unique(members) != index)),
        }


def _list(row: pd.Series[Any], words: dict[str, str]) -> str:
    """Shares in per cent, the largest first; those that would read 0 % are left out."""
    shares = sorted(((float(row[f"{name}_share"]), text) for name, text in words.items()), reverse=True)
    return ", ".join(f"{100 * share:.0f} % {text}" for share, text in shares if share >= _SHOWN)


def _count(number: float, noun: str) -> str:
    return f"{number:.0f} {noun}{'' if round(number) == 1 else 's'}"


def _columns() -> list[str]:
    return [
        *("cell_id", *FACTORS, "n", "p99_ttft_ms", "explained"),
        *[f"{part}_share" for part in PARTS],
        "wait_ms",
        *[f"{what}_share" for what in WAITED_FOR],
        *("steps_waited", "requests_waited"),
    ]
