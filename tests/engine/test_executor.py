"""What a step gives back, and that it is a request's own affair."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from roseinfer.engine import linear
from roseinfer.engine.engine import InferenceEngine
from roseinfer.request import Request
from tests.engine.driver import Driver
from tests.engine.tiny_models import CONFIGS, VOCAB, make_engine, reference

# Float32 sums differ in their last bits with the shape of a product; logits here are of the order of 10.
TOLERANCE = 1e-4

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
STRANGERS = [[2, 7, 1, 8, 2, 8], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7, 4, 9], [5, 7, 7]]
OTHERS = [[i + 40 for i in prompt] for prompt in STRANGERS]


@pytest.fixture(scope="module", params=["packed", "plain", "packed, paged", "packed, in place"])
def engine(request: pytest.FixtureRequest) -> Iterator[InferenceEngine]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain":
            patch.setattr(linear, "packing_works", lambda dtype: False)
        yield make_engine(
            CONFIGS["llama"], paged_attn="paged" in request.param, in_place="in place" in request.param
        )


def test_the_fixture_covers_both_kernels(engine: InferenceEngine, request: pytest.FixtureRequest) -> None:
    kind = "packed" if "packed" in request.node.name else "plain"
    assert engine.description.linear_kernels.startswith(kind)


def decoding(driver: Driver, prompts: list[list[int]]) -> list[Request]:
    """Requests that have one token each."""
    requests = [driver.request(prompt) for prompt in prompts]
    driver.step(*requests)
    return requests


def test_same_shapes_other_neighbours_bit_equal_in_prefill(engine: InferenceEngine) -> None:  # case B21
    driver = Driver(engine)
    with_these, with_those = (
        driver.logits(*[driver.request(prompt) for prompt in (PROMPT, *strangers)])[0]
        for strangers in (STRANGERS, OTHERS)
    )
    assert torch.equal(with_these, with_those)


def test_same_shapes_other_neighbours_bit_equal_in_decode(engine: InferenceEngine) -> None:  # case B21
    driver = Driver(engine)
    with_these, with_those = (
        driver.logits(*decoding(driver, [PROMPT, *strangers]))[0] for strangers in (STRANGERS, OTHERS)
    )
    assert torch.equal(with_these, with_those)


def test_joining_a_batch_moves_logits_within_tolerance(engine: InferenceEngine) -> None:  # case B21
    driver = Driver(engine)
    alone = driver.logits(*decoding(driver, [PROMPT]))[0]
    inside = driver.logits(*decoding(driver, [PROMPT, *STRANGERS]))[0]
    assert (alone - inside).abs().max() < TOLERANCE


def test_logits_equal_transformers(engine: InferenceEngine) -> None:
    with torch.inference_mode():
        theirs = reference("llama")(torch.tensor([PROMPT])).logits[0, -1]
    driver = Driver(engine)
    assert (driver.logits(driver.request(PROMPT))[0] - theirs).abs().max() < TOLERANCE


def test_a_greedy_row_among_sampled_rows_is_the_argmax(engine: InferenceEngine) -> None:  # case B20
    driver = Driver(engine)
    sampled = [driver.request(prompt, temperature=5.0, seed=i) for i, prompt in enumerate(STRANGERS)]
    greedy = driver.request(PROMPT)
    work = [sampled[0], greedy, *sampled[1:]]
    logits = driver.logits(*work)
    assert driver.step(*work).token_ids[1] == int(np.argmax(logits[1].numpy()))


def test_a_sampled_stream_does_not_depend_on_its_batch(engine: InferenceEngine) -> None:
    driver = Driver(engine)
    alone = driver.request(PROMPT, temperature=1.5, top_k=50, top_p=0.95, seed=7)
    among = driver.request(PROMPT, temperature=1.5, top_k=50, top_p=0.95, seed=7)
    strangers = [driver.request(prompt, temperature=1.0, seed=7) for prompt in STRANGERS]
    for _ in range(8):
        driver.step(alone)
        driver.step(*strangers, among)
    assert alone.output_ids == among.output_ids


def test_a_reused_block_does_not_leak(engine: InferenceEngine) -> None:
    driver = Driver(engine, num_blocks=3)
    first = driver.request(PROMPT)
    logits = driver.logits(first)
    driver.release(first)
    stranger = driver.request(list(range(40)), max_new_tokens=8)
    driver.step(stranger)
    driver.release(stranger)
    assert torch.equal(driver.logits(driver.request(PROMPT)), logits)


def test_a_strangers_nan_stays_with_the_stranger(engine: InferenceEngine) -> None:
    driver = Driver(engine)
    (short, long) = decoding(driver, [PROMPT, STRANGERS[1]])
    clean = driver.logits(short, long)[0]
    for keys, values in driver.executor._kv:
        values[long.block_table[0] * 16] = torch.nan
        keys[0], values[0] = torch.nan, torch.nan  # where a careless padding would read
    assert 0 not in {block for request in (short, long) for block in request.block_table}
    assert torch.equal(driver.logits(short, long)[0], clean)


def test_none_where_a_span_does_not_sample(engine: InferenceEngine) -> None:
    driver = Driver(engine)
    decode = decoding(driver, [PROMPT])[0]
    chunk, whole = driver.request(STRANGERS[1]), driver.request(STRANGERS[0])
    token_ids = driver.step(decode, (chunk, 4), whole).token_ids
    assert [token_id is None for token_id in token_ids] == [False, True, False]


def test_stamps_surround_the_step(engine: InferenceEngine) -> None:
    driver = Driver(engine)  # its clock counts the questions
    result = driver.step(driver.request(PROMPT))
    assert (result.exec_start_s, result.exec_end_s) == (0.0, 1.0)


def test_the_end_stamp_is_taken_in_wait_not_at_launch(engine: InferenceEngine) -> None:
    driver = Driver(engine)
    first = driver.executor.launch(driver.plan(driver.request(PROMPT)))
    driver.executor.launch(driver.plan(driver.request(PROMPT))).wait()
    assert first.wait().exec_end_s == 3.0


def test_every_id_of_the_vocabulary_is_a_prompt_token(engine: InferenceEngine) -> None:
    driver = Driver(engine)
    assert engine.vocab_size == VOCAB
    assert driver.logits(driver.request([0, VOCAB - 1])).shape == (1, VOCAB)
