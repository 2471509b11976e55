"""The native models against transformers' own modules, and which models they are used for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from roseinfer.engine import linear
from roseinfer.engine.engine import InferenceEngine
from roseinfer.engine.linear import packing_works
from tests.engine.driver import Driver
from tests.engine.tiny_models import CONFIGS, FAMILIES, VOCAB, make_engine


def mixed_step(engine: InferenceEngine) -> torch.Tensor:
    """Logits of a step of decodes, of prompts, of the end of a prompt, and of a chunk that samples nothing."""
    driver = Driver(engine)
    lengths = [9, 30, 5, 5, 40, 17]
    requests = [
        driver.request([(7 * i + 3 * n + length) % VOCAB for i in range(length)])
        for n, length in enumerate(lengths)
    ]
    driver.step(requests[0], requests[1])
    driver.step((requests[5], 10))
    for request in requests[:2]:  # both paths must go on from the same tokens
        request.output_ids[:] = [11]
    return driver.logits(*requests[:4], (requests[4], 20), requests[5])


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of all logits together: the length of the difference over the length of `b`."""
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("kernels", ["packed", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "plain":
        monkeypatch.setattr(linear, "packing_works", lambda dtype: False)
    native = make_engine(CONFIGS[family])
    assert native.description.implementation == "native"
    logits = mixed_step(native)
    assert logits.shape == (5, VOCAB)
    assert relative_difference(logits, mixed_step(make_engine(CONFIGS[family], native=False))) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits_are_those_of_fp32_nearly(family: str) -> None:
    config = copy.deepcopy(CONFIGS[family])
    config.initializer_range = (
        0.1  # with the weights that keep greedy apart, rounding errors double in each layer
    )
    low = mixed_step(make_engine(config, dtype=torch.bfloat16))
    assert low.dtype == torch.bfloat16
    assert relative_difference(low, mixed_step(make_engine(config))) < 2e-2


@pytest.mark.parametrize("native", [True, False], ids=["native", "transformers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_float16_weights_are_those_of_fp32_nearly(family: str, native: bool) -> None:
    config = copy.deepcopy(CONFIGS[family])
    config.initializer_range = 0.1  # as above
    halved = mixed_step(make_engine(config, native=native, half_weights=True))
    assert halved.dtype == torch.float32
    assert 0 < relative_difference(halved, mixed_step(make_engine(config))) < 2e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_other_neighbours_of_the_same_shapes_change_no_bit(family: str) -> None:  # case B21
    def logits(stranger: int) -> torch.Tensor:
        driver = Driver(make_engine(CONFIGS[family]))
        mine, decoding, other = (
            driver.request([salt + i for i in range(length)])
            for salt, length in ((1, 20), (stranger, 9), (stranger, 20))
        )
        driver.step(decoding)
        return driver.logits(decoding, mine, other)[1]

    assert torch.equal(logits(30), logits(60))


@pytest.mark.parametrize("kernels", ["packed", "plain", "halved"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_neighbours_of_the_same_shapes_change_no_bit_of_a_decode(
    family: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # case B21
    if kernels == "plain":
        monkeypatch.setattr(linear, "packing_works", lambda dtype: False)

    def logits(stranger: int) -> torch.Tensor:
        driver = Driver(make_engine(CONFIGS[family], half_weights=kernels == "halved"))
        requests = [
            driver.request([salt + i for i in range(length)])
            for salt, length in ((stranger, 9), (1, 20), (stranger, 33), (stranger, 20))
        ]
        driver.step(*requests)
        for request in requests:  # the stranger's first tokens are to differ, mine is not
            request.output_ids[:] = [11 if request is requests[1] else stranger]
        return driver.logits(*requests)[1]

    assert torch.equal(logits(30), logits(60))


def _gpt2(**changes: Any) -> GPT2Config:
    return GPT2Config(**{**CONFIGS["gpt2"].to_dict(), **changes})


@pytest.mark.parametrize(
    "config",
    [
        _gpt2(activation_function="relu"),
        _gpt2(scale_attn_by_inverse_layer_idx=True),
        _gpt2(scale_attn_weights=False),
        LlamaConfig(**{**CONFIGS["llama"].to_dict(), "hidden_act": "gelu"}),
    ],
    ids=["another activation", "scaled by layer", "not scaled", "another gate"],
)
def test_what_the_native_form_does_not_know_stays_with_transformers(config: Any) -> None:
    assert make_engine(config).description.implementation == "transformers"


def test_biases_and_scaled_positions_are_kept() -> None:
    config = LlamaConfig(
        **{
            **CONFIGS["llama"].to_dict(),
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        }
    )
    native, theirs = make_engine(config), make_engine(config, native=False)
    assert native.description.implementation == "native"
    assert relative_difference(mixed_step(native), mixed_step(theirs)) < 1e-5


def test_this_machine_says_which_kernels_it_uses() -> None:
    kernels = make_engine(CONFIGS["gpt2"]).description.linear_kernels
    assert kernels == ("packed (oneDNN)" if packing_works(torch.float32) else "plain")
