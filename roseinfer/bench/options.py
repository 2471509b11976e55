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

from roseinfer.bench.http_options import HttpOptions
from roseinfer.bench.load_options import LoadOptions, decimal_option, whole_option
from roseinfer.errors import InputError
from roseinfer.waiting import FCFS, SCHEDULINGS

NO_LIMIT: Final = "0 means no limit"
DEVICES: Final = ("auto", "cpu", "cuda")
TARGETS: Final = ("engine", "sim")
URL_SCHEMES: Final = ("http://", "https://")
DTYPES: Final = ("auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16")
DTYPE_HELP: Final = (
    "float32, bfloat16, or float16: a CPU keeps weights in it and computes in float32. auto is bfloat16 where that is"
    " fast, else float16 where the CPU has products for it, else float32."
)


@dataclass(frozen=True, kw_only=True)
class RunOptions(LoadOptions, HttpOptions):
    """What both commands take. Values are as typed; `Experiment.from_options` checks them."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--hf-model-id",
            help="builtin:gpt2 (the default), a Hugging Face folder, a .gguf file or a hub id. Of a server the name"
            " that it has there; default: the only one that it lists.",
        ),
    ] = None
    device: Annotated[str, typer.Option(help=f"{', '.join(DEVICES[:-1])} or {DEVICES[-1]}.")] = "auto"
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "auto"
    max_model_len: Annotated[
        int | None, whole_option(help="Tokens that one request may span. Default: the model's context.")
    ] = None
    num_threads: Annotated[int | None, whole_option(help="Threads of the engine's arithmetic.")] = None

    target: Annotated[
        str,
        typer.Option(
            help="engine (a model in this process), sim (a virtual clock, with --cost-model) or the URL of a server"
            " with OpenAI's API, up to /v1."
        ),
    ] = "engine"
    cost_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON of the seconds that a step takes: of the simulated engine, or of the real one for those policies"
            " of --admission that weigh what a request will cost.",
        ),
    ] = None

    no_token_times: Annotated[
        bool,
        typer.Option(
            "--no-token-times",
            help="Keep no times of single tokens and no members of steps, for millions of simulated requests.",
        ),
    ] = False

    max_inflight: Annotated[
        str,
        typer.Option(
            "--max-inflight",
            "--max-inflight-requests",
            help=f"Admission limit: waiting + running + unread requests; {NO_LIMIT}.",
        ),
    ] = "0"
    admission: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="The same in full, inflight:N, or another policy: tokens:N (a budget of prompt + new tokens over all"
            " in flight), slo:ttft=250ms, queue-timeout:2s, codel:target=50ms:interval=500ms, aimd, gradient, priority;"
            " several joined with +; none is no limit.",
        ),
    ] = None
    scheduling: Annotated[
        str,
        typer.Option(
            help=f"Order of those who wait: {', '.join(SCHEDULINGS[:-1])} or {SCHEDULINGS[-1]} (submission, shortest"
            " prefill with ageing, earliest deadline)."
        ),
    ] = FCFS
    max_active_requests: Annotated[int | None, whole_option(help="Requests that run at a time.")] = None
    max_batch_size: Annotated[int, whole_option(help="Requests in one step of the engine.")] = 32
    max_num_batched_tokens: Annotated[
        int | None, whole_option(help="Token budget of a step. Default: chosen for the device.")
    ] = None
    kv_cache_tokens: Annotated[
        int | None, whole_option(help="Tokens that the KV cache holds. Default: chosen for the device.")
    ] = None
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Keep what prompts begin with in the KV cache, for others that begin alike. Every cell starts cold.",
        ),
    ] = True
    paged_attn: Annotated[
        bool | None,
        typer.Option(
            "--paged-attn/--no-paged-attn",
            help="Read the KV cache block by block, so that requests share what is alike, instead of in one piece a"
            " request. Default: on a GPU.",
        ),
    ] = None
    cuda_graph: Annotated[
        bool | None,
        typer.Option(
            "--cuda-graph/--no-cuda-graph",
            help="Capture decodes of a few batch sizes once, and replay them. Default: on a GPU, where the KV cache is"
            " read block by block.",
        ),
    ] = None
    nvtx: Annotated[
        bool,
        typer.Option(
            "--nvtx",
            help="Mark steps and the stages of requests for Nsight Systems. Needs a torch with CUDA.",
        ),
    ] = False
    tokenize_workers: Annotated[
        int, whole_option(help="Threads that tokenise; with 0 the sender does it within add_request.")
    ] = 1
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let the end-of-sequence token end a request.")
    ] = False

    warmup_runs: Annotated[
        int | None, whole_option(help="Bursts that are run first and not recorded. Default 1; of a server 0.")
    ] = None
    repeats: Annotated[
        int, whole_option("--repeats", "--repeat-runs", help="Times that each cell is measured.")
    ] = 1
    seed: Annotated[int, whole_option(help="Prompts and the order of cells follow from it.")] = 0
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ttft:250",
            help="Goal of a single request in ms (ttft, tpot, e2el ...); several must all be met. The table then has"
            " the share of the offered requests that met them.",
        ),
    ] = None
    max_error_share: Annotated[
        float, decimal_option(help="Share of requests that may fail before a run counts as invalid.")
    ] = 0.01
    shards: Annotated[
        int, whole_option(help="Processes that share the cells of a simulation (--target sim only).")
    ] = 1
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run the cells on a Ray cluster: local, HOST:PORT or ray://HOST:PORT. A measured cell has a GPU, or on"
            " CPUs a node, to itself.",
        ),
    ] = None
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
    """What `sweep` takes beyond that. The fields of SWEPT take comma lists."""

    file: Annotated[
        Path | None,
        typer.Argument(metavar="[EXPERIMENT.toml]", help="Keys are flag names; flags override them."),
    ] = None
    repeats: Annotated[
        int, whole_option("--repeats", "--repeat-runs", help="Times that each cell is measured.")
    ] = 8
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="p99_ttft:250", help="Goal in ms, for the recommended limit; several must all be met."
        ),
    ] = None
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with an interrupted run.")] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the cells and end.")] = False


SWEPT: Final = (
    "max_inflight",
    "admission",
    "burst_size",
    "prompt_len",
    "max_new_tokens",
    "request_rate",
    "load",
)
"""Fields that take comma lists."""

NOT_CONFIGURATION: Final = frozenset(
    {
        "file",
        "resume",
        "dry_run",
        "json",
        "quiet",
        "shards",
        "ray",
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


def is_url(target: str) -> bool:
    """The target is a server. Of others `target` is one of TARGETS."""
    return target.lower().startswith(URL_SCHEMES)


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
        values[field] = field_value(name, field, value, kinds[field])
    return values


def field_value(name: str, field: str, value: object, kind: object) -> object:
    """A value as a field holds it that came as TOML or Python has it. `kind` is the field's type.

    Raises InputError(name, value) for one of another kind.
    """
    kinds = getattr(kind, "__args__", (kind,))
    if field in SWEPT:
        items = value if isinstance(value, list) else [value]
        plain = str | int | float if field in ("request_rate", "load") else str | int
        if all(isinstance(item, plain) and not isinstance(item, bool) for item in items):
            return ",".join(map(str, items))
    elif list[str] in kinds:
        items = value if isinstance(value, list) else [value]
        if all(isinstance(item, str) for item in items):
            return items
    elif Path in kinds and isinstance(value, str | Path):
        return Path(value)
    elif float in kinds and type(value) in (int, float):
        return float(value)  # type: ignore[arg-type]
    elif type(value) in kinds:
        return value
    raise InputError(name, value, f"is not what {flag(field)} takes")
