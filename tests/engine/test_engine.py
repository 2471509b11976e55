from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from roseinfer.engine import device
from roseinfer.engine.engine import InferenceEngine
from roseinfer.engine.linear import Head
from roseinfer.engine.loading import LoadedModel
from roseinfer.engine.prefill_attention import takes_blocks
from roseinfer.errors import InputError, ModelError
from roseinfer.tokenization import builtin_tokenizer
from tests.engine.driver import Driver
from tests.engine.tiny_models import CONFIGS, CONTEXT, VOCAB, make_engine, make_model


@pytest.fixture(scope="module")
def engine() -> InferenceEngine:
    return make_engine(CONFIGS["llama"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a tiny Llama with the built-in tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    make_model(CONFIGS["llama"]).save_pretrained(folder)
    builtin_tokenizer().tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def refusal(model: Path | str, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        InferenceEngine.from_pretrained(str(model), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What it says of itself.


def test_a_folder_is_described(saved: Path) -> None:
    loaded = InferenceEngine.from_pretrained(str(saved), device="cpu", dtype="auto", num_threads=1)
    description = json.loads(json.dumps(dataclasses.asdict(loaded.description)))
    assert description.pop("device_name")
    itemsize = 4 if description["dtype"] == "float32" else 2
    kv_itemsize = 2 if description["dtype"] == "bfloat16" else 4
    assert description.pop("linear_kernels") in ("packed (oneDNN)", "float16 weights (FBGEMM)", "plain")
    in_blocks = takes_blocks(torch.device("cpu"), getattr(torch, description["dtype"]))
    assert description == {
        "model": str(saved),
        "architecture": "LlamaForCausalLM",
        "weights": "real",
        "parameters": sum(parameter.numel() for parameter in make_model(CONFIGS["llama"]).parameters()),
        "context_length": CONTEXT,
        "max_model_len": CONTEXT,
        "device": "cpu",
        "dtype": device.dtype_name(device.resolve_dtype("auto", torch.device("cpu"))),
        "num_threads": 1,
        "implementation": "native",
        "matrix_parameters": 2 * (48 * 48 * 3 + 3 * 48 * 64),
        "weight_bytes": (2 * (48 * 48 * 3 + 3 * 48 * 64) + VOCAB * 48) * itemsize,
        "kv_bytes_per_token": 2 * 2 * 2 * 12 * kv_itemsize,
        "kv_layout": "contiguous",
        "attention": f"SDPA, {'prefills in blocks, ' if in_blocks else ''}decodes in place (numba)",
        "cuda_graph": False,
    }


def test_bf16_is_computed_where_asked_for(saved: Path) -> None:
    engine = InferenceEngine.from_pretrained(str(saved), device="cpu", dtype="bf16")
    driver = Driver(engine)
    assert engine.description.dtype == "bfloat16"
    assert driver.logits(driver.request([1, 2, 3])).dtype == torch.bfloat16


def test_float16_is_what_weights_are_kept_in(saved: Path) -> None:
    described = InferenceEngine.from_pretrained(str(saved), device="cpu", dtype="float16").description
    plain = InferenceEngine.from_pretrained(str(saved), device="cpu", dtype="float32").description
    assert described.dtype == "float16"
    assert described.linear_kernels == "float16 weights (FBGEMM)"
    assert 2 * described.weight_bytes == plain.weight_bytes
    assert described.kv_bytes_per_token == plain.kv_bytes_per_token


def test_float16_answers_as_float32_does(saved: Path) -> None:
    first = [
        driver.logits(driver.request([5, 6, 7, 8]))
        for driver in (
            Driver(InferenceEngine.from_pretrained(str(saved), device="cpu", dtype=dtype))
            for dtype in ("fp16", "fp32")
        )
    ]
    assert first[0].argmax() == first[1].argmax()


def test_max_model_len_is_served(saved: Path) -> None:
    assert InferenceEngine.from_pretrained(str(saved), device="cpu", max_model_len=48).max_model_len == 48


def test_the_vocabulary_is_the_models(engine: InferenceEngine) -> None:
    assert engine.vocab_size == VOCAB


def test_end_of_sequence_ids_of_both_configs(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 5}))
    assert InferenceEngine.from_pretrained(str(folder), device="cpu").eos_token_ids == {5, 7, 9}


@pytest.mark.parametrize("max_batch_size", [1, 8, 512, 5000])
def test_the_token_budget_exceeds_the_batch(engine: InferenceEngine, max_batch_size: int) -> None:
    assert engine.default_num_batched_tokens(max_batch_size) > max_batch_size


def test_the_cache_holds_a_full_batch(engine: InferenceEngine) -> None:
    assert engine.default_kv_cache_tokens(8) == 8 * CONTEXT


def test_the_cache_keeps_to_its_share_of_memory(engine: InferenceEngine) -> None:
    tokens = engine.default_kv_cache_tokens(10**6)
    per_token = 2 * 2 * 2 * 12 * 4  # keys and values, layers, heads, head_dim, bytes
    assert tokens % 16 == 0
    assert tokens * per_token == pytest.approx(2 * 2**30, rel=0.001)


def test_the_cache_holds_one_context_at_least() -> None:
    assert make_engine(CONFIGS["llama"], max_model_len=17).default_kv_cache_tokens(1) == 32


# Memory of the cache.


def keys_of(driver: Driver) -> int:
    return driver.executor._kv[0][0].data_ptr()


def test_the_next_executor_takes_over_the_memory_of_the_last(engine: InferenceEngine) -> None:
    driver = Driver(engine)
    first = keys_of(driver)
    del driver
    assert keys_of(Driver(engine)) == first


def test_two_living_executors_share_nothing(engine: InferenceEngine) -> None:
    one, other = Driver(engine), Driver(engine)
    assert keys_of(one) != keys_of(other)


def test_another_size_is_another_cache(engine: InferenceEngine) -> None:
    assert Driver(engine, num_blocks=3).executor._kv[0][0].shape[0] == 3 * 16
    assert Driver(engine, num_blocks=5).executor._kv[0][0].shape[0] == 5 * 16


def test_tokenizers_are_separate_objects(engine: InferenceEngine) -> None:
    assert engine.make_tokenizer().tokenizer is not engine.make_tokenizer().tokenizer


# Layout of the cache.


@pytest.mark.parametrize(
    ("paged_attn", "layout"), [(None, "contiguous"), (False, "contiguous"), (True, "paged")]
)
def test_a_cpu_keeps_each_request_in_one_piece_unless_told_otherwise(
    paged_attn: bool | None, layout: str
) -> None:
    loaded = LoadedModel(make_model(CONFIGS["llama"]), builtin_tokenizer(), frozenset(), "random")
    engine = InferenceEngine(loaded, name="tiny", paged_attn=paged_attn)
    assert (engine.description.kv_layout, engine.paged_attn) == (layout, layout == "paged")


# Values that cannot work.


@pytest.mark.parametrize(
    "options",
    [
        {"device": "tpu"},
        {"dtype": "int4"},
        {"max_model_len": CONTEXT + 1},
        {"max_model_len": 1},
        {"num_threads": 0},
        {"cuda_graph": True},
    ],
    ids=str,
)
def test_options_that_cannot_work(saved: Path, options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    assert refusal(saved, **options).startswith(f"{name} {value!r}: ")


def test_cuda_without_a_gpu(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU" in refusal(saved, device="cuda")


def test_an_unknown_architecture(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    (folder / "config.json").write_text('{"model_type": "unheard_of"}')
    assert "unheard_of" in refusal(folder)


def test_a_model_that_brings_its_own_code_is_not_run(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    (folder / "code.py").write_text("raise SystemExit('remote code ran')")
    own = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": own}))
    assert "cannot be loaded" in refusal(folder)


def test_truncated_weights(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "cannot be loaded" in refusal(folder)


def test_a_folder_without_tokenizer(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "cannot be loaded" in refusal(folder)


def test_weights_that_are_missing_in_part(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "9 weights are missing" in refusal(folder)


def test_the_hub_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    assert "hub cannot be reached" in refusal("owner/name")


def test_a_hub_model_without_safetensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(tmp_path))
    assert "no weights" in refusal("owner/name")


def test_a_hub_model_loads(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(saved))
    assert InferenceEngine.from_pretrained("owner/name", device="cpu").description.model == "owner/name"


# dtype.


@pytest.mark.parametrize(("halves", "dtype"), [(True, torch.float16), (False, torch.float32)])
def test_auto_on_a_cpu_that_would_emulate_bf16(
    monkeypatch: pytest.MonkeyPatch, halves: bool, dtype: torch.dtype
) -> None:
    for question in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, question, lambda: False, raising=False)
    monkeypatch.setattr(device, "halving_works", lambda: halves)
    assert device.resolve_dtype("auto", torch.device("cpu")) == dtype


def test_auto_is_bf16_on_a_cpu_that_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    assert device.resolve_dtype("auto", torch.device("cpu")) == torch.bfloat16


def test_float16_weights_are_refused_where_they_cannot_be_multiplied(
    monkeypatch: pytest.MonkeyPatch, saved: Path
) -> None:
    monkeypatch.setattr(device, "halving_works", lambda: False)
    assert "for this CPU" in refusal(saved, device="cpu", dtype="fp16")


@pytest.mark.parametrize("weight", [70_000.0, float("nan")])
def test_a_weight_that_float16_cannot_hold_is_refused(weight: float) -> None:
    model = make_model(CONFIGS["llama"])
    with torch.no_grad():
        model.lm_head.weight[3, 5] = weight
    loaded = LoadedModel(model, builtin_tokenizer(), frozenset(), "random")
    with pytest.raises(ModelError, match="which float16 cannot hold"):
        InferenceEngine(loaded, name="tiny", half_weights=True)


def test_half_weights_are_for_a_model_in_float32() -> None:
    loaded = LoadedModel(
        make_model(CONFIGS["llama"], torch.bfloat16), builtin_tokenizer(), frozenset(), "random"
    )
    with pytest.raises(InputError, match="is for float32 on a CPU"):
        InferenceEngine(loaded, name="tiny", half_weights=True)


def test_float16_is_refused_on_a_gpu() -> None:
    with pytest.raises(InputError, match="dtype 'float16': is for weights on a CPU"):
        device.resolve_dtype("float16", torch.device("cuda"))


def test_a_config_without_a_context_length(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(CONFIGS["llama"])
    monkeypatch.setattr(type(model.config), "get_text_config", lambda self: SimpleNamespace())
    with pytest.raises(ModelError, match="max_position_embeddings"):
        InferenceEngine(LoadedModel(model, builtin_tokenizer(), frozenset(), "random"), name="tiny")


# Its first step.


def test_every_batch_size_was_computed_before_the_first_request_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # case I4
    engine = make_engine(CONFIGS["llama"])
    sizes: list[int] = []
    compute = Head.__call__

    def noted(head: Head, x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return compute(head, x)

    monkeypatch.setattr(Head, "__call__", noted)
    seen = []
    for max_batch_size in (5, 3, 7):
        engine.make_executor(num_kv_blocks=8, max_batch_size=max_batch_size, clock=lambda: 0.0)
        seen.append(list(sizes))
        sizes.clear()
    assert seen == [[1, 2, 3, 4, 5], [], [6, 7]]
