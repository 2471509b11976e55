"""The experiment that the flags describe: its cells, checked as far as can be without a model."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

from roseinfer.bench.options import (
    DEFAULT_BURST_SIZE,
    DEFAULT_PROMPT_LEN,
    DEVICES,
    DTYPES,
    NO_LIMIT,
    NOT_CONFIGURATION,
    RunOptions,
    flag,
)
from roseinfer.errors import InputError
from roseinfer.executor import KV_BLOCK_TOKENS
from roseinfer.kv_cache import blocks_for
from roseinfer.model_source import local_path

_LEAST: Final = {
    "max_batch_size": 1,
    "repeats": 1,
    "prompt_repeats": 1,
    "max_model_len": 2,
    "num_threads": 1,
    "max_active_requests": 1,
    "max_num_batched_tokens": 1,
    "kv_cache_tokens": 1,
    "num_requests": 1,
    "tokenize_workers": 0,
    "warmup_runs": 0,
    "seed": 0,
}
_LARGEST: Final = 2**31 - 1
_LONGEST_TEXT: Final = 10_000_000


class Cell(NamedTuple):
    """One combination of factors, named as `records.FACTORS`.

    None: no limit; no bursts; lengths of --prompt, a trace or a replayed workload; no rate.
    """

    max_inflight: int | None
    burst_size: int | None
    prompt_len: int | None
    output_len: int | None
    request_rate: float | None = None

    @property
    def cell_id(self) -> str:
        parts: dict[str, object] = {"inflight": self.max_inflight or "none", "burst": self.burst_size}
        parts |= {"prompt": self.prompt_len, "output": self.output_len}
        parts["rate"] = None if self.request_rate is None else f"{self.request_rate:g}"
        return "-".join(f"{name}_{value}" for name, value in parts.items() if value is not None)

    @property
    def shape(self) -> Cell:
        """The cell without its limit: cells of one shape get the same requests at the same times."""
        return self._replace(max_inflight=None)


@dataclass(frozen=True)
class Experiment:
    """Options that were checked: what to measure, as numbers."""

    options: RunOptions
    cells: tuple[Cell, ...]  # in the order that they were asked for
    num_requests: int | None  # for spaced requests; a burst's size otherwise
    slos: tuple[str, ...]
    metadata: Mapping[str, str]

    @classmethod
    def from_options(cls, options: RunOptions, given: Collection[str]) -> Experiment:
        """Checks everything that needs no model. `given` names the fields that the user set.

        Raises InputError naming flag and value.
        """
        o = options
        limits = [
            None if limit == 0 else limit
            for limit in _whole_numbers("max_inflight", o.max_inflight, least=0, hint=f" ({NO_LIMIT})")
        ]
        outputs = _whole_numbers("max_new_tokens", o.max_new_tokens, least=1)
        for field, least in _LEAST.items():
            value = getattr(o, field)
            if value is not None and not least <= value <= _LARGEST:
                raise _wrong(field, o, f"must be a whole number from {least} to {_LARGEST}")
        if o.device not in DEVICES:
            raise _wrong("device", o, f"must be {', '.join(DEVICES)}")
        if o.dtype not in DTYPES:
            raise _wrong("dtype", o, f"must be {', '.join(DTYPES)}")
        if o.max_num_batched_tokens is not None and o.max_num_batched_tokens <= o.max_batch_size:
            raise _wrong("max_num_batched_tokens", o, f"must exceed --max-batch-size ({o.max_batch_size})")
        if not 0 <= o.submit_interval_ms < 1e9:
            raise _wrong("submit_interval_ms", o, "must be a number >= 0")
        if not 0 <= o.max_error_share <= 1:
            raise _wrong("max_error_share", o, "must lie in [0, 1]")
        if o.pretok and o.tokenize_workers and "tokenize_workers" in given:
            raise _wrong("tokenize_workers", o, "has nothing to do with --pretok")
        prompts = _prompt_lens(o, given)
        bursts = _bursts(o)
        cells = tuple(Cell(*factors) for factors in itertools.product(limits, bursts, prompts, outputs))
        slos = tuple(getattr(o, "slo", None) or ())
        return cls(o, cells, None if bursts != [None] else o.num_requests, slos, _metadata(o.metadata or []))

    def configuration(self) -> dict[str, object]:
        """What the measurement depends on: flag names (without dashes in front) to plain values."""
        values = {field.name: getattr(self.options, field.name) for field in fields(self.options)}
        values["model"] = self.model_name
        return {
            name.replace("_", "-"): value for name, value in values.items() if name not in NOT_CONFIGURATION
        }

    @property
    def model_name(self) -> str:
        """The model as records may name it: of a local one the last part only, since a path tells who measured."""
        path = local_path(self.options.model)
        return path.absolute().name if path.exists() else self.options.model

    @property
    def tokenize_workers(self) -> int:
        """0 where token ids are sent: there is nothing to tokenise."""
        return 0 if self.options.pretok else self.options.tokenize_workers

    @property
    def interval_s(self) -> float:
        return self.options.submit_interval_ms / 1e3

    @property
    def is_paced(self) -> bool:
        """Requests are spaced in time; otherwise they arrive as one burst."""
        return self.interval_s > 0

    def offered(self, cell: Cell) -> int:
        """Requests of a cell and repeat."""
        count = self.num_requests if cell.burst_size is None else cell.burst_size
        assert count is not None
        return count

    def check_fits(self, context_tokens: int, given_tokens: int | None = None) -> None:
        """Raises InputError for a cell whose requests could never be served. `given_tokens`: of --prompt, if known."""
        kv_tokens = self.options.kv_cache_tokens
        for cell in self.cells:
            prompt_tokens = given_tokens if cell.prompt_len is None else cell.prompt_len
            if prompt_tokens is None:
                continue
            need_tokens = prompt_tokens + cell.output_len
            if need_tokens > context_tokens:
                name, value = "--prompt-len", str(prompt_tokens)
                if cell.prompt_len is None:
                    name, value = "--prompt", f"{prompt_tokens} tokens"
                why = (
                    f"with --max-new-tokens {cell.output_len} exceeds the context of {context_tokens} tokens"
                )
                raise InputError(name, value, why)
            if kv_tokens is not None and need_tokens > KV_BLOCK_TOKENS * blocks_for(kv_tokens):
                why = f"cannot hold one request of {prompt_tokens} prompt and {cell.output_len} new tokens"
                raise InputError("--kv-cache-tokens", kv_tokens, why)


def _prompt_lens(o: RunOptions, given: Collection[str]) -> list[int] | list[None]:
    if o.prompt is None:
        if "prompt_repeats" in given:
            raise _wrong("prompt_repeats", o, "repeats --prompt, which is missing")
        return _whole_numbers(
            "prompt_len", str(DEFAULT_PROMPT_LEN) if o.prompt_len is None else o.prompt_len, least=1
        )
    if o.prompt_len is not None:
        raise _wrong("prompt_len", o, "contradicts --prompt, which has its own length")
    if not o.prompt:
        raise _wrong("prompt", o, "is empty")
    if len(o.prompt) * o.prompt_repeats > _LONGEST_TEXT:
        raise _wrong("prompt_repeats", o, f"makes a text of more than {_LONGEST_TEXT} characters")
    return [None]


def _bursts(o: RunOptions) -> list[int] | list[None]:
    if o.submit_interval_ms > 0:
        if o.burst_size is not None:
            raise _wrong("burst_size", o, "contradicts --submit-interval-ms: name --num-requests")
        if o.num_requests is None:
            raise _wrong("submit_interval_ms", o, "needs --num-requests")
        return [None]
    if o.burst_size is None:
        return [o.num_requests or DEFAULT_BURST_SIZE]
    bursts = _whole_numbers("burst_size", o.burst_size, least=1)
    if o.num_requests is not None and bursts != [o.num_requests]:
        raise _wrong("num_requests", o, f"differs from --burst-size {o.burst_size}, and a run is one burst")
    return bursts


def _whole_numbers(field: str, text: str, *, least: int, hint: str = "") -> list[int]:
    """A comma list without repetition, e.g. "0,16,64"."""
    numbers: list[int] = []
    for item in text.split(","):
        try:
            number = int(item)
        except ValueError:
            number = least - 1
        if not least <= number <= _LARGEST:
            why = f"{item.strip()!r} is no whole number from {least} to {_LARGEST}{hint}"
            raise InputError(flag(field), text, why)
        if number in numbers:
            raise InputError(flag(field), text, f"names {number} twice")
        numbers.append(number)
    return numbers


def _wrong(field: str, options: RunOptions, why: str) -> InputError:
    return InputError(flag(field), getattr(options, field), why)


def _metadata(pairs: list[str]) -> dict[str, str]:
    metadata: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise InputError("--metadata", pair, "is not KEY=VALUE")
        if key in metadata:
            raise InputError("--metadata", pair, f"{key} is given twice")
        metadata[key] = value
    return metadata
