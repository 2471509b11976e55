"""What our attention does not honour is refused at load, never ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
)

from roseinfer.engine import probe as module
from roseinfer.errors import ModelError
from tests.engine.driver import Driver
from tests.engine.tiny_models import CONFIGS, CONTEXT, make_engine, make_model

SIZES: dict[str, Any] = CONFIGS["llama"].to_dict()
SIZES = {
    key: SIZES[key]
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    )
} | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def refusal(config: Any, max_model_len: int | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        make_engine(config, max_model_len=max_model_len)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rope(**parameters: Any) -> LlamaConfig:
    return LlamaConfig(**SIZES, rope_parameters={"rope_theta": 10000.0, **parameters})


def test_a_sliding_window_shorter_than_the_served_context() -> None:
    message = refusal(MistralConfig(**SIZES, sliding_window=32))
    assert "sliding_window=32" in message
    assert "max_model_len of at most 32" in message


@pytest.mark.parametrize(("window", "max_model_len"), [(CONTEXT, None), (32, 32), (None, None)])
def test_a_sliding_window_that_never_bites_is_served(window: int | None, max_model_len: int | None) -> None:
    engine = make_engine(MistralConfig(**SIZES, sliding_window=window), max_model_len=max_model_len)
    assert engine.max_model_len == (max_model_len or CONTEXT)


def test_a_window_on_some_layers_only() -> None:
    config = Qwen3Config(
        **SIZES, head_dim=16, use_sliding_window=True, sliding_window=32, max_window_layers=1
    )
    assert config.layer_types == ["full_attention", "sliding_attention"]
    assert "sliding_attention" in refusal(config)


def test_a_soft_cap() -> None:
    config = Gemma2Config(**SIZES, head_dim=16, sliding_window=CONTEXT, attn_logit_softcapping=50.0)
    assert "softcap=50.0" in refusal(config)


def test_attention_sinks() -> None:
    config = GptOssConfig(
        **SIZES, head_dim=16, sliding_window=CONTEXT, num_local_experts=2, num_experts_per_tok=1
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    assert "s_aux" in refusal(config)


def test_attention_in_both_directions() -> None:
    config = Gemma2Config(**SIZES, head_dim=16, sliding_window=CONTEXT, attn_logit_softcapping=None)
    config.use_bidirectional_attention = True
    assert "not causal" in refusal(config)


def test_chunked_attention() -> None:
    config = LlamaConfig(**SIZES)
    config.attention_chunk_size = 64
    assert "attention_chunk_size=64" in refusal(config)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_scaling_that_depends_on_the_batch(kind: str) -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6} if kind == "longrope" else {}
    config = rope(rope_type=kind, factor=4.0, original_max_position_embeddings=32, **factors)
    assert f"{kind} rope scaling" in refusal(config)


def test_rope_scaling_that_is_the_same_for_all_is_served() -> None:
    assert make_engine(rope(rope_type="linear", factor=2.0)).max_model_len == CONTEXT


def test_an_unknown_kind_of_rope_scaling() -> None:
    model = make_model(LlamaConfig(**SIZES))
    model.config.rope_parameters = {"rope_type": "spiral"}
    with pytest.raises(ModelError, match="unknown type spiral"):
        module.probe(model, "tiny", CONTEXT)


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=99, hidden_size=48, n_layer=2, n_head=4),
        MambaConfig(vocab_size=99, hidden_size=48, num_hidden_layers=2),
    ],
    ids=["bloom", "mamba"],
)
def test_models_that_attend_in_their_own_way(config: Any) -> None:
    model = make_model(config)
    with pytest.raises(ModelError):
        module.probe(model, "tiny", CONTEXT)


def with_calls(monkeypatch: pytest.MonkeyPatch, change: Callable[..., dict[str, Any]]) -> Any:
    """A Llama whose attention layers pass on other keyword arguments."""

    def attention(
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: None,
        **kwargs: Any,
    ) -> Any:
        return recording(layer, query, key, value, mask, **change(kwargs))

    recording = module._recording_attention
    monkeypatch.setitem(AttentionInterface._global_mapping, module._PROBE_NAME, attention)
    return make_model(LlamaConfig(**SIZES))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("softcap", 30.0),
        ("s_aux", torch.zeros(4)),
        ("head_mask", torch.ones(4)),
        ("position_bias", torch.zeros(1, 4, 2, 2)),
        ("dropout", 0.1),
        ("is_causal", False),
        ("sliding_window", 16),
        ("something_new", 1),
    ],
)
def test_a_keyword_that_is_not_honoured(monkeypatch: pytest.MonkeyPatch, key: str, value: Any) -> None:
    model = with_calls(monkeypatch, lambda kwargs: kwargs | {key: value})
    with pytest.raises(ModelError, match=key):
        module.probe(model, "tiny", CONTEXT)


def test_keywords_that_do_not_reach_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_calls(monkeypatch, lambda kwargs: {"scaling": kwargs["scaling"]})
    with pytest.raises(ModelError, match="does not pass keyword arguments on"):
        module.probe(model, "tiny", CONTEXT)


def test_layers_that_do_not_call_it_once_each() -> None:
    model = make_model(LlamaConfig(**SIZES))
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(ModelError, match=r"\[0, 0\]"):
        module.probe(model, "tiny", CONTEXT)


def test_a_served_longrope_is_computed_as_transformers_does() -> None:
    config = rope(
        rope_type="longrope",
        factor=4.0,
        original_max_position_embeddings=32,
        short_factor=[1.5] * 6,
        long_factor=[3.0] * 6,
    )
    driver = Driver(make_engine(config, max_model_len=32))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.inference_mode():
        theirs = make_model(config)(torch.tensor([prompt])).logits[0, -1]
    assert torch.allclose(driver.logits(driver.request(prompt, max_new_tokens=8))[0], theirs, atol=1e-4)
