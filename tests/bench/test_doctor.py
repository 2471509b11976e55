"""What `doctor` finds, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from roseinfer.bench import doctor
from roseinfer.bench.doctor import COMPARED_PROMPTS, COMPARED_TOKENS
from roseinfer.bench.doctor_burst import Burst, seed_experiment
from roseinfer.bench.doctor_kernels import SPANS, compare_kernels
from roseinfer.bench.doctor_paths import FAMILIES, NEW_TOKENS, PROMPTS, Agreement, compare_paths
from roseinfer.engine import InferenceEngine, ceilings, varlen
from roseinfer.tokenization import builtin_tokenizer
from tests.bench.asking import Ask
from tests.engine.gpu_on_cpu import CPU, varlen_attn
from tests.engine.tiny_models import CONFIGS, make_engine, make_model


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products take longer on two threads than on one, far longer beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(CONFIGS["llama"]).save_pretrained(tmp_path / "tiny")
    PreTrainedTokenizerFast(tokenizer_object=builtin_tokenizer().tokenizer).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_the_last_line_has_all_of_it_as_json(ask: Ask, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_READ_BYTES", {"cpu": 2**16})
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
    assert found["seed_experiment"] is None  # a GPU's


def test_the_paths_that_a_cpu_has_give_the_same_tokens() -> None:
    agreements = compare_paths(torch.device("cpu"))
    compared = len(FAMILIES) * len(PROMPTS) * NEW_TOKENS
    needs_gpu = {"eager against CUDA graphs", "the plainest against all of them"}
    assert {name for name, agreement in agreements.items() if agreement is None} == needs_gpu
    assert {agreement for agreement in agreements.values() if agreement is not None} == {(compared, compared)}
    assert len(agreements) == len(needs_gpu) + 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flash", ["FA2", "FA3"])
def test_kernels_that_are_right_agree(
    flash: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    queries = sum(n for n, _ in SPANS)
    assert compare_kernels(flash, CPU, dtype) == Agreement(queries, queries)


def test_a_causal_mask_at_the_wrong_corner_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    @wraps(varlen_attn)
    def from_the_first_key(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor,
        *sizes: Any,
        **more: Any,
    ) -> torch.Tensor:
        return varlen_attn(query, key, value, starts, *sizes, **{**more, "seqused_k": starts.diff()})

    monkeypatch.setattr(varlen, "varlen_attn", from_the_first_key)
    whole = sum(n for n, context in SPANS if n == context)
    assert compare_kernels("FA3", CPU, torch.float32) == Agreement(whole, sum(n for n, _ in SPANS))


def test_what_is_no_number_agrees_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, *_, **more: torch.full_like(query, torch.nan))
    assert compare_kernels("FA2", CPU, torch.float32).same == 0


def test_the_kernels_of_a_gpu_are_compared_where_they_are_used(
    ask: Ask, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "_READ_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(ceilings, "_REPEATS", 1)
    monkeypatch.setattr(doctor, "compare_paths", lambda device: {})
    monkeypatch.setattr(doctor, "compare_kernels", lambda flash, device, dtype: Agreement(1, 2))
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr("roseinfer.engine.engine.flash_for", lambda *_: "FA2")
    paged = partial(InferenceEngine.from_pretrained, paged_attn=True)
    monkeypatch.setattr(InferenceEngine, "from_pretrained", paged)
    answer = ask("doctor", "--model", str(model), "--device", "cpu", "--dtype", "float32")
    assert "attention FA2 against SDPA in float32: 1 of 2 queries agree" in answer.out
    assert answer.err.splitlines()[-1] == "roseinfer-bench: these differ: FA2 against SDPA"
    assert answer.code == 1


def test_a_path_that_differs_is_named_and_fails(
    ask: Ask, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "_READ_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(ceilings, "_REPEATS", 1)
    found: dict[str, Agreement | None] = {
        "a against b": Agreement(3, 4),
        "b against c": Agreement(4, 4),
        "d": None,
    }
    monkeypatch.setattr(doctor, "compare_paths", lambda device: found)
    answer = ask("doctor", "--model", str(model), "--device", "cpu", "--dtype", "float32")
    assert answer.code == 1
    assert "a against b, tiny models in float32: 3 of 4 tokens are the same" in answer.out
    assert json.loads(answer.out.splitlines()[-1])["paths"]["a against b"] == {"same": 3, "compared": 4}
    assert answer.err.splitlines()[-1] == "roseinfer-bench: these differ: a against b"


def test_the_burst_is_measured_without_a_limit_and_with_one() -> None:
    engine = make_engine(CONFIGS["gpt2"], paged_attn=True)
    burst = Burst(requests=80, prompt_tokens=9, max_batch_size=16, max_num_batched_tokens=64)
    without, limited = seed_experiment(engine, burst)
    assert (without["max_inflight"], without["offered"], without["rejected"]) == (None, 80, 0)
    assert (limited["max_inflight"], limited["offered"], limited["rejected"]) == (64, 80, 16)
    for entry in (without, limited):
        assert 0 < entry["p50_ttft_ms"] <= entry["p99_ttft_ms"]


def test_a_device_that_is_not_here_is_named(ask: Ask) -> None:
    if torch.cuda.is_available():
        answer = ask("doctor", "--device", "tpu")
        assert "must be auto, cpu or cuda" in answer.err
    else:
        answer = ask("doctor", "--device", "cuda")
        assert "torch sees no GPU here" in answer.err
    assert answer.code == 2
