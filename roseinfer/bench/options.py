"""The flags of `run` and `sweep`.

A flag is one field here: its name on the command line, its key in a TOML file (without the dashes in front)
and its key in run.json are the same word.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from roseinfer.errors import InputError

DEFAULT_BURST_SIZE: Final = 128
DEFAULT_PROMPT_LEN: Final = 32
DEFAULT_OUTPUT_LEN: Final = 4
NO_LIMIT: Final = "0 means no limit"
DEVICES: Final = ("auto", "cpu", "cuda")
ARRIVALS: Final = ("burst", "constant", "poisson", "gamma", "trace")
TARGETS: Final = ("engine", "sim")
DTYPES: Final = ("auto", "float32", "fp32", "bfloat16", "bf16")


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


def _whole_option(*names: str, help: str) -> Any:  # noqa: A002
    # The command line's own parser does not name the value that it refuses.
    return typer.Option(*names, help=help, parser=_whole, metavar="INT")


def _decimal_option(*names: str, help: str) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, parser=_decimal, metavar="NUMBER")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What both commands take. Values are as typed; `Experiment.from_options` checks them."""

    model: Annotated[
        str,
        typer.Option(
            "--model", "--hf-model-id", help="builtin:gpt2, a Hugging Face folder, a .gguf file or a hub id."
        ),
    ] = "builtin:gpt2"
    device: Annotated[str, typer.Option(help=f"{', '.join(DEVICES[:-1])} or {DEVICES[-1]}.")] = "auto"
    dtype: Annotated[
        str, typer.Option(help="auto (bfloat16 where it is fast, else float32), float32 or bfloat16.")
    ] = "auto"
    max_model_len: Annotated[
        int | None, _whole_option(help="Tokens that one request may span. Default: the model's context.")
    ] = None
    num_threads: Annotated[int | None, _whole_option(help="Threads of the engine's arithmetic.")] = None

    prompt: Annotated[
        str | None, typer.Option(help="Text that every request sends, instead of --prompt-len.")
    ] = None
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
    prompt_len_dist: Annotated[
        str,
        typer.Option(
            metavar="DIST",
            help="How prompt lengths vary around --prompt-len: fixed, uniform:R (within a share R of it on both sides)"
            " or lognormal:S (it is the median, S the standard deviation of the logarithm).",
        ),
    ] = "fixed"
    prefix_len: Annotated[
        int, _whole_option(help="Tokens at the start of every prompt that all prompts share; 0 is none.")
    ] = 0
    max_new_tokens: Annotated[
        str | None,
        typer.Option(
            "--max-new-tokens",
            "--output-len",
            help=f"Tokens to generate per request. Default {DEFAULT_OUTPUT_LEN}, or the trace's.",
        ),
    ] = None
    output_len_dist: Annotated[
        str, typer.Option(metavar="DIST", help="How they vary, as for --prompt-len-dist.")
    ] = "fixed"

    arrival: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(ARRIVALS[:-1])} or {ARRIVALS[-1]}. Default: burst; with --request-rate poisson (gamma with"
            " --burstiness); with --trace trace."
        ),
    ] = None
    num_requests: Annotated[
        int | None,
        _whole_option(help="Requests in all; the same as --burst-size unless they are spaced in time."),
    ] = None
    duration: Annotated[
        float | None,
        _decimal_option(help="Seconds after which nothing more is sent; what is outstanding is waited for."),
    ] = None
    burst_size: Annotated[
        str | None,
        typer.Option(help=f"Requests that arrive at once. Default {DEFAULT_BURST_SIZE}, or --num-requests."),
    ] = None
    burst_interval: Annotated[
        float | None,
        _decimal_option(
            help="Seconds between bursts. With --request-rate the bursts come on top of that load, the first after"
            " this time."
        ),
    ] = None
    request_rate: Annotated[
        str | None, typer.Option(help="Requests per second, whatever the server does; any number > 0.")
    ] = None
    burstiness: Annotated[
        float | None,
        _decimal_option(help="Shape of gamma gaps between requests: 1 is Poisson, below 1 burstier."),
    ] = None
    ramp: Annotated[
        float | None,
        _decimal_option(
            help="Seconds in which the rate (or the number of users of a closed loop) rises from nothing to its value."
        ),
    ] = None
    submit_interval_ms: Annotated[
        float,
        _decimal_option(
            help="Space the requests: number i is sent at i times this, whatever the server does."
        ),
    ] = 0.0
    max_concurrency: Annotated[
        int | None,
        _whole_option(
            help="Requests that the client keeps outstanding. With a schedule (rate, burst, trace) it is a cap, and"
            " latency still counts from the schedule; without one it is a closed loop of that many users."
        ),
    ] = None
    timeout: Annotated[
        float | None,
        _decimal_option(help="Seconds from its sending after which the client gives a request up."),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Arrivals and lengths from a trace: Azure LLM 2023 CSV, Mooncake JSONL or CSV, BurstGPT CSV.",
        ),
    ] = None
    time_scale: Annotated[
        float, _decimal_option(help="Stretches the trace's time: 2 halves its rate.")
    ] = 1.0
    length_scale: Annotated[
        float, _decimal_option(help="Multiplies the trace's token counts; at least 1 token stays.")
    ] = 1.0
    keep_ticks: Annotated[
        bool,
        typer.Option(
            "--keep-ticks", help="Replay a trace whose clock ticks in seconds as it is, with a burst at every tick."
        ),
    ] = False
    workload: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Replay a workload.parquet: its arrivals, lengths and prompts, instead of the flags for them.",
        ),
    ] = None

    target: Annotated[
        str, typer.Option(help="engine (a model in this process) or sim (a virtual clock, with --cost-model).")
    ] = "engine"
    cost_model: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON of the seconds that a step of the simulated engine takes."),
    ] = None

    max_inflight: Annotated[
        str,
        typer.Option(
            "--max-inflight",
            "--max-inflight-requests",
            help=f"Admission limit: waiting + running + unread requests; {NO_LIMIT}.",
        ),
    ] = "0"
    max_active_requests: Annotated[int | None, _whole_option(help="Requests that run at a time.")] = None
    max_batch_size: Annotated[int, _whole_option(help="Requests in one step of the engine.")] = 32
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
    repeats: Annotated[
        int, _whole_option("--repeats", "--repeat-runs", help="Times that each cell is measured.")
    ] = 1
    seed: Annotated[int, _whole_option(help="Prompts and the order of cells follow from it.")] = 0
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ttft:250",
            help="Goal of a single request in ms (ttft, tpot, e2el ...); several must all be met. The table then has the"
            " share of the offered requests that met them.",
        ),
    ] = None
    max_error_share: Annotated[
        float, _decimal_option(help="Share of requests that may fail before a run counts as invalid.")
    ] = 0.01
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Where runs are kept.")] = Path(
        "results"
    )
    experiment_name: Annotated[str | None, typer.Option(help="Folder of the run below --output-dir.")] = None
    run_id: Annotated[
        str | None, typer.Option(help="Name of the run's own folder. Default: time and a suffix.")
    ] = None
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Kept with the run; may be given several times."),
    ] = None
    json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON on stdout, all else on stderr.")
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False


