"""The workload: when each request is due and what it asks for, drawn ahead from one seed, kept with the run.

It depends on the seed, the repeat and the cell's shape, never on the limit: all limits get the same requests.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from roseinfer.bench.arrivals import arrival_times, at_a_rate, cuts_burst
from roseinfer.bench.classes import Classes, class_blocks, draw_classes
from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.fit import check_fits, most_tokens
from roseinfer.bench.lengths import asked_lengths, cut_to_fit, length_blocks, vary
from roseinfer.bench.load import CLOSED_LOOP_MOST, CLOSED_LOOP_REFUSED_PAUSE_S
from roseinfer.bench.prompts import OnDemand, PromptMaker, PromptTokenizer
from roseinfer.bench.replay import Requests
from roseinfer.bench.seeds import BLOCK_ROWS, Stream, prompt_seed
from roseinfer.bench.words import WordCounter, WordMaker
from roseinfer.prompt import Prompt

WARM_UP = 1 << 31
"""Stands for the repeat in the seed of warm-up prompts, so that no measured prompt was seen before."""


class Workload(NamedTuple):
    """n requests in the order of their arrival; all arrays have n rows.

    `scheduled_s` is zero at the first arrival, or None: a closed loop, which sends as many of them as it gets to.
    `prompts` are texts or token ids, made when they are asked for; there are none without a tokenizer.
    `repeat` is the repeat that it was drawn for. `classes` is None where all requests are alike.
    """

    scheduled_s: NDArray[np.float64] | None
    prompts: Sequence[Prompt]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    prompt_seed: int
    arrival: str
    repeat: int = 0
    classes: Classes | None = None

    def class_of(self, index: int) -> str | None:
        """The name of a request's class, as its record has it."""
        return None if self.classes is None else self.classes.name(index)


