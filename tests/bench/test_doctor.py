"""What `doctor` finds, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from roseinfer.bench.doctor import COMPARED_PROMPTS, COMPARED_TOKENS
from roseinfer.engine import ceilings
from roseinfer.tokenization import builtin_tokenizer
from tests.bench.asking import Ask
from tests.engine.tiny_models import CONFIGS, make_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(CONFIGS["llama"]).save_pretrained(tmp_path / "tiny")
    PreTrainedTokenizerFast(tokenizer_object=builtin_tokenizer().tokenizer).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_the_last_line_has_all_of_it_as_json(ask: Ask, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_READ_BYTES", 2**16)
    monkeypatch.setattr(ceilings, "_REPEATS", 1)
    answer = ask("doctor", "--model", str(model), "--device", "cpu", "--dtype", "float32")
    assert answer.code == 0, answer.err
    *lines, last = answer.out.splitlines()
    assert "would use: cpu" in lines[2]
    assert "native LlamaForCausalLM" in lines[2]
    found = json.loads(last)
    assert found["tokens_compared"] == len(COMPARED_PROMPTS) * COMPARED_TOKENS
    assert found["tokens_equal"] == found["tokens_compared"]  # fp32: the two paths agree
    assert found["prefill_tokens"] == CONFIGS["llama"].max_position_embeddings - 1
    for figure in ("linear_flops_per_s", "read_bytes_per_s", "prefill_s", "decode_over_floor"):
        assert found[figure] > 0
    assert set(found["decode_step_s"]) == {"1", "8"}


def test_a_device_that_is_not_here_is_named(ask: Ask) -> None:
    if torch.cuda.is_available():
        answer = ask("doctor", "--device", "tpu")
        assert "must be auto, cpu or cuda" in answer.err
    else:
        answer = ask("doctor", "--device", "cuda")
        assert "torch sees no GPU here" in answer.err
    assert answer.code == 2
