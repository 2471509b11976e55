"""The workload: when each request is due and what it asks for, drawn ahead from one seed, kept with the run.

It depends on the seed, the repeat and the cell's shape, never on the limit: all limits get the same requests.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.prompts import PromptMaker, PromptTokenizer
from roseinfer.manager import Prompt

WARM_UP = 1 << 31
"""Stands for the repeat in the seed of warm-up prompts, so that no measured prompt was seen before."""


class Workload(NamedTuple):
    """`scheduled_s` float64[n], zero at the first arrival; `prompts` text[n] or token ids[n]."""

    scheduled_s: NDArray[np.float64]
    prompts: list[Prompt]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    prompt_seed: int


class WorkloadSource:
    """Draws the workloads of an experiment. Raises InputError for prompts that cannot be made, or never served."""

    def __init__(
        self, experiment: Experiment, tokenizer: PromptTokenizer, *, vocab_size: int, max_model_len: int
    ) -> None:
        options = experiment.options
        self._experiment = experiment
        self._tokenizer = tokenizer
        self._given = None if options.prompt is None else options.prompt * options.prompt_repeats
        self._given_ids = [] if self._given is None else tokenizer.encode(self._given)
        experiment.check_fits(max_model_len, given_tokens=len(self._given_ids))
        self._maker = PromptMaker(tokenizer, vocab_size) if self._given is None else None

    def draw(self, cell: Cell, repeat: int) -> Workload:
        """The requests of a cell's shape in one repeat."""
        n = self._experiment.offered(cell)
        pretok = self._experiment.options.pretok
        prompt_seed = int(
            np.random.SeedSequence([self._experiment.options.seed, repeat]).generate_state(1)[0]
        )
        prompts: list[Prompt]
        if self._maker is None:
            assert self._given is not None
            prompts = [self._given_ids if pretok else self._given] * n
            prompt_tokens = len(self._given_ids)
        else:
            assert cell.prompt_len is not None
            texts = [self._maker.text(prompt_seed, index, cell.prompt_len) for index in range(n)]
            prompts = [self._tokenizer.encode(text) if pretok else text for text in texts]
            prompt_tokens = cell.prompt_len
        return Workload(
            scheduled_s=np.arange(n, dtype=np.float64) * self._experiment.interval_s,
            prompts=prompts,
            prompt_tokens=np.full(n, prompt_tokens, np.int64),
            output_tokens=np.full(n, cell.output_len, np.int64),
            prompt_seed=prompt_seed,
        )

    def table(self) -> pd.DataFrame:
        """All requests of the experiment, a row each. The text is kept only where the user gave it."""
        shapes = dict.fromkeys(cell.shape for cell in self._experiment.cells)
        rows = [
            self._rows(shape, repeat)
            for repeat in range(self._experiment.options.repeats)
            for shape in shapes
        ]
        return pd.concat(rows, ignore_index=True)

    def _rows(self, shape: Cell, repeat: int) -> pd.DataFrame:
        workload = self.draw(shape, repeat)
        n = len(workload.scheduled_s)
        return pd.DataFrame(
            {
                "repeat": np.full(n, repeat, np.int32),
                "burst_size": pd.array([shape.burst_size] * n, dtype="Int64"),
                "prompt_len": pd.array([shape.prompt_len] * n, dtype="Int64"),
                "output_len": pd.array([shape.output_len] * n, dtype="Int64"),
                "request_index": np.arange(n, dtype=np.int64),
                "scheduled_s": workload.scheduled_s,
                "prompt_tokens": workload.prompt_tokens,
                "output_tokens": workload.output_tokens,
                "prompt_seed": np.full(n, workload.prompt_seed, np.int64),
                "prompt": pd.array([self._given] * n, dtype="string"),
            }
        )


def workload_sha256(table: pd.DataFrame) -> str:
    """A hash of a workload table's contents."""
    digest = hashlib.sha256(",".join(table.columns).encode())
    digest.update(pd.util.hash_pandas_object(table, index=False).to_numpy().tobytes())
    return digest.hexdigest()
