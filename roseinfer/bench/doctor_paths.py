"""The engine's paths against each other: each pair must give the same tokens, in float32 on tiny models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from roseinfer.manager import SchedulerManager
from roseinfer.request import SamplingParams

if TYPE_CHECKING:
    import torch

    from roseinfer.engine import InferenceEngine

FAMILIES: Final = ("gpt2", "llama")
NEW_TOKENS: Final = 8
PROMPTS: Final = (1, 17, 48, 48, 64, 100)
"""Lengths. Those of equal length are equal: the later one finds the earlier one's blocks, if they are kept."""

TEMPERATURES: Final = (0.0, 0.0, 0.0, 0.0, 0.8, 0.0)
BATCH: Final = 4
BUDGET: Final = 40
"""Tokens of a step: the longer prompts are computed in chunks, beside decodes."""

_CONTEXT: Final = 128
_VOCAB: Final = 199
_SHAPE: Final = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class Path(NamedTuple):
    """How a model is computed."""

    paged_attn: bool = True
    cuda_graph: bool = False
    overlap_steps: bool = False
    prefix_cache: bool = False


PAIRS: Final = {
    "contiguous against paged": (Path(paged_attn=False), Path()),
    "no prefix cache against one": (Path(), Path(prefix_cache=True)),
    "plain loop against overlapped": (Path(), Path(overlap_steps=True)),
    "eager against CUDA graphs": (Path(), Path(cuda_graph=True)),
    "the plainest against all of them": (
        Path(paged_attn=False),
        Path(cuda_graph=True, overlap_steps=True, prefix_cache=True),
    ),
}


class Agreement(NamedTuple):
    same: int
    compared: int


def compare_paths(device: torch.device) -> dict[str, Agreement | None]:
    """Tokens that are the same, by pair of paths; None for a pair that needs a GPU, where there is none."""
    agreements: dict[str, Agreement | None] = {}
    answers: dict[Path, list[int]] = {}
    for name, pair in PAIRS.items():
        if device.type != "cuda" and any(path.cuda_graph for path in pair):
            agreements[name] = None
            continue
        for path in pair:
            if path not in answers:
                engines = [_tiny_engine(family, device, path) for family in FAMILIES]
                answers[path] = [token_id for engine in engines for token_id in _tokens(engine, path)]
        one, other = (answers[path] for path in pair)
        agreements[name] = Agreement(sum(a == b for a, b in zip(one, other, strict=True)), len(one))
    return agreements


def _tokens(engine: InferenceEngine, path: Path) -> list[int]:
    """What all prompts are answered, one behind the other; the loop is turned here, so that steps do not depend on
    when a thread came."""
    manager = SchedulerManager(
        engine,
        max_batch_size=BATCH,
        max_num_batched_tokens=BUDGET,
        overlap_steps=path.overlap_steps,
        prefix_cache=path.prefix_cache,
        start=False,
    )
    streams = [
        manager.submit(
            [(7 * i * i + 13 * i + length) % _VOCAB for i in range(length)],
            SamplingParams(NEW_TOKENS, temperature=temperature, seed=length, ignore_eos=True),
        )
        for length, temperature in zip(PROMPTS, TEMPERATURES, strict=True)
    ]
    while manager.step():
        pass
    ids = [token.token_id for stream in streams for token in stream.tokens()]
    manager.close()
    return ids


def _tiny_engine(family: str, device: torch.device, path: Path) -> InferenceEngine:
    """The same weights at every call, large enough that no two logits nearly tie."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    from roseinfer.engine import InferenceEngine
    from roseinfer.engine.loading import LoadedModel
    from roseinfer.tokenization import builtin_tokenizer

    of_all: dict[str, Any] = {
        "vocab_size": _VOCAB,
        "initializer_range": 0.3,
        "max_position_embeddings": _CONTEXT,
        "bos_token_id": None,
        "eos_token_id": None,
        **_SHAPE,
    }
    config = (
        GPT2Config(**of_all)
        if family == "gpt2"
        else LlamaConfig(**of_all, intermediate_size=96, num_key_value_heads=2, pad_token_id=None)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(device=device, dtype=torch.float32).eval()
    loaded = LoadedModel(model, builtin_tokenizer(), frozenset(), "random (seed 0)")
    return InferenceEngine(
        loaded, name=f"tiny {family}", paged_attn=path.paged_attn, cuda_graph=path.cuda_graph
    )
