"""The flags of `run` and `sweep`, and the experiment that they describe.

A flag is one field here: its name on the command line, its key in a TOML file (without the dashes in front)
and its key in run.json are the same word.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

from roseinfer.errors import InputError

DEFAULT_PROMPT_LEN = 32
NO_LIMIT = "0 means no limit"


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no whole number") from None


def _decimal(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number") from None


def _whole_option(*names: str, help: str) -> Any:
    # The command line's own parser does not name the value that it refuses.
    return typer.Option(*names, help=help, parser=_whole, metavar="INT")


def _decimal_option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, parser=_decimal, metavar="NUMBER")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What both commands take. Values are as typed; `Experiment.from_options` checks them."""

    model: Annotated[
        str,
        typer.Option("--model", "--hf-model-id", help="builtin:gpt2, a Hugging Face folder, a .gguf file or a hub id."),
    ] = "builtin:gpt2"
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    dtype: Annotated[str, typer.Option(help="auto (bf16 where it is fast, else fp32), float32 or bfloat16.")] = "auto"
    num_threads: Annotated[int | None, _whole_option(help="Threads of the engine's arithmetic.")] = None

    prompt: Annotated[str | None, typer.Option(help="Text that every request sends, instead of --prompt-len.")] = None
    prompt_repeats: Annotated[int, _whole_option(help="Copies of --prompt, joined without a space.")] = 1
    prompt_len: Annotated[
        str | None,
        typer.Option(
            "--prompt-len",
            "--input-len",
            help=f"Tokens of prompts made up for the run, each its own text. Default {DEFAULT_PROMPT_LEN}.",
        ),
    ] = None
    pretok: Annotated[bool, typer.Option("--pretok", help="Send token ids instead of text.")] = False
    num_requests: Annotated[
        int | None, _whole_option(help="Requests in all; the same as --burst-size unless they are spaced in time.")
    ] = None
    burst_size: Annotated[
        str | None, typer.Option(help="Requests that arrive at once. Default 128, or --num-requests.")
    ] = None
    submit_interval_ms: Annotated[
        float, _decimal_option(help="Space the requests: number i is sent at i times this, whatever the server does.")
    ] = 0.0
    max_new_tokens: Annotated[
        str, typer.Option("--max-new-tokens", "--output-len", help="Tokens to generate per request.")
    ] = "4"

    max_inflight: Annotated[
        str,
        typer.Option(
            "--max-inflight",
            "--max-inflight-requests",
            help=f"Admission limit: waiting + running + unread requests; {NO_LIMIT}.",
        ),
    ] = "0"
    max_active_requests: Annotated[int | None, _whole_option(help="Requests that run at a time.")] = None
    max_batch_size: Annotated[int, _whole_option(help="Requests in one step of the engine.")] = 16
    max_num_batched_tokens: Annotated[
        int | None, _whole_option(help="Token budget of a step. Default: chosen for the device.")
    ] = None
    kv_cache_tokens: Annotated[
        int | None, _whole_option(help="Tokens that the KV cache holds. Default: chosen for the device.")
    ] = None
    tokenize_workers: Annotated[
        int, _whole_option(help="Threads that tokenise; with 0 the sender does it within add_request.")
    ] = 1
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let the end-of-sequence token end a request.")
    ] = False

    warmup_runs: Annotated[int, _whole_option(help="Bursts that are run first and not recorded.")] = 1
    repeats: Annotated[int, _whole_option("--repeats", "--repeat-runs", help="Times that each cell is measured.")] = 1
    seed: Annotated[int, _whole_option(help="Prompts and the order of cells follow from it.")] = 0
    max_error_share: Annotated[
        float, _decimal_option(help="Share of requests that may fail before a run counts as invalid.")
    ] = 0.01
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Where runs are kept.")] = Path("results")
    experiment_name: Annotated[str | None, typer.Option(help="Folder of the run below --output-dir.")] = None
    run_id: Annotated[str | None, typer.Option(help="Name of the run's own folder. Default: time and a suffix.")] = None
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Kept with the run; may be given several times.")
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout, all else on stderr.")] = (
        False
    )
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False


