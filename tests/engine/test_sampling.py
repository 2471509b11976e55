from __future__ import annotations

from typing import Any

import pytest
import torch

from roseinfer.engine.sampling import sample
from roseinfer.request import Request, SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0, 0.5, 1.9])


def draws(n: int, logits: torch.Tensor = LOGITS, *, seed: int = 0, **params: Any) -> list[int]:
    """Tokens at positions 1 .. n of one request over constant logits."""
    request = Request(0, SamplingParams(max_new_tokens=n, **params), None, seed, [0], 0.0)  # type: ignore[arg-type]
    for _ in range(n):
        position = request.prompt_len + len(request.output_ids)
        request.output_ids += sample(logits[None], [request], [position]).tolist()
    return request.output_ids


def frequencies(tokens: list[int]) -> torch.Tensor:
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / len(tokens)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(dim=0)
    n = 4000
    sigma = (expected * (1 - expected) / n).sqrt()
    assert ((frequencies(draws(n, temperature=temperature)) - expected).abs() < 4 * sigma).all()


def test_temperature_zero_is_the_argmax() -> None:
    assert set(draws(5)) == {0}


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-50])  # the last is 0 as a float32
@pytest.mark.parametrize("best", [0, 5])
def test_a_tiny_temperature_is_the_argmax(temperature: float, best: int) -> None:
    logits = LOGITS.roll(best) * 1e4
    assert set(draws(5, logits, temperature=temperature)) == {best}


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(draws(300, temperature=2.0, top_k=3)) == {0, 7, 4}


def test_top_k_keeps_k_among_equals() -> None:
    assert len(set(draws(300, torch.zeros(8), temperature=1.0, top_k=3))) == 3


def test_top_k_above_the_vocabulary_keeps_all() -> None:
    assert draws(50, temperature=1.0, top_k=99) == draws(50, temperature=1.0)


def test_top_p_keeps_the_smallest_set_that_holds_it() -> None:
    ordered = LOGITS.softmax(dim=0).sort(descending=True)
    held = float(ordered.values[:3].sum())
    assert set(draws(300, temperature=1.0, top_p=held - 0.01)) == set(ordered.indices[:3].tolist())


def test_top_p_keeps_at_least_one() -> None:
    assert set(draws(20, temperature=1.0, top_p=1e-9)) == {0}


def test_top_p_counts_within_top_k() -> None:
    # Of the two that top_k leaves, the first alone holds 0.52 of the probability, of all eight only 0.29.
    assert set(draws(100, temperature=1.0, top_k=2, top_p=0.5)) == {0}


def test_the_same_seed_draws_the_same() -> None:
    assert draws(50, seed=3, temperature=1.0) == draws(50, seed=3, temperature=1.0)


def test_another_seed_draws_otherwise() -> None:
    assert draws(50, seed=3, temperature=1.0) != draws(50, seed=4, temperature=1.0)


def test_the_largest_seed_works() -> None:
    assert len(draws(3, seed=2**63 - 1, temperature=1.0)) == 3


def test_rows_of_one_batch_have_parameters_of_their_own() -> None:
    requests = [
        Request(i, SamplingParams(**params), None, 0, [0], 0.0)  # type: ignore[arg-type]
        for i, params in enumerate(({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 1}))
    ]
    alone = [sample(LOGITS[None], [request], [1]).item() for request in requests]
    assert sample(LOGITS.expand(3, -1), requests, [1] * 3).tolist() == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_the_best_and_nan_for_the_best(dtype: torch.dtype) -> None:
    """As torch's argmax."""
    rows = [[1.0, 3.0, 3.0, 2.0], [1.0, torch.nan, 3.0, torch.inf], [-torch.inf] * 4]
    for row, best in zip(torch.tensor(rows).to(dtype), (1, 1, 0), strict=True):
        assert draws(1, row, temperature=0.0) == [int(row.argmax())] == [best]
