"""Wasted work: tokens that were computed for requests that were not served within the goal."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray


def wasted_share(derived: pd.DataFrame, served: NDArray[np.bool_]) -> float:
    """The share of the tokens, prompts and outputs alike, that went to requests that are not `served`: bool[rows].

    A request whose prefill began costs its prompt without what was cached, and the tokens that it got; one that was
    refused, or given up before, costs nothing. NaN where a server did not count the prompt, or nothing was computed.
    """
    began = (derived["first_scheduled_s"].notna() | derived["received_first_s"].notna()).to_numpy()
    prompt = derived["prompt_tokens"].astype("float64") - derived["cached_tokens"].astype("float64").fillna(0)
    tokens = (prompt + derived["output_tokens"].astype("float64").fillna(0)).to_numpy()[began]
    total = float(tokens.sum())
    return float(tokens[~served[began]].sum() / total) if total > 0 else math.nan
