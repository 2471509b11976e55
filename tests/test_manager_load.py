"""SchedulerManager: what a long prompt, or many tokens, must not do to the others."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise

import pytest

from roseinfer.executor import StepPlan
from roseinfer.manager import SchedulerManager
from roseinfer.request import SamplingParams
from roseinfer.stream import RequestStream
from tests.manager_driver import by_hand, finish, turn
from tests.scripted import EOS, ScriptedEngine, ScriptedTokenizer


@pytest.mark.parametrize("prompt_tokens", [100, 1_000, 4_000])
def test_a_cold_long_prompt_costs_running_streams_a_step_and_a_chunk_at_most(
    prompt_tokens: int,
) -> None:  # case B26
    engine = ScriptedEngine()
    manager = by_hand(engine, max_num_batched_tokens=64)
    clock = manager._clock

    def compute(plan: StepPlan) -> None:
        clock.now += sum(span.n_tokens for span in plan.spans)  # type: ignore[attr-defined]

    engine.compute = compute
    streams = [manager.submit([1], SamplingParams(80)) for _ in range(7)]
    turn(manager)
    manager.submit([1] * prompt_tokens, SamplingParams(1))
    finish(manager)
    for stream in streams:
        times_s = [token.engine_time_s for token in stream.tokens()]
        assert max(later - earlier for earlier, later in pairwise(times_s)) <= 64


def test_while_a_long_prompt_is_tokenised_an_event_loop_submits_and_streams_on() -> None:  # case B28
    began, go_on = threading.Event(), threading.Event()

    class Slow(ScriptedTokenizer):
        def encode(self, text: str) -> list[int]:
            began.set()
            go_on.wait()
            return super().encode(text)

    engine = ScriptedEngine()
    engine.max_model_len = 1 << 18
    engine.make_tokenizer = Slow

    async def main(manager: SchedulerManager) -> list[str]:
        running = manager.submit([1], SamplingParams(200))
        pieces = running.text_async()
        first = await anext(pieces)
        long = manager.submit("x" * 100_000, SamplingParams(2))
        began.wait()  # and from here on it does not end by itself
        try:
            rest = "".join([piece async for piece in pieces])
            short = "".join([piece async for piece in manager.submit([1], SamplingParams(3)).text_async()])
            assert long.timings.tokenized_s is None
        finally:
            go_on.set()  # else a failure would hang in `close`
        return [first + rest, short, "".join([piece async for piece in long.text_async()])]

    with SchedulerManager(
        engine, tokenize_workers=1, max_num_batched_tokens=1 << 17, kv_cache_tokens=1 << 18
    ) as manager:
        alone, short, long = asyncio.run(main(manager))
    assert (len(alone), short, long) == (200, "abc", "ab")


@pytest.mark.parametrize("workers", [0, 1])
def test_tokens_are_counted_by_their_ids_and_no_text_is_tokenised_again(workers: int) -> None:  # case E9
    """The text is no guide to the number: some ids have none."""

    encoded: list[str] = []

    class Noting(ScriptedTokenizer):
        def encode(self, text: str) -> list[int]:
            encoded.append(text)
            return super().encode(text)

    engine = ScriptedEngine(script=f"a{chr(EOS)}{chr(EOS)}b")
    engine.make_tokenizer = Noting

    def read(stream: RequestStream) -> tuple[str, int, int | None]:
        return "".join(stream.text()), len(stream._request.output_ids), stream.prompt_tokens

    with SchedulerManager(engine, tokenize_workers=workers) as manager:
        params = SamplingParams(8, ignore_eos=True)
        assert read(manager.submit("Hello", params)) == ("abab", 8, 5)
        assert read(manager.submit([1, 2], params)) == ("abab", 8, 2)
        assert len(list(manager.submit("Hello", params).tokens())) == 8
    assert encoded == ["Hello", "Hello"]
