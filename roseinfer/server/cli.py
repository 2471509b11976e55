"""`roseinfer-serve`: the command line. Torch is imported once the flags are checked."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from typer.exceptions import TyperException

from roseinfer.admission_spec import AdmissionSpec, parse_admission
from roseinfer.bench.load_options import decimal_option, whole_option
from roseinfer.bench.options import DEVICES, DTYPE_HELP, DTYPES
from roseinfer.errors import InputError, RoseinferError, check_whole
from roseinfer.model_source import check_model_source
from roseinfer.nvtx import ranges
from roseinfer.openmp import spin_briefly
from roseinfer.policies import check_policy
from roseinfer.server.app import create_app
from roseinfer.server.bodies import BodyLimits
from roseinfer.server.process import listen, serve
from roseinfer.sim.cost_model import CostModel
from roseinfer.waiting import FCFS, SPF

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
LIMITS: Final = BodyLimits()
LONGEST_TIMEOUT_S: Final = 86_400
LAST_PORT: Final = 65_535

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def command(
    model: Annotated[
        str,
        typer.Option(
            "--model", "--hf-model-id", help="builtin:gpt2, a Hugging Face folder, a .gguf file or a hub id."
        ),
    ] = "builtin:gpt2",
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: as --model says.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "auto",
    max_model_len: Annotated[
        int | None, whole_option(help="Tokens that one request may span. Default: the model's context.")
    ] = None,
    num_threads: Annotated[int | None, whole_option(help="Threads of the engine's arithmetic.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, whole_option(help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="ROSEINFER_API_KEY",
            show_envvar=True,
            help="Asked of every request but /health and /ready. Others see command lines: prefer the environment.",
        ),
    ] = None,
    max_inflight_requests: Annotated[
        int,
        whole_option(
            "--max-inflight-requests",
            "--max-inflight",
            help="Requests in flight in this process (waiting, running, not yet sent) over which further ones are"
            " answered 429; 0 means no limit. Each process counts its own: four of them let four times as many in.",
        ),
    ] = 0,
    admission: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="The same in full, inflight:N, or another policy: tokens:N (a budget of prompt + max_tokens over all"
            " in flight), slo:ttft=250ms, queue-timeout:2s, codel:target=50ms:interval=500ms, aimd, gradient, priority"
            " (a body's priority, 0 the highest); several joined with +; none is no limit.",
        ),
    ] = None,
    scheduling: Annotated[
        str,
        typer.Option(
            help=f"Order of those who wait: {FCFS} (submission) or {SPF} (shortest prefill first, with ageing)."
        ),
    ] = FCFS,
    cost_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON of the seconds that a step takes here, as roseinfer-bench calibrate writes it, for policies that"
            " weigh what a request will cost (slo, aimd, gradient).",
        ),
    ] = None,
    max_active_requests: Annotated[int | None, whole_option(help="Requests that run at a time.")] = None,
    max_batch_size: Annotated[int, whole_option(help="Requests in one step of the engine.")] = 32,
    max_num_batched_tokens: Annotated[
        int | None, whole_option(help="Token budget of a step. Default: chosen for the device.")
    ] = None,
    kv_cache_tokens: Annotated[
        int | None, whole_option(help="Tokens that the KV cache holds. Default: chosen for the device.")
    ] = None,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Keep what prompts begin with in the KV cache, for others that begin alike.",
        ),
    ] = True,
    paged_attn: Annotated[
        bool | None,
        typer.Option(
            "--paged-attn/--no-paged-attn",
            help="Read the KV cache block by block, so that requests share what is alike. Default: on a GPU.",
        ),
    ] = None,
    cuda_graph: Annotated[
        bool | None,
        typer.Option(
            "--cuda-graph/--no-cuda-graph",
            help="Capture decodes of a few batch sizes once, and replay them. Default: on a GPU, where the KV cache is"
            " read block by block.",
        ),
    ] = None,
    nvtx: Annotated[
        bool,
        typer.Option(
            "--nvtx",
            help="Mark steps and the stages of requests for Nsight Systems. Needs a torch with CUDA.",
        ),
    ] = False,
    tokenize_workers: Annotated[int, whole_option(help="Threads that tokenise.")] = 1,
    max_body_bytes: Annotated[int, whole_option(help="Larger bodies are answered 413.")] = LIMITS.body_bytes,
    max_prompt_chars: Annotated[
        int, whole_option(help="Longer texts are answered 400 before they are tokenised.")
    ] = LIMITS.prompt_chars,
    max_output_tokens: Annotated[
        int | None, whole_option(help="Most that max_tokens may ask for. Default: what the context holds.")
    ] = None,
    write_timeout: Annotated[
        float, decimal_option(help="Seconds that a client may take nothing of its stream.")
    ] = 30.0,
    drain_timeout: Annotated[
        float, decimal_option(help="Seconds that accepted requests have to finish after SIGTERM.")
    ] = 30.0,
    log_requests: Annotated[
        bool,
        typer.Option(
            "--log-requests", help="Write prompts to the log. Nothing of them is written otherwise."
        ),
    ] = False,
) -> None:
    """Serve a model behind an OpenAI-compatible API that refuses over its limit."""
    for name, whole, least in (
        ("--max-inflight-requests", max_inflight_requests, 0),
        ("--port", port, 0),
        ("--max-batch-size", max_batch_size, 1),
        ("--tokenize-workers", tokenize_workers, 1),
        ("--max-body-bytes", max_body_bytes, 1),
        ("--max-prompt-chars", max_prompt_chars, 1),
        ("--max-output-tokens", max_output_tokens, 1),
    ):
        if whole is not None:
            check_whole(name, whole, least)
    limit = AdmissionSpec(max_inflight_requests or None)
    if admission is not None:
        if max_inflight_requests:
            why = (
                f"contradicts --max-inflight-requests {max_inflight_requests}, which is short for inflight:N"
            )
            raise InputError("--admission", admission, why)
        limit = parse_admission(admission, "--admission")
    if scheduling not in (FCFS, SPF):
        raise InputError("--scheduling", scheduling, f"must be {FCFS} or {SPF}")
    check_policy(limit, scheduling, has_cost_model=cost_model is not None, name="--admission")
    if cost_model is not None and not limit.needs_cost_model:
        raise InputError("--cost-model", str(cost_model), "needs a policy of --admission that weighs costs")
    costs = None if cost_model is None else CostModel.read(cost_model)
    if port > LAST_PORT:
        raise InputError("--port", port, f"must be at most {LAST_PORT}")
    for name, seconds in (("--write-timeout", write_timeout), ("--drain-timeout", drain_timeout)):
        if not 0 < seconds <= LONGEST_TIMEOUT_S:
            raise InputError(name, seconds, f"must be seconds, over 0 and at most {LONGEST_TIMEOUT_S}")
    for name, word, words in (("--device", device, DEVICES), ("--dtype", dtype, DTYPES)):
        if word not in words:
            raise InputError(name, word, f"must be {', '.join(words)}")
    check_model_source(model)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("roseinfer").setLevel(logging.INFO)
    with listen(host, port, write_timeout) as sock:
        spin_briefly()
        from roseinfer.engine import InferenceEngine

        ranges(nvtx)  # before the model is loaded: that takes its time
        engine = InferenceEngine.from_pretrained(
            model,
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            num_threads=num_threads,
            paged_attn=paged_attn,
            cuda_graph=cuda_graph,
        )
        application = create_app(
            engine,
            admission=str(limit),
            scheduling=scheduling,
            cost_model=costs,
            model_name=served_model_name,
            api_key=api_key,
            limits=LIMITS._replace(
                body_bytes=max_body_bytes,
                prompt_chars=max_prompt_chars,
                output_tokens=max_output_tokens or LIMITS.output_tokens,
            ),
            write_timeout_s=write_timeout,
            log_requests=log_requests,
            max_batch_size=max_batch_size,
            max_active_requests=max_active_requests,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_tokens=kv_cache_tokens,
            tokenize_workers=tokenize_workers,
            prefix_cache=prefix_cache,
            nvtx=nvtx,
        )
        said = "no limit on requests in flight"
        if limit.inflight is not None and limit.is_count_alone:
            said = (
                f"at most {limit.inflight} requests in flight in this process (each process counts its own)"
            )
        elif limit != AdmissionSpec():
            said = f"admission {limit} in this process (each process counts its own)"
        for note in () if costs is None else costs.told_of_fit(engine.description.dtype):
            print(f"roseinfer-serve: {note}", file=sys.stderr, flush=True)
        address, bound_port = sock.getsockname()[:2]
        at = f"[{address}]" if ":" in address else address
        print(f"roseinfer-serve: {model} at http://{at}:{bound_port}, {said}", file=sys.stderr, flush=True)
        serve(application, sock, drain_timeout_s=drain_timeout)


def main() -> None:
    """Entry point: one clear line for what went wrong, and the exit code that says what kind it is."""
    try:
        code = app(prog_name="roseinfer-serve", standalone_mode=False)
    except TyperException as error:
        code = _say(error.format_message(), EXIT_BAD_INPUT)
    except InputError as error:
        name = error.name if error.name.startswith("--") else f"--{error.name.replace('_', '-')}"
        value = "" if error.value is None else f" {error.value!r}"
        code = _say(f"{name}{value}: {error.why}", EXIT_BAD_INPUT)
    except (RoseinferError, OSError) as error:
        code = _say(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _say(message: str, code: int) -> int:
    print(f"roseinfer-serve: {' '.join(message.split())}", file=sys.stderr)
    return code
