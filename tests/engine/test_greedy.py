"""Greedy tokens in float32 equal those of transformers' own generate, whatever they are computed with."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.engine.engine import InferenceEngine
from roseinfer.request import Request
from tests.engine.driver import Driver
from tests.engine.tiny_models import CONFIGS, FAMILIES, VOCAB, generated, make_engine

NEW_TOKENS = 8


NATIVE = {"native": True, "transformers": False}
LAYOUTS = ("contiguous", "paged", "in place")


@cache
def engine_of(family: str, path: str = "native", layout: str = "contiguous") -> InferenceEngine:
    return make_engine(
        CONFIGS[family], native=NATIVE[path], paged_attn=layout == "paged", in_place=layout == "in place"
    )


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((7 * i * i + 13 * i + 31 * salt + length) % VOCAB for i in range(length))


def expected(family: str, request: Request) -> list[int]:
    assert request.prompt_ids is not None
    return generated(family, tuple(request.prompt_ids), NEW_TOKENS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63])
def test_alone(family: str, length: int, path: str, layout: str) -> None:
    driver = Driver(engine_of(family, path, layout))
    request = driver.request(prompt_of(length))
    for _ in range(NEW_TOKENS):
        driver.step(request)
    assert request.output_ids == expected(family, request)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("family", FAMILIES)
def test_batched_with_strangers(family: str, path: str, layout: str) -> None:
    driver = Driver(engine_of(family, path, layout))
    requests = [driver.request(prompt_of(length)) for length in (17, 17, 1, 33, 16, 5)]
    for _ in range(NEW_TOKENS):
        driver.step(*requests)
    assert [r.output_ids for r in requests] == [expected(family, r) for r in requests]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", range(1, 65))
def test_chunked(family: str, chunk: int, layout: str) -> None:
    driver = Driver(engine_of(family, layout=layout))
    request = driver.request(prompt_of(64))
    while not request.is_prefilled:
        driver.step((request, chunk))
    while len(request.output_ids) < 4:
        driver.step(request)
    assert request.output_ids == expected(family, request)[:4]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15)
@given(data=st.data())
def test_joining_and_leaving_at_any_step(family: str, path: str, layout: str, data: st.DataObject) -> None:
    """Up to four requests run; each waits, goes on by a chunk, or leaves early; a newcomer takes its blocks."""
    driver = Driver(engine_of(family, path, layout), num_blocks=20)
    arriving = [driver.request(prompt_of(length, 1)) for length in (40, 3)]
    running: list[Request] = []
    arrived = 2
    for _ in range(data.draw(st.integers(4, 14), label="steps")):
        if arriving and len(running) < 4 and data.draw(st.booleans(), label="join"):
            running.append(arriving.pop())
        work: list[tuple[Request, int]] = []
        for request in running:
            chunk = data.draw(st.integers(0, 20), label=f"tokens of {request.request_id}")
            if chunk:
                work.append((request, chunk))
        if work:
            driver.step(*work)
        for request in list(running):
            answer = expected(family, request)
            assert request.output_ids == answer[: len(request.output_ids)]
            if len(request.output_ids) == NEW_TOKENS or data.draw(st.integers(0, 9), label="leave") == 0:
                running.remove(request)
                driver.release(request)
                arriving.append(driver.request(prompt_of(5 + arrived, arrived)))
                arrived += 1


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_in_which_nothing_samples(family: str, path: str) -> None:
    driver = Driver(engine_of(family, path))
    request = driver.request(prompt_of(20))
    assert driver.step((request, 10)).token_ids == [None]
