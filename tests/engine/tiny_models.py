"""Tiny models with seeded random weights, one of each family, as transformers makes them."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from roseinfer.engine.engine import InferenceEngine
from roseinfer.engine.loading import LoadedModel
from roseinfer.tokenization import builtin_tokenizer

VOCAB = 199  # prime: no kernel's favourite size
CONTEXT = 128

# Grouped queries in every family that has them; weights large enough that no two logits nearly tie.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, Any] = {
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=48,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "llama": LlamaConfig(**_SIZES),
    "qwen2": Qwen2Config(**_SIZES),
    "qwen3": Qwen3Config(**_SIZES, head_dim=16),
    "mistral": MistralConfig(**_SIZES, sliding_window=None),
}
FAMILIES = tuple(CONFIGS)


def make_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The same weights at every call. The config is copied: `from_config` changes the one that it is given."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config)).to(dtype).eval()


def make_engine(
    config: Any,
    *,
    max_model_len: int | None = None,
    native: bool = True,
    dtype: torch.dtype = torch.float32,
    paged_attn: bool = False,
    half_weights: bool = False,
    in_place: bool = True,
) -> InferenceEngine:
    loaded = LoadedModel(make_model(config, dtype), builtin_tokenizer(), frozenset(), "random (seed 0)")
    engine = InferenceEngine(
        loaded,
        name="tiny",
        max_model_len=max_model_len,
        native=native,
        paged_attn=paged_attn,
        half_weights=half_weights,
    )
    engine._reads_in_place &= in_place  # else as where numba is missing, or on CUDA
    return engine


@cache
def reference(family: str) -> Any:
    """A model that transformers runs itself."""
    return make_model(CONFIGS[family])


@cache
def generated(family: str, prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
    """What transformers' own greedy generation answers to `prompt`."""
    ids = torch.tensor([prompt])
    output = reference(family).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