class WorkloadSource:
    """Draws the workloads of an experiment. Raises InputError for prompts that cannot be made, or never served.

    Without a tokenizer there are lengths, but no prompts; with a WordCounter all lengths are in words. `notes` are
    sentences on what was played and how; what only drawing shows is in there after `table`.
    """

    notes: list[str]

    def __init__(
        self,
        experiment: Experiment,
        tokenizer: PromptTokenizer | WordCounter | None,
        *,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        options = experiment.options
        self._experiment = experiment
        # One server may meet several shapes; an engine starts each cell with a cold cache, so its prompts are the same
        # whatever cells are beside it.
        shapes = dict.fromkeys(cell.shape for cell in experiment.cells) if experiment.is_http else ()
        self._shapes = {shape: place for place, shape in enumerate(shapes)}
        self._encode = None if tokenizer is None else tokenizer.encode
        self._given = None if options.prompt is None else options.prompt * options.prompt_repeats
        self._given_tokens = 0
        self._replay = experiment.replay
        if tokenizer is not None:
            if self._given is not None:
                self._given_tokens = len(tokenizer.encode(self._given))
            is_counted = self._replay is not None and self._replay.is_counted
            if self._replay is not None and not (is_counted and isinstance(tokenizer, WordCounter)):
                self._replay = self._replay.counted(tokenizer)
        has_texts = self._given is not None or (self._replay is not None and self._replay.has_texts)
        self._maker: PromptMaker | WordMaker | None = None
        if isinstance(tokenizer, WordCounter):
            self._maker = WordMaker()
        elif tokenizer is not None and not has_texts:
            self._maker = PromptMaker(tokenizer, vocab_size)
        special_tokens = 0 if self._maker is None else self._maker.special_tokens
        self._least_prompt_tokens = max(experiment.load.prefix_tokens, special_tokens) + 1
        self._most_tokens = most_tokens(experiment, max_model_len)
        check_fits(
            experiment,
            max_model_len,
            given_tokens=self._given_tokens or None,
            special_tokens=special_tokens,
            replay=self._replay,
        )
        self.notes = [] if experiment.trace is None else experiment.trace.told(experiment.load)
        self.notes += _told_of_refused_users(experiment)

    def draw(self, cell: Cell, repeat: int) -> Workload:
        """The requests of a cell's shape in one repeat, or of a warm-up: WARM_UP and more."""
        requests = self._requests(cell.shape, repeat)
        assert requests.prompt_seed is not None
        return Workload(
            scheduled_s=requests.scheduled_s,
            prompts=self._prompts(requests, requests.prompt_seed),
            prompt_tokens=requests.prompt_tokens,
            output_tokens=requests.output_tokens,
            prompt_seed=requests.prompt_seed,
            arrival=requests.arrival,
            repeat=repeat,
            classes=requests.classes,
        )

    def _is_drawn_in_blocks(self, cell: Cell) -> bool:
        is_given = self._replay is not None or self._experiment.trace is not None or self._given is not None
        is_bursty = cell.burst_size is not None or cell.request_rate is None
        return not (is_given or self._experiment.load.is_closed or is_bursty)

    def blocks(self, cell: Cell, repeat: int) -> Iterator[Workload]:
        """What `draw` draws, without prompts and in blocks of BLOCK_ROWS, for workloads larger than memory."""
        load, options = self._experiment.load, self._experiment.options
        if not self._is_drawn_in_blocks(cell):
            drawn = self.draw(cell, repeat)
            times, every = drawn.scheduled_s, range(0, len(drawn.prompt_tokens), BLOCK_ROWS)
            for rows in (slice(first, first + BLOCK_ROWS) for first in every):
                yield drawn._replace(
                    scheduled_s=None if times is None else times[rows],
                    prompts=(),
                    prompt_tokens=drawn.prompt_tokens[rows],
                    output_tokens=drawn.output_tokens[rows],
                    classes=None if drawn.classes is None else drawn.classes.rows(rows),
                )
            return
        assert cell.request_rate is not None
        assert cell.prompt_len is not None
        assert cell.output_len is not None
        assert load.arrival is not None
        seed = options.seed
        prompts_of = length_blocks(
            load.prompt_lengths, cell.prompt_len, seed=seed, repeat=repeat, stream=Stream.PROMPT_LENGTHS
        )
        outputs_of = length_blocks(
            load.output_lengths, cell.output_len, seed=seed, repeat=repeat, stream=Stream.OUTPUT_LENGTHS
        )
        times_s = at_a_rate(load, cell.request_rate, seed=seed, repeat=repeat)
        classes_of: Iterator[Classes | None] = itertools.repeat(None)
        if load.priority_mix is not None:
            classes_of = class_blocks(load.priority_mix, seed=seed, repeat=repeat)
        drawn_blocks = zip(times_s, prompts_of, outputs_of, classes_of, strict=False)
        for times, prompts, outputs, classes in drawn_blocks:
            n = len(times)
            prompts, outputs = self._cut(prompts[:n], outputs[:n])  # noqa: PLW2901
            its_classes = None if classes is None else classes.rows(slice(n))
            yield Workload(
                times,
                (),
                prompts,
                outputs,
                self._prompt_seed(cell.shape, repeat),
                load.arrival,
                repeat,
                its_classes,
            )

    def table(self) -> pd.DataFrame:
        """All requests of the experiment, a row each; it can be played again. Text is kept where it was given."""
        return pd.concat([*self.table_blocks()], ignore_index=True)

    def table_blocks(self) -> Iterator[pd.DataFrame]:
        """`table` in parts, drawn anew: for a workload larger than memory, parts of BLOCK_ROWS."""
        load, repeats = self._experiment.load, self._experiment.options.repeats
        shapes = dict.fromkeys(cell.shape for cell in self._experiment.cells)
        cut = 0
        for repeat in range(repeats):
            for shape in shapes:
                if self._is_drawn_in_blocks(shape):
                    first = 0
                    for block in self.blocks(shape, repeat):
                        yield self._block_rows(shape, block, first)
                        first += len(block.prompt_tokens)
                else:
                    requests = self._requests(shape, repeat)
                    if requests.scheduled_s is not None:
                        cut += cuts_burst(load, shape, requests.scheduled_s)
                    yield _rows(shape, repeat, requests)
        drawn = repeats * len(shapes)
        note = f"--num-requests {load.num_requests} cuts the last burst short in {cut} of {drawn} schedules."
        if cut and note not in self.notes:
            self.notes.append(note)

    def _block_rows(self, shape: Cell, block: Workload, first: int) -> pd.DataFrame:
        requests = Requests(
            scheduled_s=block.scheduled_s,
            prompt_tokens=block.prompt_tokens,
            output_tokens=block.output_tokens,
            texts=None,
            prompt_seed=block.prompt_seed,
            prefix_tokens=self._experiment.load.prefix_tokens,
            arrival=block.arrival,
            classes=block.classes,
        )
        return _rows(shape, block.repeat, requests, first)

    def _requests(self, shape: Cell, repeat: int) -> Requests:
        load, seed = self._experiment.load, self._experiment.options.seed
        if self._replay is not None:
            is_warm_up = repeat >= WARM_UP
            requests = self._replay.requests(shape, 0 if is_warm_up else repeat)
            if is_warm_up or requests.prompt_seed is None:
                requests = requests._replace(prompt_seed=self._prompt_seed(shape, repeat))
            return requests if load.duration_s is None else requests.before(load.duration_s)
        if load.is_closed:
            times, n = None, load.num_requests or CLOSED_LOOP_MOST
        else:
            trace = self._experiment.trace
            if trace is None:
                times = arrival_times(load, shape, seed=seed, repeat=repeat)
            else:
                times = trace.arrival_times(load, seed=seed, repeat=repeat)
            n = len(times)
        prompts, outputs = asked_lengths(self._experiment, shape, n, repeat, self._given_tokens)
        prompts, outputs = self._cut(prompts, outputs)
        assert load.arrival is not None
        return Requests(
            scheduled_s=times,
            prompt_tokens=prompts,
            output_tokens=outputs,
            texts=None if self._given is None else [self._given] * n,
            prompt_seed=self._prompt_seed(shape, repeat),
            prefix_tokens=load.prefix_tokens,
            arrival=load.arrival,
            classes=None
            if load.priority_mix is None
            else draw_classes(load.priority_mix, n, seed=seed, repeat=repeat),
        )

    def _prompt_seed(self, shape: Cell, repeat: int) -> int:
        return prompt_seed(self._experiment.options.seed, repeat, self._shapes.get(shape, 0))

    def _cut(
        self, prompts: NDArray[np.int64], outputs: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        load = self._experiment.load
        if not vary(load):
            return prompts, outputs
        least = prompts if load.prompt_lengths.kind == "fixed" else self._least_prompt_tokens
        return cut_to_fit(prompts, outputs, least_prompt_tokens=least, most_tokens=self._most_tokens)

    def _prompts(self, requests: Requests, seed: int) -> Sequence[Prompt]:
        encode, pretok = self._encode, self._experiment.sends_token_ids
        if encode is None:
            return ()
        texts = requests.texts
        if texts is not None:
            ids = {text: encode(text) for text in dict.fromkeys(texts)} if pretok else {}
            return [ids[text] for text in texts] if pretok else texts
        maker = self._maker
        assert maker is not None

        def make(index: int) -> Prompt:
            n_tokens = int(requests.prompt_tokens[index])
            text = maker.text(seed, index, n_tokens, requests.prefix_tokens)
            return encode(text) if pretok else text

        return OnDemand(make, len(requests.prompt_tokens))


def _rows(shape: Cell, repeat: int, requests: Requests, first: int = 0) -> pd.DataFrame:
    n = len(requests.prompt_tokens)
    times = np.full(n, np.nan) if requests.scheduled_s is None else requests.scheduled_s
    classes = requests.classes
    of_classes: dict[str, Any] = {}  # no columns where all are alike, as before there were classes
    if classes is not None:
        of_classes["priority"] = pd.array(np.array(classes.names)[classes.places], dtype="string")
        of_classes["priority_rank"] = classes.places
    return pd.DataFrame(
        {
            "repeat": np.full(n, repeat, np.int32),
            "burst_size": pd.array([shape.burst_size] * n, dtype="Int64"),
            "prompt_len": pd.array([shape.prompt_len] * n, dtype="Int64"),
            "output_len": pd.array([shape.output_len] * n, dtype="Int64"),
            "request_rate": np.full(n, shape.request_rate, np.float64),
            "arrival": pd.array([requests.arrival] * n, dtype="string"),
            "request_index": np.arange(first, first + n, dtype=np.int64),
            "scheduled_s": times,
            "prompt_tokens": requests.prompt_tokens,
            "output_tokens": requests.output_tokens,
            "prompt_seed": np.full(n, requests.prompt_seed, np.int64),
            "prefix_tokens": np.full(n, requests.prefix_tokens, np.int64),
            "prompt": pd.array(cast("list[Any]", requests.texts or [None] * n), dtype="string"),
            **of_classes,
        }
    )


def _told_of_refused_users(experiment: Experiment) -> list[str]:
    load, limits = experiment.load, [cell.max_inflight for cell in experiment.cells]
    if not load.is_closed:
        return []
    assert load.max_concurrency is not None
    users = load.max_concurrency
    if all(limit is None or limit >= users for limit in limits):
        return []
    pause_ms = 1e3 * CLOSED_LOOP_REFUSED_PAUSE_S
    note = (
        f"a limit below the {users} users of the closed loop refuses some of them: each tries again, with its next"
        f" request, {pause_ms:g} ms later, so the number of refusals says how often they asked."
    )
    return [note]


def workload_sha256(blocks: Iterable[pd.DataFrame]) -> str:
    """A hash of the contents of a workload table, which comes in parts."""
    digest = hashlib.sha256()
    for place, block in enumerate(blocks):
        if not place:
            digest.update(",".join(block.columns).encode())
        digest.update(pd.util.hash_pandas_object(block, index=False).to_numpy().tobytes())
    return digest.hexdigest()
