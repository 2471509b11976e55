from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roseinfer.engine.builtin import BUILTIN_SEED, build_builtin, export_builtin
from roseinfer.engine.engine import InferenceEngine
from roseinfer.engine.loading import LoadedModel
from roseinfer.tokenization import BUILTIN_BYTE_IDS, BUILTIN_EOS_ID, builtin_tokenizer
from tests.engine.driver import Driver

PROMPT = builtin_tokenizer().encode("Hello" * 5 + " and so on")


@pytest.fixture(scope="module")
def two_layers() -> Any:
    return build_builtin(n_layer=2)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    export_builtin(folder, n_layer=2)
    return folder


def greedy(engine: InferenceEngine, prompt: list[int], n: int) -> list[int]:
    driver = Driver(engine)
    request = driver.request(prompt, max_new_tokens=n)
    for _ in range(n):
        driver.step(request)
    return request.output_ids


def test_it_has_the_size_of_gpt2(two_layers: Any) -> None:
    layer = sum(parameter.numel() for parameter in two_layers.transformer.h[0].parameters())
    assert sum(p.numel() for p in two_layers.parameters()) + 10 * layer == 124_439_808


def test_it_is_the_same_every_time(two_layers: Any) -> None:
    again = build_builtin(n_layer=2)
    assert all(torch.equal(p, q) for p, q in zip(two_layers.parameters(), again.parameters(), strict=True))


def test_its_weights_are_spread_as_gpt2s(two_layers: Any) -> None:
    layer = two_layers.transformer.h[0]
    spread = [
        float(m.weight.detach().std()) for m in (two_layers.transformer.wpe, layer.mlp.c_fc, layer.mlp.c_proj)
    ]
    assert spread == pytest.approx([0.02, 0.02, 0.02 / 2], rel=0.01)


def test_rows_of_byte_tokens_and_end_of_text_are_zero(two_layers: Any) -> None:
    rows = two_layers.lm_head.weight.detach().abs().amax(dim=1)
    assert (rows == 0).nonzero().flatten().tolist() == [*BUILTIN_BYTE_IDS, BUILTIN_EOS_ID]


def test_greedy_never_picks_a_byte_token(two_layers: Any) -> None:
    """The largest of 50,000 logits is above zero, for prompts of bytes and of words alike."""
    engine = InferenceEngine(
        LoadedModel(
            build_builtin(n_layer=2), builtin_tokenizer(), frozenset(), f"random (seed {BUILTIN_SEED})"
        ),
        name="builtin:gpt2",
    )
    driver = Driver(engine)
    prompts = [[i] * (1 + i % 7) for i in range(0, 256, 16)] + [PROMPT, [BUILTIN_EOS_ID]]
    logits = driver.logits(*[driver.request(prompt, max_new_tokens=1) for prompt in prompts])
    assert (logits.amax(dim=1) > 0.1).all()


def test_the_exported_folder_gives_the_same_tokens_in_transformers(exported: Path, two_layers: Any) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(exported)
    ids = torch.tensor([PROMPT])
    options: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }
    assert torch.equal(
        theirs.generate(ids, pad_token_id=0, **options), two_layers.generate(ids, pad_token_id=0, **options)
    )


def test_the_exported_tokenizer_gives_the_same_ids_in_transformers(exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.encode("Hello" * 5 + " and so on") == PROMPT
    assert tokenizer.eos_token_id == BUILTIN_EOS_ID


def test_the_exported_folder_loads_here_with_the_same_tokens(exported: Path, two_layers: Any) -> None:
    ids = torch.tensor([PROMPT])
    theirs = two_layers.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    engine = InferenceEngine.from_pretrained(str(exported), device="cpu", dtype="fp32")
    assert greedy(engine, PROMPT, 6) == theirs[0, len(PROMPT) :].tolist()
    assert engine.make_tokenizer().encode("Hello" * 5 + " and so on") == PROMPT
    assert engine.eos_token_ids == {BUILTIN_EOS_ID}
    assert engine.description.weights == "real"
