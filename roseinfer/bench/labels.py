"""What figures and tidy frames call cells, and the order in which they stand: "no limit" last."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import pandas as pd

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.records import FACTORS
from roseinfer.bench.summary import admission_places, limit_label

NO_LIMIT: Final = AdmissionSpec().label
_FACTOR_TEXT: Final = {
    "burst_size": "burst of {}",
    "prompt_len": "prompt of {} tokens",
    "output_len": "output of {} tokens",
    "request_rate": "{} requests/s",
}


def label_cells(frame: pd.DataFrame, factors: Sequence[str] = FACTORS[1:]) -> pd.DataFrame:
    """`frame` with the columns `limit` and `combination`, both text, and its rows in the order of drawing.

    `limit` is what `admission` bounds: "16", "tokens 4096", or "no limit", which sorts last. `combination` names the
    values of those `factors` that vary ("" if none does). `frame` needs the columns `admission` and `factors`.
    """
    swept = [factor for factor in factors if frame[factor].nunique(dropna=False) > 1]
    ordered = frame.sort_values([*factors, "admission"], key=admission_places, kind="stable")
    cells = ordered[[*swept, "admission"]].drop_duplicates()
    names = pd.DataFrame(
        {
            "limit": [limit_label(value) for value in cells["admission"]],
            "combination": [
                ", ".join(
                    _FACTOR_TEXT[factor].format(factor_text(value))
                    for factor, value in zip(swept, values, strict=True)
                )
                for values in cells[swept].itertuples(index=False, name=None)
            ],
        },
        index=pd.MultiIndex.from_frame(cells),
    )
    place = names.index.get_indexer(pd.MultiIndex.from_frame(ordered[[*swept, "admission"]]))
    named = names.iloc[place]
    return ordered.assign(limit=named["limit"].to_numpy(), combination=named["combination"].to_numpy())


def tidy_cells(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame`, rows as they were (numbered anew), with the ordered categories `limit` and `cell`, "no limit" last.

    `cell` is the limit and, where other factors vary, their values: "limit 16, burst of 128".
    """
    labelled = label_cells(frame.reset_index(drop=True))
    cell = [
        ", ".join(filter(None, (limit_title(limit), combination)))
        for limit, combination in zip(labelled["limit"], labelled["combination"], strict=True)
    ]
    labelled["limit"] = pd.Categorical(labelled["limit"], limits_of(labelled), ordered=True)
    labelled["cell"] = pd.Categorical(cell, list(dict.fromkeys(cell)), ordered=True)
    return labelled.drop(columns="combination").sort_index()


def limit_title(limit: str) -> str:
    return f"limit {limit}" if limit.isdecimal() else limit


def limits_of(labelled: pd.DataFrame) -> list[str]:
    """The limits of a frame from `label_cells`: of requests, of tokens, of both, each ascending; "no limit" last."""
    return sorted(set(labelled["limit"]), key=_place)


def _place(limit: str) -> tuple[bool, bool, int, list[int]]:
    numbers = [int(number) for number in re.findall(r"\d+", limit)]
    return limit == NO_LIMIT, "tokens" in limit, len(numbers), numbers


def factor_text(value: float | None) -> str:
    return "n/a" if value is None or pd.isna(value) else f"{value:.12g}"
