"""Queries that read their contexts where they lie, against torch's own attention."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from roseinfer.engine import decode_attention, engine
from roseinfer.engine.decode_attention import attend_in_place, in_place, in_place_works
from roseinfer.engine.decode_kernel import _exp2
from tests.engine.tiny_models import CONFIGS, make_engine

LENGTHS = (1, 63, 64, 65, 200)
SLOTS = 512


def scattered(lengths: tuple[int, ...] = LENGTHS) -> list[NDArray[np.int64]]:
    """Contexts that share no slot and are in no order."""
    slots = np.random.default_rng(0).permutation(SLOTS)
    return np.split(slots[: sum(lengths)], np.cumsum(lengths)[:-1])


def tensors(
    n: int, kv_heads: int = 2, value_dim: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (n, 4, 16), (SLOTS, kv_heads, 16), (SLOTS, kv_heads, value_dim)
    query, keys, values = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return query, keys, values


def attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    contexts: list[NDArray[np.int64]],
    scaling: float | None = None,
) -> torch.Tensor:
    out = query.new_empty(*query.shape[:2], values.shape[-1])
    attend_in_place(query, keys, values, in_place(contexts), scaling, out)
    return out


@pytest.mark.parametrize("scaling", [None, 0.5])
@pytest.mark.parametrize(("kv_heads", "value_dim"), [(4, 16), (2, 16), (1, 8)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_it_is_torchs_attention(
    kv_heads: int, value_dim: int, scaling: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    contexts = scattered()
    query, keys, values = tensors(len(contexts), kv_heads, value_dim, dtype)
    out = attended(query, keys, values, contexts, scaling)
    for row, slots in enumerate(contexts):
        q, k, v = (x.float() for x in (query[row, :, None], keys[slots], values[slots]))
        k, v = (x.transpose(0, 1).repeat_interleave(4 // kv_heads, 0) for x in (k, v))
        theirs = scaled_dot_product_attention(q[None], k[None], v[None], scale=scaling)[0, :, 0]
        torch.testing.assert_close(out[row].float(), theirs, rtol=tolerance, atol=tolerance)


def test_a_row_is_the_same_to_the_bit_whoever_is_beside_it() -> None:  # case B21
    contexts = scattered()
    query, keys, values = tensors(len(contexts))
    together = attended(query, keys, values, contexts)
    for row, slots in enumerate(contexts):
        assert torch.equal(attended(query[row : row + 1], keys, values, [slots])[0], together[row])


def test_a_row_is_the_same_to_the_bit_on_any_number_of_threads() -> None:
    contexts = scattered()
    query, keys, values = tensors(len(contexts))
    alone = attended(query, keys, values, contexts)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(attended(query, keys, values, contexts), alone)
    finally:
        torch.set_num_threads(before)


def test_how_a_query_lies_in_memory_does_not_matter() -> None:
    contexts = scattered()
    query, keys, values = tensors(len(contexts))
    strided = torch.stack([query, query, query], dim=1)[:, 1]
    assert not strided.is_contiguous()
    assert torch.equal(attended(strided, keys, values, contexts), attended(query, keys, values, contexts))


def test_what_is_not_in_a_context_is_not_read() -> None:
    contexts = scattered()
    query, keys, values = tensors(len(contexts))
    clean = attended(query, keys, values, contexts)
    others = np.setdiff1d(np.arange(SLOTS), np.concatenate(contexts))
    keys[others], values[others] = torch.nan, torch.nan
    assert torch.equal(attended(query, keys, values, contexts), clean)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_broken_number_is_not_swallowed(poison: float) -> None:
    contexts = scattered()
    query, keys, values = tensors(len(contexts))
    clean = attended(query, keys, values, contexts)
    values[contexts[-1][100]] = poison
    out = attended(query, keys, values, contexts)
    assert not out[-1].isfinite().any()
    assert torch.equal(out[:-1], clean[:-1])


def test_powers_of_two_are_those_of_numpy() -> None:
    x = -np.linspace(0, 126, 5_000, dtype=np.float32)
    assert [float(_exp2(one)) for one in x] == pytest.approx(np.exp2(x.astype(np.float64)), rel=3e-7)


@pytest.mark.parametrize("x", [-127.0, -200.0, -1e30, -np.inf])
def test_powers_below_the_smallest_are_the_smallest(x: float) -> None:
    assert 0 < _exp2(np.float32(x)) < 2.0**-125


def test_a_nan_stays_one() -> None:
    assert np.isnan(_exp2(np.float32(np.nan)))
    query, keys, values = tensors(1)
    keys[3] = torch.nan
    assert attended(query, keys, values, [np.arange(70)]).isnan().all()


def test_float16_has_no_kernel() -> None:
    assert not in_place_works(torch.float16)


def test_without_the_kernel_torchs_attention_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "_kernel", lambda dtype: None)
    monkeypatch.setattr(engine, "in_place_works", in_place_works.__wrapped__)
    assert make_engine(CONFIGS["llama"]).description.attention == "SDPA"


def test_a_kernel_that_fails_is_told_of_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(dtype: torch.dtype) -> None:
        raise ValueError("No threading layer could be loaded")

    monkeypatch.setattr(decode_attention, "_kernel", broken)
    with pytest.warns(RuntimeWarning, match="torch's attention: numba's fails here .No threading layer"):
        assert not in_place_works.__wrapped__(torch.float32)


def test_torchs_threads_stay_as_many_as_they_were() -> None:
    code = (
        "import torch; from roseinfer.engine.decode_attention import in_place_works\n"
        "torch.set_num_threads(1); assert in_place_works(torch.float32)\n"
        "raise SystemExit(torch.get_num_threads() != 1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # where numba has started no threads yet
