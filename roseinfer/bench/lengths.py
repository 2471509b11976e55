"""Lengths of prompts and outputs: drawn around what a cell asks for, and cut to what the engine holds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.flag_values import LARGEST, Lengths
from roseinfer.bench.load import Load
from roseinfer.bench.seeds import BLOCK_ROWS, Stream, block_rngs

MOST_CUT: Final = 0.01
"""Share of the draws that may be cut: beyond it what is measured is another distribution than the one asked for."""


def draw_lengths(
    lengths: Lengths, typical_tokens: int, n: int, *, seed: int, repeat: int, stream: Stream
) -> NDArray[np.int64]:
    """`n` lengths in tokens, not cut yet.

    "uniform" has every whole number from typical * (1 - spread), but at least 1, to typical * (1 + spread) alike;
    "lognormal" has the typical length for its median and `spread` for the standard deviation of its logarithm; at
    least 1 token stays.
    """
    blocks = length_blocks(lengths, typical_tokens, seed=seed, repeat=repeat, stream=stream)
    return np.concatenate([*islice(blocks, -(-n // BLOCK_ROWS)), np.empty(0, np.int64)])[:n]


def length_blocks(
    lengths: Lengths, typical_tokens: int, *, seed: int, repeat: int, stream: Stream
) -> Iterator[NDArray[np.int64]]:
    """What `draw_lengths` draws, in blocks of BLOCK_ROWS, without end."""
    if lengths.kind == "fixed":
        while True:
            yield np.full(BLOCK_ROWS, typical_tokens, np.int64)
    for rng in block_rngs(seed, repeat, stream):
        yield _block(lengths, typical_tokens, rng)


def _block(lengths: Lengths, typical_tokens: int, rng: np.random.Generator) -> NDArray[np.int64]:
    if lengths.kind == "uniform":
        low, high = lengths.bounds(typical_tokens)
        return rng.integers(low, high, size=BLOCK_ROWS, endpoint=True)
    drawn = typical_tokens * rng.lognormal(sigma=lengths.spread, size=BLOCK_ROWS)
    return scaled(np.minimum(drawn, LARGEST), 1.0)


def asked_lengths(
    experiment: Experiment, cell: Cell, n: int, repeat: int, given_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of the prompts and outputs of a cell's first `n` requests, not cut yet.

    `given_tokens` is the length of --prompt; a trace has the lengths that the cell does not name.
    """
    load, trace, seed = experiment.load, experiment.trace, experiment.options.seed
    is_traced = experiment.options.prompt is None and cell.prompt_len is None
    if is_traced and trace is not None:
        prompts = scaled(trace.prompt_tokens[:n], load.length_scale)
    else:
        typical = given_tokens if cell.prompt_len is None else cell.prompt_len
        prompts = draw_lengths(
            load.prompt_lengths, typical, n, seed=seed, repeat=repeat, stream=Stream.PROMPT_LENGTHS
        )
    if cell.output_len is None and trace is not None:
        outputs = scaled(trace.output_tokens[:n], load.length_scale)
    else:
        assert cell.output_len is not None
        outputs = draw_lengths(
            load.output_lengths, cell.output_len, n, seed=seed, repeat=repeat, stream=Stream.OUTPUT_LENGTHS
        )
    return prompts, outputs


def vary(load: Load) -> bool:
    """Lengths are drawn, so that some may have to be cut."""
    return {load.prompt_lengths.kind, load.output_lengths.kind} != {"fixed"}


def scaled(tokens: NDArray[np.int64] | NDArray[np.float64], factor: float) -> NDArray[np.int64]:
    """`tokens` times `factor`, to the nearest whole number, but at least 1."""
    whole: NDArray[np.int64] = np.maximum(np.rint(tokens * factor), 1).astype(np.int64)
    return whole


def cut_to_fit(
    prompt_tokens: NDArray[np.int64],
    output_tokens: NDArray[np.int64],
    *,
    least_prompt_tokens: int | NDArray[np.int64],
    most_tokens: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Prompts and outputs cut so that a request has both, and spans `most_tokens` at most.

    The output goes first: it is cut to what a prompt of `least_prompt_tokens` leaves, then the prompt to what
    the output leaves. Prompts that must stay as they are have their own length for the least.
    """
    least = least_prompt_tokens
    outputs = np.clip(output_tokens, 1, np.maximum(most_tokens - least, 1))
    prompts = np.clip(prompt_tokens, least, np.maximum(most_tokens - outputs, least))
    return prompts, outputs
