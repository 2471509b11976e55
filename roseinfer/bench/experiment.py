"""The experiment that the flags describe: its cells, checked as far as can be without a model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.environment import public_text, public_url, public_words
from roseinfer.bench.flag_values import LARGEST, admissions, check_spread, whole_numbers, wrong
from roseinfer.bench.http_options import ADMISSION_WORD, LIMIT_WORD
from roseinfer.bench.load import Load, bursts_of, check_shape, load_of, rates_of
from roseinfer.bench.load_options import DEFAULT_OUTPUT_LEN, DEFAULT_PROMPT_LEN
from roseinfer.bench.options import DEVICES, DTYPES, NOT_CONFIGURATION, RunOptions, is_url
from roseinfer.bench.target_flags import check_target, unread
from roseinfer.errors import InputError
from roseinfer.model_source import local_path
from roseinfer.waiting import EDF, SPF

if TYPE_CHECKING:
    from roseinfer.bench.replay import Replay
    from roseinfer.bench.traces import Trace

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
    "max_concurrency": 1,
    "prefix_len": 0,
    "shards": 1,
}
_LONGEST_TEXT: Final = 10_000_000
DEFAULT_MODEL: Final = "builtin:gpt2"


class Cell(NamedTuple):
    """One combination of factors, named as `records.FACTORS`.

    None: no bursts; lengths of --prompt, a trace or a replayed workload; no rate.
    """

    admission: AdmissionSpec
    burst_size: int | None
    prompt_len: int | None
    output_len: int | None
    request_rate: float | None = None

    @property
    def max_inflight(self) -> int | None:
        """The bound on requests in flight, None where there is none that stands still."""
        return self.admission.inflight

    def at(self, admission: AdmissionSpec) -> Cell:
        """The cell with this policy in place of its own."""
        return self._replace(admission=admission)

    @property
    def cell_id(self) -> str:
        parts: dict[str, object] = {"burst": self.burst_size}
        parts |= {"prompt": self.prompt_len, "output": self.output_len}
        parts["rate"] = None if self.request_rate is None else f"{self.request_rate:g}"
        factors = [f"{name}_{value}" for name, value in parts.items() if value is not None]
        return "-".join([self.admission.slug, *factors])

    @property
    def shape(self) -> Cell:
        """The cell without its limit: cells of one shape get the same requests at the same times."""
        return self.at(AdmissionSpec())


@dataclass(frozen=True)
class Experiment:
    """Options that were checked: what to measure, as numbers."""

    options: RunOptions
    load: Load
    cells: tuple[Cell, ...]  # in the order that they were asked for
    slos: tuple[str, ...]
    goals: tuple[str, ...]  # --goodput, as typed
    metadata: Mapping[str, str]
    trace: Trace | None = dataclasses.field(default=None, repr=False, compare=False)
    replay: Replay | None = dataclasses.field(default=None, repr=False, compare=False)

    @classmethod
    def from_options(cls, options: RunOptions, given: Collection[str]) -> Experiment:
        """Checks everything that needs no model. `given` names the fields that the user set.

        Raises InputError naming flag and value.
        """
        o = options
        limits = admissions(o, given)
        for field, least in _LEAST.items():
            value = getattr(o, field)
            if value is not None and not least <= value <= LARGEST:
                raise wrong(field, o, f"must be a whole number from {least} to {LARGEST}")
        if o.device not in DEVICES:
            raise wrong("device", o, f"must be {', '.join(DEVICES)}")
        if o.dtype not in DTYPES:
            raise wrong("dtype", o, f"must be {', '.join(DTYPES)}")
        if o.max_num_batched_tokens is not None and o.max_num_batched_tokens <= o.max_batch_size:
            raise wrong("max_num_batched_tokens", o, f"must exceed --max-batch-size ({o.max_batch_size})")
        if not 0 <= o.max_error_share <= 1:
            raise wrong("max_error_share", o, "must lie in [0, 1]")
        check_target(o, given)
        replay = None if o.workload is None else _replay(o)
        trace = None if o.trace is None else _trace(o)
        load = load_of(o, given, replays_closed_loop=replay is not None and replay.is_closed)
        if o.pretok and o.tokenize_workers and "tokenize_workers" in given:
            raise wrong("tokenize_workers", o, "has nothing to do with --pretok")
        if replay is None:
            prompts, outputs = _prompt_lens(o, given, load), _output_lens(o, load)
            check_spread("prompt_len_dist", o, load.prompt_lengths, prompts)
            check_spread("output_len_dist", o, load.output_lengths, outputs)
            factors = itertools.product(bursts_of(o, load), prompts, outputs, rates_of(o, load))
            shapes = tuple(Cell(AdmissionSpec(), *values) for values in factors)
            if o.load is None:
                for shape in shapes:
                    check_shape(o, load, shape.burst_size, shape.request_rate)
        else:
            shapes = replay.shapes
        slos, goals = tuple(getattr(o, "slo", None) or ()), tuple(o.goodput or ())
        metadata = _metadata(o.metadata or [])
        experiment = cls(
            options=o,
            load=load,
            cells=tuple(shape.at(limit) for limit in limits for shape in shapes),
            slos=slos,
            goals=goals,
            metadata=metadata,
            trace=trace,
            replay=replay,
        )
        # A file says of which classes its requests are: one that was drawn for none of them is not in it.
        has_all_classes = replay is None or not replay.class_names
        if o.ttft_deadline is not None and has_all_classes:
            load.ttft_deadlines.check(o.ttft_deadline, experiment.class_names)
        _check_order(o, limits, experiment.class_names)
        if o.load is None:
            return experiment
        from roseinfer.bench.load_share import at_load

        return at_load(experiment)

    def configuration(self) -> dict[str, object]:
        """What the measurement depends on: flag names (without dashes in front) to plain values.

        Of a file the last part of its path only, as of a local model.
        """
        left_out = {*NOT_CONFIGURATION, *unread(self.options.target)}
        values = {
            field.name: getattr(self.options, field.name)
            for field in fields(self.options)
            if field.name not in left_out
        }
        if "warmup_runs" in values:
            values["warmup_runs"] = self.warmup_runs
        if self.is_http:
            values["timeout"] = self.load.timeout_s
            values["target"] = public_url(self.options.target)
            if (model := self.options.model) is not None:
                values["model"] = public_text(model)
            if (command := self.options.target_cmd) is not None:
                values["target_cmd"] = public_words(command)
            if (tokenizer := self.options.tokenizer) is not None:
                values["tokenizer"] = Path(tokenizer).absolute().name
        elif "model" in values:
            values["model"] = self.model_name
        return {
            name.replace("_", "-"): value.name if isinstance(value, Path) else value
            for name, value in values.items()
        }

    @property
    def is_http(self) -> bool:
        """The target is a server."""
        return is_url(self.options.target)

    @property
    def model(self) -> str:
        """What the engine computes."""
        return self.options.model or DEFAULT_MODEL

    @property
    def model_name(self) -> str:
        """The model as records may name it: of a local one the last part only, since a path tells who measured."""
        path = local_path(self.model)
        return path.absolute().name if path.exists() else self.model

    @property
    def class_names(self) -> tuple[str, ...]:
        """Of its requests, the highest first; empty where all are alike."""
        if self.load.priority_mix is not None:
            return self.load.priority_mix.names
        return () if self.replay is None else self.replay.class_names

    @property
    def warmup_runs(self) -> int:
        if self.options.warmup_runs is None:
            return 0 if self.is_http else 1
        return self.options.warmup_runs

    @property
    def sends_token_ids(self) -> bool:
        """Prompts are not sent as text."""
        o = self.options
        return o.pretok or (self.is_http and o.tokenizer is not None and o.api == "completions")

    @property
    def tokenize_workers(self) -> int:
        """0 where token ids are sent: there is nothing to tokenise."""
        return 0 if self.options.pretok else self.options.tokenize_workers

    @property
    def prompts_may_be_alike(self) -> bool:
        """Somebody wants prompts that a prefix cache knows, or says what they are; else each begins in its own way.

        A chat template puts the same words before all of them.
        """
        o = self.options
        is_chat = self.is_http and o.api == "chat"
        return bool(o.prompt is not None or self.load.prefix_tokens or self.replay is not None or is_chat)

    def server_of(self, cell: Cell) -> object:
        """Equal for cells that are run on one and the same server; of others than --target-cmd starts all are."""
        command = self.options.target_cmd
        is_set = command is not None and (LIMIT_WORD in command or ADMISSION_WORD in command)
        return cell.admission if is_set else None

    def offered(self, cell: Cell) -> int | None:
        """Requests of a cell and repeat, as far as the flags alone say it."""
        load = self.load
        if load.arrival == "burst" and load.burst_interval_s is None:
            return cell.burst_size
        return load.num_requests if load.duration_s is None else None

    def check_fits(self, context_tokens: int, given_tokens: int | None = None) -> None:
        """Raises InputError for a cell whose requests could never be served. `given_tokens`: of --prompt, if known."""
        from roseinfer.bench.fit import check_fits

        check_fits(self, context_tokens, given_tokens=given_tokens, special_tokens=0, replay=self.replay)


def _check_order(o: RunOptions, limits: list[AdmissionSpec], class_names: tuple[str, ...]) -> None:
    """Raises InputError for an order of waiting that would be that of arrival, since nothing tells requests apart."""
    if o.scheduling == EDF and o.ttft_deadline is None:
        raise wrong("scheduling", o, "needs --ttft-deadline: without deadlines none is earlier")
    if o.scheduling == SPF and o.trace is None and o.workload is None and o.prompt_len_dist == "fixed":
        raise wrong("scheduling", o, "needs --prompt-len-dist: of equal prompts none is shorter")
    lanes = [limit for limit in limits if limit.priority_age_s is not None]
    if lanes and not class_names and not is_url(o.target):
        raise InputError("--admission", str(lanes[0]), "needs --priority-mix: all requests are of one class")


def _trace(o: RunOptions) -> Trace:
    from roseinfer.bench.traces import read_trace

    assert o.trace is not None
    trace = read_trace(o.trace)
    if o.num_requests is not None and o.num_requests > len(trace):
        raise wrong("num_requests", o, f"is more than the {len(trace)} of --trace {o.trace}")
    if o.keep_ticks and trace.tick_s is None:
        raise wrong("keep_ticks", o, f"has nothing to keep: the clock of --trace {o.trace} does not tick")
    return trace


def _replay(o: RunOptions) -> Replay:
    from roseinfer.bench.replay import read_replay

    assert o.workload is not None
    replay = read_replay(o.workload)
    if replay.repeats is not None and o.repeats > replay.repeats:
        raise wrong("repeats", o, f"is more than the {replay.repeats} of --workload {o.workload}")
    if o.target == "sim" and not replay.is_counted:
        raise wrong("workload", o, "has prompts without prompt_tokens, which --target sim cannot count")
    fewest = min(len(table.prompt_tokens) for table in replay.tables.values())
    if replay.is_closed and o.max_concurrency is not None and o.max_concurrency > fewest:
        raise wrong(
            "max_concurrency", o, f"is never reached with the {fewest} requests of --workload {o.workload}"
        )
    return replay


def _prompt_lens(o: RunOptions, given: Collection[str], load: Load) -> list[int] | list[None]:
    if o.prompt is None:
        if "prompt_repeats" in given:
            raise wrong("prompt_repeats", o, "repeats --prompt, which is missing")
        if o.prompt_len is None and load.arrival == "trace":
            return [None]
        lens = whole_numbers(
            "prompt_len", str(DEFAULT_PROMPT_LEN) if o.prompt_len is None else o.prompt_len, least=1
        )
        if load.prefix_tokens >= min(lens):
            raise wrong("prefix_len", o, f"leaves nothing of its own to a prompt of {min(lens)} tokens")
        return lens
    for field in ("prompt_len", "prompt_len_dist", "prefix_len"):
        if field in given and getattr(o, field):
            raise wrong(field, o, "contradicts --prompt, which has its own length and text")
    if not o.prompt:
        raise wrong("prompt", o, "is empty")
    if len(o.prompt) * o.prompt_repeats > _LONGEST_TEXT:
        raise wrong("prompt_repeats", o, f"makes a text of more than {_LONGEST_TEXT} characters")
    return [None]


def _output_lens(o: RunOptions, load: Load) -> list[int] | list[None]:
    if o.max_new_tokens is None:
        return [None] if load.arrival == "trace" else [DEFAULT_OUTPUT_LEN]
    return list(whole_numbers("max_new_tokens", o.max_new_tokens, least=1))


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
