"""Cache cold or warm, either layout, either loop: greedy tokens are those of transformers' own generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.engine.attention import copy_blocks
from roseinfer.engine.engine import InferenceEngine
from roseinfer.pipeline import Pipeline
from roseinfer.request import Request
from tests.engine.test_greedy import LAYOUTS, NATIVE, engine_of, prompt_of
from tests.engine.tiny_models import FAMILIES, generated
from tests.scripted import CoreDriver

NEW_TOKENS = 4
PROMPT = prompt_of(64)
NUM_BLOCKS = 24
LOOPS = {"plain": 0, "overlapped": 1}
"""How many steps are left running while the next is planned."""


class Server:
    """A core and an executor of an engine."""

    def __init__(
        self,
        engine: InferenceEngine,
        *,
        budget: int,
        batch: int = 1,
        prefix_cache: bool = True,
        loop: str = "plain",
    ) -> None:
        self.driver = CoreDriver(
            batch=batch,
            budget=budget,
            kv_tokens=NUM_BLOCKS * 16,
            prefix_cache=prefix_cache,
            shares_blocks=engine.paged_attn,
        )
        executor = engine.make_executor(
            num_kv_blocks=NUM_BLOCKS, max_batch_size=4, clock=lambda: self.driver.now
        )
        self.pipeline = Pipeline(executor, LOOPS[loop])

    def add(self, prompt: tuple[int, ...], **sampling: Any) -> Request:
        return self.driver.add(prompt, NEW_TOKENS, ignore_eos=True, **sampling)

    def step(self) -> bool:
        driver = self.driver
        plan = driver.plan()
        if plan is None and not self.pipeline:
            return False
        for step, result in self.pipeline.turn(plan, 0.0, (0, 0, 0, None)):
            driver.took(driver.core.commit(step.plan, result, driver.now))
        return True

    def serve(self, *prompts: tuple[int, ...], **sampling: Any) -> list[Request]:
        requests = [self.add(prompt, **sampling) for prompt in prompts]
        while self.step():
            pass
        return requests


def assert_right(family: str, *requests: Request) -> None:
    for request in requests:
        assert request.prompt_ids is not None
        assert request.output_ids == generated(family, tuple(request.prompt_ids), NEW_TOKENS)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("family", FAMILIES)
def test_cold_then_warm(family: str, path: str, layout: str, loop: str) -> None:  # case B1
    server = Server(engine_of(family, path, layout), budget=128, loop=loop)
    cold, warm, other_end = (
        server.serve(prompt)[0] for prompt in (PROMPT, PROMPT, (*PROMPT[:40], *prompt_of(9, 1)))
    )
    assert [request.cached_tokens for request in (cold, warm, other_end)] == [0, 48, 32]
    assert_right(family, cold, warm, other_end)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "loop"), [("gpt2", "plain"), ("llama", "overlapped")])
@pytest.mark.parametrize("chunk", range(2, 66))
def test_every_chunk_size(family: str, loop: str, layout: str, chunk: int) -> None:
    server = Server(engine_of(family, layout=layout), budget=chunk, loop=loop)
    requests = [server.serve(prompt)[0] for prompt in (PROMPT, PROMPT, (*PROMPT[:20], *prompt_of(20, 1)))]
    assert [request.cached_tokens for request in requests] == [0, 48, 16]
    assert_right(family, *requests)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [512, 70, 21])
def test_equal_prompts_admitted_together(budget: int, layout: str, loop: str) -> None:  # case B4
    family = "llama"
    server = Server(engine_of(family, layout=layout), budget=budget, batch=4, loop=loop)
    requests = server.serve(PROMPT, PROMPT, (*PROMPT, 5), (*PROMPT, 7))
    assert_right(family, *requests)
    assert_right(family, *server.serve(PROMPT, (*PROMPT, 5), PROMPT[:63], PROMPT[:17]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_is_the_same_with_and_without_the_cache(layout: str) -> None:
    prompts = [(*PROMPT[: 16 * i], *prompt_of(5 + i, i)) for i in (4, 3, 4, 0, 2, 4)]
    streams = [
        [
            server.serve(prompt)[0].output_ids
            for server in [Server(engine_of("qwen3", layout=layout), budget=64, prefix_cache=on)]
            for prompt in prompts
        ]
        for on in (True, False)
    ]
    assert streams[0] == streams[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sampled_stream_is_the_same_in_both_loops(layout: str) -> None:  # case B6
    streams = [
        [
            request.output_ids
            for request in Server(engine_of("qwen3", layout=layout), budget=40, batch=4, loop=loop).serve(
                PROMPT, PROMPT, PROMPT[:50], temperature=1.5, top_k=50, seed=7
            )
        ]
        for loop in LOOPS
    ]
    assert streams[0] == streams[1]
    assert len({*map(tuple, streams[0])}) > 1


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=12)
@given(data=st.data())
def test_any_mix_of_prompts_over_little_memory(
    layout: str, loop: str, data: st.DataObject
) -> None:  # case B6
    """Prompts out of few blocks of tokens, aborts among them, on a cache that must evict."""
    server = Server(
        engine_of("llama", layout=layout),
        budget=data.draw(st.sampled_from([5, 17, 40, 200])),
        batch=4,
        loop=loop,
    )
    for _ in range(data.draw(st.integers(2, 14), label="events")):
        blocks = data.draw(st.lists(st.integers(0, 1), max_size=4), label="prompt")
        ids = [block + (i * i) % 7 for block in blocks for i in range(16)]
        server.add((*ids, *range(data.draw(st.sampled_from([1, 5, 17]), label="tail"))))
        for _ in range(data.draw(st.integers(0, 6), label="steps")):
            server.step()
        if data.draw(st.integers(0, 4), label="abort") == 0:
            server.driver.abort(data.draw(st.sampled_from(server.driver.requests)))
    server.serve()
    assert_right("llama", *[r for r in server.driver.requests if not r.aborted])


def test_copies_of_copies_read_what_was_there_before() -> None:
    kv = [(torch.rand(6 * 16, 2, 3), torch.rand(6 * 16, 2, 5)) for _ in range(2)]
    before = [[tensor.clone().view(-1, 16, *tensor.shape[1:]) for tensor in layer] for layer in kv]
    copies = [(3, 0), (0, 5), (5, 1), (3, 4)]
    copy_blocks(kv, torch.tensor(copies))
    for layer, old_layer in zip(kv, before, strict=True):
        for tensor, old in zip(layer, old_layer, strict=True):
            expected = old.clone()
            for source, target in copies:
                expected[target] = old[source]
            assert torch.equal(tensor.view(-1, 16, *tensor.shape[1:]), expected)
