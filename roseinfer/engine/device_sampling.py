"""`sampling` for a device beside the host: all rows at once, the random numbers made there, and nothing waited for.

Greedy rows are the same. Sampled ones follow the same distribution by other random numbers, so that a seed gives one
stream on CPU and another one here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from roseinfer.engine.sampling import LEAST_TEMPERATURE
from roseinfer.engine.staging import Staging
from roseinfer.request import Request

_OFF: Final = 2.0
"""A top_p that cuts nothing off: sums of probabilities may round to 1 before their last one."""

_WEYL, _MIX_1, _MIX_2 = (
    constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""Of SplitMix64 (Steele, Lea, Flood, 2014), as signed numbers: torch has no unsigned arithmetic."""


class Draws(NamedTuple):
    """How the rows of a step are to be drawn; a temperature of 0 is greedy. All [rows], on the device."""

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor  # of the tokens to choose
    is_cut: bool  # by any top_k or top_p


def put_draws(requests: Sequence[Request], positions: Sequence[int], staging: Staging) -> Draws | None:
    """None where all are greedy."""
    params = [request.params for request in requests]
    temperatures = [one.temperature if one.temperature >= LEAST_TEMPERATURE else 0.0 for one in params]
    if not any(temperatures):
        return None
    most = np.iinfo(np.int64).max
    return Draws(
        staging.put(np.array(temperatures, np.float32)),
        staging.put(np.array([min(one.top_k, most) or most for one in params], np.int64)),
        staging.put(np.array([one.top_p if one.top_p < 1.0 else _OFF for one in params], np.float32)),
        staging.put(np.array([request.seed for request in requests], np.int64)),
        staging.put(np.array(positions, np.int64)),
        is_cut=any(
            at and (one.top_k or one.top_p < 1.0) for at, one in zip(temperatures, params, strict=True)
        ),
    )


def sample_on_device(logits: torch.Tensor, draws: Draws | None) -> torch.Tensor:
    """logits [rows, vocab] -> ids [rows], as `sampling.sample` chooses them."""
    best = logits.argmax(dim=-1)
    if draws is None:
        return best
    vocab = logits.shape[-1]
    is_drawn = draws.temperatures > 0
    temperatures = torch.where(is_drawn, draws.temperatures, 1.0)[:, None]
    # Relative to the largest logit, a tiny temperature may overflow to -inf, but never to inf - inf.
    scaled = (logits.float() - logits.amax(dim=-1, keepdim=True).float()) / temperatures
    race = _exponentials(draws.seeds, draws.positions, vocab)
    if not draws.is_cut:
        return torch.where(is_drawn, (scaled.softmax(dim=-1) / race).argmax(dim=-1), best)
    scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=logits.device)
    probabilities = scaled.masked_fill(ranks >= draws.top_ks[:, None], -torch.inf).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities = probabilities.masked_fill(before >= draws.top_ps[:, None], 0.0)
    winners = (probabilities / race.gather(1, order)).argmax(dim=-1, keepdim=True)
    return torch.where(is_drawn, order.gather(1, winners)[:, 0], best)


def _exponentials(seeds: torch.Tensor, positions: torch.Tensor, n: int) -> torch.Tensor:
    """Exp(1) [rows, n]: each a function of its seed, its position and its column alone."""
    streams = _mixed(_mixed(seeds) + positions * _WEYL)
    columns = torch.arange(1, n + 1, device=seeds.device) * _WEYL
    bits = _mixed(streams[:, None] + columns)
    uniform = (((bits >> 11) & (2**53 - 1)).double() + 0.5) / 2**53  # never 0, and 1 at worst by rounding
    tiny = torch.finfo(torch.float32).tiny
    return (-uniform.log()).float().clamp_min(tiny)  # 0 / 0 is no probability


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of SplitMix64. Products wrap; shifts are masked, since those of signed numbers drag the sign in."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))
