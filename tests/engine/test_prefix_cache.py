"""With the prefix cache cold or warm, in both layouts, greedy tokens are those of transformers' own generate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.engine.attention import copy_blocks
from roseinfer.engine.engine import InferenceEngine
from roseinfer.request import Request
from tests.engine.test_greedy import LAYOUTS, NATIVE, engine_of, prompt_of
from tests.engine.tiny_models import FAMILIES, generated
from tests.scripted import CoreDriver

NEW_TOKENS = 4
PROMPT = prompt_of(64)
NUM_BLOCKS = 24


class Server:
    """A core and an executor of an engine."""

    def __init__(
        self, engine: InferenceEngine, *, budget: int, batch: int = 1, prefix_cache: bool = True
    ) -> None:
        self.driver = CoreDriver(
            batch=batch,
            budget=budget,
            kv_tokens=NUM_BLOCKS * 16,
            prefix_cache=prefix_cache,
            shares_blocks=engine.paged_attn,
        )
        self.executor = engine.make_executor(
            num_kv_blocks=NUM_BLOCKS, max_batch_size=4, clock=lambda: self.driver.now
        )

    def add(self, prompt: tuple[int, ...]) -> Request:
        return self.driver.add(prompt, NEW_TOKENS, ignore_eos=True)

    def step(self) -> bool:
        plan = self.driver.plan()
        if plan is not None:
            self.driver.took(
                self.driver.core.commit(plan, self.executor.launch(plan).wait(), self.driver.now)
            )
        return plan is not None

    def serve(self, *prompts: tuple[int, ...]) -> list[Request]:
        requests = [self.add(prompt) for prompt in prompts]
        while self.step():
            pass
        return requests


def assert_right(family: str, *requests: Request) -> None:
    for request in requests:
        assert request.prompt_ids is not None
        assert request.output_ids == generated(family, tuple(request.prompt_ids), NEW_TOKENS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("family", FAMILIES)
def test_cold_then_warm(family: str, path: str, layout: str) -> None:  # case B1
    server = Server(engine_of(family, path, layout), budget=128)
    cold, warm, other_end = (
        server.serve(prompt)[0] for prompt in (PROMPT, PROMPT, (*PROMPT[:40], *prompt_of(9, 1)))
    )
    assert [request.cached_tokens for request in (cold, warm, other_end)] == [0, 48, 32]
    assert_right(family, cold, warm, other_end)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("chunk", range(2, 66))
def test_every_chunk_size(family: str, layout: str, chunk: int) -> None:
    server = Server(engine_of(family, layout=layout), budget=chunk)
    requests = [server.serve(prompt)[0] for prompt in (PROMPT, PROMPT, (*PROMPT[:20], *prompt_of(20, 1)))]
    assert [request.cached_tokens for request in requests] == [0, 48, 16]
    assert_right(family, *requests)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [512, 70, 21])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_equal_prompts_admitted_together(family: str, budget: int, layout: str) -> None:  # case B4
    server = Server(engine_of(family, layout=layout), budget=budget, batch=4)
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
@settings(max_examples=20)
@given(data=st.data())
def test_any_mix_of_prompts_over_little_memory(layout: str, data: st.DataObject) -> None:
    """Prompts out of few blocks of tokens, aborts among them, on a cache that must evict."""
    server = Server(
        engine_of("llama", layout=layout), budget=data.draw(st.sampled_from([5, 17, 40, 200])), batch=4
    )
    for _ in range(data.draw(st.integers(2, 14), label="events")):
        blocks = data.draw(st.lists(st.integers(0, 1), max_size=4), label="prompt")
        ids = [block + (i * i) % 7 for block in blocks for i in range(16)]
        server.add((*ids, *range(data.draw(st.integers(1, 20), label="tail"))))
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
    copy_blocks(kv, copies)
    for layer, old_layer in zip(kv, before, strict=True):
        for tensor, old in zip(layer, old_layer, strict=True):
            expected = old.clone()
            for source, target in copies:
                expected[target] = old[source]
            assert torch.equal(tensor.view(-1, 16, *tensor.shape[1:]), expected)