@dataclass(frozen=True, kw_only=True)
class SweepOptions(RunOptions):
    """What `sweep` takes beyond that. Comma lists: --max-inflight --burst-size --prompt-len --max-new-tokens."""

    file: Annotated[
        Path | None, typer.Argument(metavar="[EXPERIMENT.toml]", help="Keys are flag names; flags override them.")
    ] = None
    repeats: Annotated[int, _whole_option("--repeats", "--repeat-runs", help="Times that each cell is measured.")] = 8
    slo: Annotated[
        list[str] | None,
        typer.Option(metavar="p99_ttft:250", help="Goal in ms, for the recommended limit; several must all be met."),
    ] = None
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with an interrupted run.")] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the cells and end.")] = False


NOT_CONFIGURATION = frozenset(
    {"file", "resume", "dry_run", "json", "quiet", "output_dir", "experiment_name", "run_id", "slo", "metadata"}
)
"""Fields that say nothing about what is measured, and that `--resume` need not find unchanged."""


def flag(field: str) -> str:
    """The flag of a field, as a user types it."""
    return "--" + field.replace("_", "-")


def read_toml(path: Path) -> dict[str, Any]:
    """The fields that a TOML file sets, checked for name and kind. Lists become comma lists where flags are such.

    Raises InputError naming the file, the key and the value.
    """
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError("EXPERIMENT.toml", str(path), error.strerror or str(error)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("EXPERIMENT.toml", str(path), f"not valid TOML: {error}") from error
    hints = get_type_hints(SweepOptions)
    aliases = {"repeat-runs": "repeats", "max-inflight-requests": "max_inflight", "output-len": "max_new_tokens"}
    aliases |= {"input-len": "prompt_len", "hf-model-id": "model"}
    values: dict[str, Any] = {}
    for key, value in content.items():
        field = aliases.get(key, key.replace("-", "_"))
        if "_" in key or field not in hints or field in ("file", "resume", "dry_run"):
            raise InputError(f"{path.name}: {key}", value, "no flag of this name can stand in a file")
        values[field] = _typed(f"{path.name}: {key}", value, hints[field])
    return values


def _typed(name: str, value: object, hint: object) -> object:
    kinds = getattr(hint, "__args__", (hint,))
    if list[str] in kinds:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
    elif str in kinds:
        items = value if isinstance(value, list) else [value]
        if all(isinstance(item, str | int) and not isinstance(item, bool) for item in items):
            return ",".join(map(str, items))
    elif Path in kinds and isinstance(value, str):
        return Path(value)
    elif float in kinds and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif type(value) in kinds:
        return value
    raise InputError(name, value, f"is not what {name.split()[-1]} takes")


class Cell(NamedTuple):
    """One combination of factors. None: no limit; burst_size None: requests are spaced; prompt_len None: --prompt."""

    max_inflight: int | None
    burst_size: int | None
    prompt_len: int | None
    output_len: int

    @property
    def cell_id(self) -> str:
        parts = {"inflight": self.max_inflight or "none", "burst": self.burst_size, "prompt": self.prompt_len}
        parts["output"] = self.output_len
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
        for name, least in {"max_batch_size": 1, "repeats": 1, "prompt_repeats": 1, "warmup_runs": 0, "seed": 0}.items():
            _at_least(name, getattr(o, name), least)
        for name in ("num_threads", "max_active_requests", "max_num_batched_tokens", "kv_cache_tokens", "num_requests"):
            if getattr(o, name) is not None:
                _at_least(name, getattr(o, name), 1)
        _at_least("tokenize_workers", o.tokenize_workers, 0)
        if o.max_num_batched_tokens is not None and o.max_num_batched_tokens <= o.max_batch_size:
            raise _wrong("max_num_batched_tokens", o, f"must exceed --max-batch-size ({o.max_batch_size})")
        if not 0 <= o.submit_interval_ms < 1e9:
            raise _wrong("submit_interval_ms", o, "must be a number >= 0")
        if not 0 <= o.max_error_share <= 1:
            raise _wrong("max_error_share", o, "must lie in [0, 1]")
        if o.pretok and o.tokenize_workers and "tokenize_workers" in given:
            raise _wrong("tokenize_workers", o, "has nothing to do with --pretok")
        prompts = _prompt_lens(o, given)
        bursts = _bursts(o, given)
        cells = tuple(Cell(*factors) for factors in itertools.product(limits, bursts, prompts, outputs))
        slos = tuple(getattr(o, "slo", None) or ())
        return cls(o, cells, None if bursts != [None] else o.num_requests, slos, _metadata(o.metadata or []))

    def configuration(self) -> dict[str, object]:
        """What the measurement depends on: flag names (without dashes in front) to values."""
        values = {field.name: getattr(self.options, field.name) for field in fields(self.options)}
        return {name.replace("_", "-"): value for name, value in values.items() if name not in NOT_CONFIGURATION}

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

    def check_context(self, max_model_len: int) -> None:
        """Raises InputError for a cell whose requests could never be served."""
        for cell in self.cells:
            if cell.prompt_len is not None and cell.prompt_len + cell.output_len > max_model_len:
                raise InputError(
                    "--prompt-len",
                    cell.prompt_len,
                    f"with --max-new-tokens {cell.output_len} exceeds the context of {max_model_len} tokens",
                )


def _prompt_lens(o: RunOptions, given: Collection[str]) -> list[int] | list[None]:
    if o.prompt is None:
        if "prompt_repeats" in given:
            raise _wrong("prompt_repeats", o, "repeats --prompt, which is missing")
        return _whole_numbers("prompt_len", o.prompt_len or str(DEFAULT_PROMPT_LEN), least=1)
    if o.prompt_len is not None:
        raise _wrong("prompt_len", o, "contradicts --prompt, which has its own length")
    if not o.prompt:
        raise _wrong("prompt", o, "is empty")
    return [None]


def _bursts(o: RunOptions, given: Collection[str]) -> list[int] | list[None]:
    if o.submit_interval_ms > 0:
        if o.burst_size is not None:
            raise _wrong("burst_size", o, "contradicts --submit-interval-ms: name --num-requests")
        if o.num_requests is None:
            raise _wrong("submit_interval_ms", o, "needs --num-requests")
        return [None]
    if o.burst_size is None:
        return [128 if o.num_requests is None else o.num_requests]
    bursts = _whole_numbers("burst_size", o.burst_size, least=1)
    if o.num_requests is not None and bursts != [o.num_requests]:
        raise _wrong("num_requests", o, f"differs from --burst-size {o.burst_size}, and a run is one burst")
    return bursts


def _whole_numbers(field: str, text: str, *, least: int, hint: str = "") -> list[int]:
    """A comma list without repetition, e.g. "0,16,64"."""
    numbers = []
    for item in text.split(","):
        try:
            number = int(item)
        except ValueError:
            number = least - 1
        if number < least:
            raise InputError(flag(field), text, f"{item.strip()!r} is no whole number >= {least}{hint}")
        if number in numbers:
            raise InputError(flag(field), text, f"names {number} twice")
        numbers.append(number)
    return numbers


def _at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(flag(field), value, f"must be a whole number >= {least}")


def _wrong(field: str, options: RunOptions, why: str) -> InputError:
    return InputError(flag(field), getattr(options, field), why)


def _metadata(pairs: list[str]) -> dict[str, str]:
    metadata = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise InputError("--metadata", pair, "is not KEY=VALUE")
        metadata[key] = value
    return metadata
