"""Whether the requests of an experiment could be served at all: each must fit the context and the KV cache."""

from __future__ import annotations

import numpy as np

from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.lengths import MOST_CUT, asked_lengths, cut_to_fit, vary
from roseinfer.bench.options import flag
from roseinfer.bench.replay import Replay
from roseinfer.bench.seeds import BLOCK_ROWS
from roseinfer.bench.traces import Trace
from roseinfer.errors import InputError
from roseinfer.executor import KV_BLOCK_TOKENS
from roseinfer.kv_cache import blocks_for


def most_tokens(experiment: Experiment, context_tokens: int) -> int:
    """What one request may span, prompt and output together."""
    return min(context_tokens, _kv_tokens(experiment) or context_tokens)


def check_fits(
    experiment: Experiment,
    context_tokens: int,
    *,
    given_tokens: int | None,
    special_tokens: int,
    replay: Replay | None,
) -> None:
    """Raises InputError for a cell whose requests could never be served, or whose lengths would be cut too often.

    `given_tokens` is the length of --prompt, None where it is not known yet; `special_tokens` what the tokenizer
    adds to every prompt. Prompts of a replay whose length is not known yet count for nothing.
    """
    least = max(experiment.load.prefix_tokens, special_tokens) + 1
    if replay is not None:
        _check_replay(experiment, replay, context_tokens, special_tokens)
        return
    if experiment.options.prompt is not None and given_tokens is None:
        return
    for cell in {cell.shape._replace(burst_size=None, request_rate=None) for cell in experiment.cells}:
        is_traced = cell.output_len is None or (cell.prompt_len is None and given_tokens is None)
        if experiment.trace is not None and is_traced:
            _check_trace(experiment, experiment.trace, cell, context_tokens, given_tokens or 0, least)
        if not is_traced:
            _check_typical(experiment, cell, context_tokens, given_tokens)
        if vary(experiment.load):
            _check_drawn(experiment, cell, context_tokens, given_tokens or 0, least)


def _check_typical(experiment: Experiment, cell: Cell, context_tokens: int, given_tokens: int | None) -> None:
    prompt_tokens = given_tokens if cell.prompt_len is None else cell.prompt_len
    assert prompt_tokens is not None
    assert cell.output_len is not None
    if prompt_tokens + cell.output_len > context_tokens:
        name, value = "--prompt-len", str(prompt_tokens)
        if cell.prompt_len is None:
            name, value = "--prompt", f"{prompt_tokens} tokens"
        why = f"with --max-new-tokens {cell.output_len} exceeds the context of {context_tokens} tokens"
        raise InputError(name, value, why)
    if prompt_tokens + cell.output_len > most_tokens(experiment, context_tokens):
        why = f"cannot hold one request of {prompt_tokens} prompt and {cell.output_len} new tokens"
        raise InputError("--kv-cache-tokens", experiment.options.kv_cache_tokens, why)


def _check_trace(
    experiment: Experiment, trace: Trace, cell: Cell, context_tokens: int, given_tokens: int, least: int
) -> None:
    """Request by request, since what a trace says is not cut: a length that is drawn has to leave it its place."""
    load = experiment.load
    prompts, outputs = asked_lengths(experiment, cell, _played(experiment, trace), 0, given_tokens)
    if load.prompt_lengths.kind != "fixed":
        prompts = np.full_like(prompts, least)
    if load.output_lengths.kind != "fixed":
        outputs = np.ones_like(outputs)
    needs = prompts + outputs
    if (too_long := needs > most_tokens(experiment, context_tokens)).any():
        row = int(np.argmax(too_long))
        why = (
            f"line {trace.lines[row]}: {prompts[row]} prompt and {outputs[row]} new tokens exceed"
            f" {_bound(experiment, context_tokens)} (the longest needs {needs.max()}): use --length-scale"
        )
        raise InputError("--trace", str(trace.path), why)
    if given_tokens == 0 and (too_short := prompts < least).any():
        row = int(np.argmax(too_short))
        why = f"line {trace.lines[row]}: a prompt of {prompts[row]} tokens has none of its own, {least - 1} are shared"
        raise InputError("--trace", str(trace.path), why)


def _check_drawn(
    experiment: Experiment, cell: Cell, context_tokens: int, given_tokens: int, least: int
) -> None:
    """By a sample of the very distribution, so that this sees what drawing would do."""
    load, trace = experiment.load, experiment.trace
    n = BLOCK_ROWS if trace is None else _played(experiment, trace)
    prompts, outputs = asked_lengths(experiment, cell, n, 0, given_tokens)
    is_fixed = load.prompt_lengths.kind == "fixed"
    most = most_tokens(experiment, context_tokens)
    cut_prompts, cut_outputs = cut_to_fit(
        prompts, outputs, least_prompt_tokens=prompts if is_fixed else least, most_tokens=most
    )
    share = np.mean((cut_prompts != prompts) | (cut_outputs != outputs))
    if share > MOST_CUT or (cut_prompts + cut_outputs).max() > most:
        field = "output_len_dist" if is_fixed else "prompt_len_dist"
        why = (
            f"{share:.1%} of the requests would have to be cut to {_bound(experiment, context_tokens)}"
            f"{'' if is_fixed else f' or lengthened to {least} prompt tokens'}; at most {MOST_CUT:.0%} may"
        )
        raise InputError(flag(field), getattr(experiment.options, field), why)


def _played(experiment: Experiment, trace: Trace) -> int:
    """How many requests of a trace are played, at most."""
    load = experiment.load
    n = load.num_requests or len(trace)
    if load.duration_s is None:
        return n
    # A request may be played up to a tick earlier than its stamp says.
    last_s = load.duration_s / load.time_scale + (trace.tick_s or 0)
    return min(n, int(np.searchsorted(trace.arrived_s, last_s)))


def _check_replay(experiment: Experiment, replay: Replay, context_tokens: int, special_tokens: int) -> None:
    most = most_tokens(experiment, context_tokens)
    for table in replay.tables.values():
        needs = table.prompt_tokens + table.output_tokens
        if needs.max() > most:
            row = int(np.argmax(needs))
            why = (
                f"a request of {table.prompt_tokens[row]} prompt and {table.output_tokens[row]} new tokens exceeds"
                f" {_bound(experiment, context_tokens)}"
            )
            raise InputError("--workload", str(replay.path), why)
        shared = max(table.prefix_tokens, special_tokens)
        if table.texts is None and table.prompt_tokens.min() <= shared:
            why = f"a prompt of {table.prompt_tokens.min()} tokens has none of its own, {shared} are shared"
            raise InputError("--workload", str(replay.path), why)


def _bound(experiment: Experiment, context_tokens: int) -> str:
    if most_tokens(experiment, context_tokens) == context_tokens:
        return f"the context of {context_tokens} tokens"
    return f"what --kv-cache-tokens {experiment.options.kv_cache_tokens} holds"


def _kv_tokens(experiment: Experiment) -> int | None:
    tokens = experiment.options.kv_cache_tokens
    return None if tokens is None else KV_BLOCK_TOKENS * blocks_for(tokens)
