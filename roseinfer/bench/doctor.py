"""`roseinfer-bench doctor`: what would be used on this machine and why, and how near its ceilings the engine comes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from roseinfer.bench.environment import describe_environment
from roseinfer.executor import StepRecord
from roseinfer.manager import SchedulerManager
from roseinfer.request import SamplingParams

if TYPE_CHECKING:
    from roseinfer.engine import InferenceEngine

Say = Callable[[str], None]

PROMPT_TOKENS: Final = 259
DECODE_BATCHES: Final = (1, 8)
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
        f" {used.num_threads} threads, {used.implementation} {used.architecture}, linear layers {used.linear_kernels}"
    )
    on, as_dtype = torch.device(used.device), getattr(torch, used.dtype)
    flops_per_s, bytes_per_s = linear_flops_per_s(on, as_dtype), read_bytes_per_s(on)
    say(f"ceilings: linear layers {flops_per_s / 1e9:.0f} GFLOP/s, reading {bytes_per_s / 1e9:.1f} GB/s")
    same, compared = _agreement(engine, theirs)
    say(f"native against transformers, greedy: {same} of {compared} tokens are the same")
    prompt_tokens = min(PROMPT_TOKENS, used.max_model_len - 1)
    prefill_s = _prefill_s(engine, prompt_tokens)
    prefill_share = 2 * used.matrix_parameters * prompt_tokens / prefill_s / flops_per_s
    say(
        f"prefill of {prompt_tokens} tokens: {1e3 * prefill_s:.1f} ms, {prompt_tokens / prefill_s:.0f} tokens/s,"
        f" {100 * prefill_share:.0f} % of the linear ceiling"
    )
    context = min(DECODE_CONTEXT, used.max_model_len - DECODE_STEPS)
    decodes = {batch: _decode_s(engine, batch, context) for batch in DECODE_BATCHES}
    floor_s = (used.weight_bytes + context * used.kv_bytes_per_token) / bytes_per_s
    for batch, step_s in decodes.items():
        over = f", {step_s / floor_s:.2f} x the time to read weights and KV" if batch == 1 else ""
        say(f"decode at batch {batch}, context {context}: {1e3 * step_s:.1f} ms a step{over}")
    return {
        "environment": environment,
        "model": {field: getattr(used, field) for field in used.__dataclass_fields__},
        "linear_flops_per_s": flops_per_s,
        "read_bytes_per_s": bytes_per_s,
        "tokens_compared": compared,
        "tokens_equal": same,
        "prefill_tokens": prompt_tokens,
        "prefill_s": prefill_s,
        "prefill_share_of_ceiling": prefill_share,
        "decode_step_s": {str(batch): step_s for batch, step_s in decodes.items()},
        "decode_over_floor": decodes[1] / floor_s,
    }


def _why(asked: str, used: str) -> str:
    if asked != "auto":
        return " (asked for)"
    return " (fast here)" if used == "bfloat16" else " (bfloat16 is not fast here)"


def _prompt(engine: InferenceEngine, length: int) -> list[int]:
    return [(7 * i * i + 13 * i + length) % engine.vocab_size for i in range(length)]


def _steps(
    engine: InferenceEngine, prompts: Sequence[list[int]], max_new_tokens: int
) -> tuple[list[StepRecord], list[list[int]]]:
    """The steps that answer `prompts`, and the answers."""
    steps: list[StepRecord] = []
    with SchedulerManager(
        engine, max_batch_size=len(prompts), on_step=steps.append, prefix_cache=False
    ) as manager:
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        streams = [manager.submit(prompt, params) for prompt in prompts]
        answers = [[token.token_id for token in stream.tokens()] for stream in streams]
    return steps, answers


def _seconds(step: StepRecord) -> float:
    return step.result.exec_end_s - step.result.exec_start_s


def _agreement(engine: InferenceEngine, theirs: InferenceEngine) -> tuple[int, int]:
    """How many greedy tokens are the same, of how many."""
    longest = engine.max_model_len - COMPARED_TOKENS
    prompts = [_prompt(engine, min(length, longest)) for length in COMPARED_PROMPTS]
    ours, reference = (_steps(one, prompts, COMPARED_TOKENS)[1] for one in (engine, theirs))
    pairs = [pair for a, b in zip(ours, reference, strict=True) for pair in zip(a, b, strict=True)]
    return sum(a == b for a, b in pairs), len(pairs)


def _prefill_s(engine: InferenceEngine, prompt_tokens: int) -> float:
    times = []
    for _ in range(PREFILLS + 1):
        steps, _ = _steps(engine, [_prompt(engine, prompt_tokens)], 1)
        times.append(sum(map(_seconds, steps)))
    return statistics.median(times[1:])


def _decode_s(engine: InferenceEngine, batch: int, context: int) -> float:
    """A step of `batch` requests whose contexts are around `context` tokens long."""
    prompts = [_prompt(engine, max(1, context - DECODE_STEPS))] * batch
    steps, _ = _steps(engine, prompts, 2 * DECODE_STEPS)
    full = [step for step in steps if [span.n_tokens for span in step.plan.spans] == [1] * batch]
    return statistics.median(map(_seconds, full))