@dataclass(frozen=True, kw_only=True)
class SweepOptions(RunOptions):
    """What `sweep` takes beyond that. Comma lists: --max-inflight --burst-size --prompt-len --max-new-tokens --request-rate."""

    file: Annotated[
        Path | None,
        typer.Argument(metavar="[EXPERIMENT.toml]", help="Keys are flag names; flags override them."),
    ] = None
    repeats: Annotated[
        int, _whole_option("--repeats", "--repeat-runs", help="Times that each cell is measured.")
    ] = 8
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="p99_ttft:250", help="Goal in ms, for the recommended limit; several must all be met."
        ),
    ] = None
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with an interrupted run.")] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the cells and end.")] = False


SWEPT: Final = ("max_inflight", "burst_size", "prompt_len", "max_new_tokens", "request_rate")
"""Fields that take comma lists."""

NOT_CONFIGURATION: Final = frozenset(
    {
        "file",
        "resume",
        "dry_run",
        "json",
        "quiet",
        "output_dir",
        "experiment_name",
        "run_id",
        "slo",
        "goodput",
        "metadata",
    }
)
"""Fields that say nothing about what is measured, and that `--resume` need not find unchanged."""

NOT_IN_FILES: Final = frozenset({"file", "resume", "dry_run"})

_SECOND_NAMES: Final = {
    "hf-model-id": "model",
    "input-len": "prompt_len",
    "output-len": "max_new_tokens",
    "max-inflight-requests": "max_inflight",
    "repeat-runs": "repeats",
}


def flag(field: str) -> str:
    """The flag of a field, as a user types it."""
    return "--" + field.replace("_", "-")


def read_toml(path: Path) -> dict[str, Any]:
    """The fields that a TOML file sets, checked for name and kind. Lists become the comma lists of the flags.

    Raises InputError naming the file, the key and the value.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError("EXPERIMENT.toml", str(path), error.strerror or str(error)) from error
    except ValueError as error:  # bad TOML, or no UTF-8
        raise InputError("EXPERIMENT.toml", str(path), f"not valid TOML: {error}") from error
    kinds = get_type_hints(SweepOptions)
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{path.name}: {key}"
        field = _SECOND_NAMES.get(key, key.replace("-", "_"))
        if "_" in key or field not in kinds or field in NOT_IN_FILES:
            raise InputError(name, value, "no flag of this name can stand in a file")
        if field in values:
            raise InputError(name, value, f"sets {flag(field)}, which the file sets already")
        values[field] = _toml_value(name, field, value, kinds[field])
    return values


def _toml_value(name: str, field: str, value: object, kind: object) -> object:
    kinds = getattr(kind, "__args__", (kind,))
    if field in SWEPT:
        items = value if isinstance(value, list) else [value]
        if all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in items):
            return ",".join(map(str, items))
    elif list[str] in kinds:
        items = value if isinstance(value, list) else [value]
        if all(isinstance(item, str) for item in items):
            return items
    elif Path in kinds and isinstance(value, str):
        return Path(value)
    elif float in kinds and type(value) in (int, float):
        return float(value)  # type: ignore[arg-type]
    elif type(value) in kinds:
        return value
    raise InputError(name, value, f"is not what {flag(field)} takes")
