"""`roseinfer-bench doctor`: what would be used on this machine and why, and how near its ceilings the engine comes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from roseinfer.bench.doctor_burst import seed_experiment
from roseinfer.bench.doctor_kernels import compare_kernels
from roseinfer.bench.doctor_paths import Agreement, compare_paths
from roseinfer.bench.environment import describe_environment
from roseinfer.executor import StepRecord
from roseinfer.manager import SchedulerManager
from roseinfer.request import SamplingParams

if TYPE_CHECKING:
    from roseinfer.engine import InferenceEngine
    from roseinfer.engine.varlen import Flash

Say = Callable[[str], None]

PROMPT_TOKENS: Final = 259
PREFILL_PROMPTS: Final = {"cpu": 1, "cuda": 63}
"""In one step: on a GPU as many as 16384 tokens hold, since a single one is no work for it."""

DECODE_BATCHES: Final = {"cpu": (1, 8), "cuda": (1, 8, 64, 256)}
DECODE_CONTEXT: Final = 64
DECODE_STEPS: Final = 12
PREFILLS: Final = 5
COMPARED_PROMPTS: Final = (1, 17, 64, 130)
COMPARED_TOKENS: Final = 8


def examine(model: str, *, device: str, dtype: str, num_threads: int | None, say: Say) -> dict[str, Any]:
    """Says what it finds, a line each, and returns all of it as JSON values.

    Raises InputError or ModelError where the model or the device cannot be had.
    """
    import torch

    from roseinfer.engine import InferenceEngine
    from roseinfer.engine.ceilings import linear_flops_per_s, read_bytes_per_s

    engine, theirs = (
        InferenceEngine.from_pretrained(
            model, device=device, dtype=dtype, num_threads=num_threads, native=native
        )
        for native in (True, False)
    )
    environment = describe_environment()
    say(
        f"machine: {environment['cpu_model']}, {environment['cores_usable']} cores, {environment['memory_gib']} GiB"
    )
    versions: dict[str, str] = environment["versions"]  # type: ignore[assignment]
    say("versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    used = engine.description
    say(
        f"would use: {used.device} ({used.device_name}), {used.dtype}{_why(dtype, used.dtype)},"
        f" {used.num_threads} threads, {used.implementation} {used.architecture}, linear layers {used.linear_kernels},"
        f" {used.kv_layout} KV, attention {used.attention}, {'CUDA graphs' if used.cuda_graph else 'no CUDA graphs'}"
    )
    on, as_dtype = torch.device(used.device), getattr(torch, used.dtype)
    flops_per_s, bytes_per_s = linear_flops_per_s(on, as_dtype), read_bytes_per_s(on)
    say(f"ceilings: linear layers {flops_per_s / 1e9:.0f} GFLOP/s, reading {bytes_per_s / 1e9:.1f} GB/s")
    paths = compare_paths(on)
    for name, pair in paths.items():
        if pair is not None:
            say(f"{name}, tiny models in float32: {_same(pair)}")
    if used.attention in ("FA2", "FA3"):
        kernels = compare_kernels(cast("Flash", used.attention), on, as_dtype)
        paths[f"{used.attention} against SDPA"] = kernels
        say(
            f"attention {used.attention} against SDPA in float32: {kernels.same} of {kernels.compared} queries agree"
        )
    agreement = _agreement(engine, theirs)
    say(f"native against transformers, greedy: {_same(agreement)}")
    prompt_tokens = min(PROMPT_TOKENS, used.max_model_len - 1)
    prompts = PREFILL_PROMPTS[on.type]
    prefill_tokens = prompts * prompt_tokens
    prefill_s = _prefill_s(engine, prompts, prompt_tokens)
    prefill_share = 2 * used.matrix_parameters * prefill_tokens / prefill_s / flops_per_s
    say(
        f"prefill of {prefill_tokens} tokens: {1e3 * prefill_s:.1f} ms, {prefill_tokens / prefill_s:.0f} tokens/s,"
        f" {100 * prefill_share:.0f} % of the linear ceiling"
    )
    context = min(DECODE_CONTEXT, used.max_model_len - DECODE_STEPS)
    decodes = {batch: _decode_s(engine, batch, context) for batch in DECODE_BATCHES[on.type]}
    for batch, step_s in decodes.items():
        floor_s = (used.weight_bytes + batch * context * used.kv_bytes_per_token) / bytes_per_s
        say(
            f"decode at batch {batch}, context {context}: {1e3 * step_s:.2f} ms a step,"
            f" {step_s / floor_s:.2f} x the time to read weights and KV"
        )
    floor_s = (used.weight_bytes + context * used.kv_bytes_per_token) / bytes_per_s
    bursts = seed_experiment(engine) if on.type == "cuda" and used.max_model_len > PROMPT_TOKENS else None
    for burst in bursts or []:
        said = "no limit" if burst["max_inflight"] is None else f"limit {burst['max_inflight']}"
        say(
            f"burst of {burst['offered']} x {PROMPT_TOKENS} tokens, {said}: p99 TTFT {burst['p99_ttft_ms']:.1f} ms,"
            f" p50 {burst['p50_ttft_ms']:.1f} ms, {burst['rejected']} refused"
        )
    return {
        "environment": environment,
        "model": {field: getattr(used, field) for field in used.__dataclass_fields__},
        "linear_flops_per_s": flops_per_s,
        "read_bytes_per_s": bytes_per_s,
        "tokens_compared": agreement.compared,
        "tokens_equal": agreement.same,
        "paths": {name: None if pair is None else pair._asdict() for name, pair in paths.items()},
        "prefill_tokens": prefill_tokens,
        "prefill_s": prefill_s,
        "prefill_share_of_ceiling": prefill_share,
        "decode_step_s": {str(batch): step_s for batch, step_s in decodes.items()},
        "decode_over_floor": decodes[1] / floor_s,
        "seed_experiment": bursts,
    }


def paths_differ(found: dict[str, Any]) -> list[str]:
    """The pairs of paths that `examine` found to give other tokens."""
    pairs: dict[str, dict[str, int] | None] = found["paths"]
    return [name for name, pair in pairs.items() if pair is not None and pair["same"] < pair["compared"]]


def _same(agreement: Agreement) -> str:
    return f"{agreement.same} of {agreement.compared} tokens are the same"


def _why(asked: str, used: str) -> str:
    if asked != "auto":
        return " (asked for)"
    if used == "float16":
        return " weights, computed in float32 (bfloat16 is not fast here)"
    return " (fast here)" if used == "bfloat16" else " (nothing shorter is fast here)"


def _prompt(engine: InferenceEngine, length: int) -> list[int]:
    return [(7 * i * i + 13 * i + length) % engine.vocab_size for i in range(length)]


def _steps(
    engine: InferenceEngine,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    max_num_batched_tokens: int | None = None,
) -> tuple[list[StepRecord], list[list[int]]]:
    """The steps that answer `prompts`, and the answers."""
    steps: list[StepRecord] = []
    manager = SchedulerManager(
        engine,
        max_batch_size=len(prompts),
        max_num_batched_tokens=max_num_batched_tokens,
        on_step=steps.append,
        prefix_cache=False,
        start=False,  # all of them are there before the first step
    )
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    streams = [manager.submit(prompt, params) for prompt in prompts]
    while manager.step():
        pass
    answers = [[token.token_id for token in stream.tokens()] for stream in streams]
    manager.close()
    return steps, answers


def _seconds(step: StepRecord) -> float:
    return step.result.exec_end_s - step.result.exec_start_s


def _agreement(engine: InferenceEngine, theirs: InferenceEngine) -> Agreement:
    """Of greedy tokens."""
    longest = engine.max_model_len - COMPARED_TOKENS
    prompts = [_prompt(engine, min(length, longest)) for length in COMPARED_PROMPTS]
    ours, reference = (_steps(one, prompts, COMPARED_TOKENS)[1] for one in (engine, theirs))
    pairs = [pair for a, b in zip(ours, reference, strict=True) for pair in zip(a, b, strict=True)]
    return Agreement(sum(a == b for a, b in pairs), len(pairs))


def _prefill_s(engine: InferenceEngine, prompts: int, prompt_tokens: int) -> float:
    """Of a step that computes so many prompts of so many tokens."""
    times = []
    for _ in range(PREFILLS + 1):
        batch = [_prompt(engine, prompt_tokens)] * prompts
        steps, _ = _steps(engine, batch, 1, max(prompts * prompt_tokens, prompts + 1))
        times.append(sum(map(_seconds, steps)))
    return statistics.median(times[1:])


def _decode_s(engine: InferenceEngine, batch: int, context: int) -> float:
    """A step of `batch` requests whose contexts are around `context` tokens long."""
    prompts = [_prompt(engine, max(1, context - DECODE_STEPS))] * batch
    steps, _ = _steps(engine, prompts, 2 * DECODE_STEPS)
    full = [step for step in steps if [span.n_tokens for span in step.plan.spans] == [1] * batch]
    return statistics.median(map(_seconds, full))
