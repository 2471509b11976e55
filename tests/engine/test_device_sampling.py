"""Sampling without the host: what it may choose, how often, and that a row is a row's own affair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from roseinfer.engine import sampling
from roseinfer.engine.device_sampling import _exponentials, put_draws, sample_on_device
from roseinfer.engine.sampling import sample
from roseinfer.engine.staging import Direct
from roseinfer.request import Request, SamplingParams
from tests.engine.test_sampling import LOGITS, frequencies

DRAWS = 4000
MANY = 2**12


def request(seed: int = 0, **params: Any) -> Request:
    return Request(0, SamplingParams(**params), None, seed, [0], 0.0)  # type: ignore[arg-type]


def chosen(logits: torch.Tensor, requests: list[Request], positions: list[int]) -> list[int]:
    ids: list[int] = sample_on_device(logits, put_draws(requests, positions, Direct())).tolist()
    return ids


def draws(n: int, logits: torch.Tensor = LOGITS, *, seed: int = 0, **params: Any) -> list[int]:
    """Tokens at positions 1 .. n of one request over constant logits, all in one batch."""
    return chosen(logits.expand(n, -1), [request(seed, **params)] * n, [*range(1, n + 1)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("cut", [{}, {"top_k": 7}], ids=str)
def test_frequencies_follow_the_softmax(temperature: float, cut: dict[str, Any]) -> None:
    kept = LOGITS.clone()
    if cut:
        kept[LOGITS.argmin()] = -torch.inf
    expected = (kept / temperature).softmax(dim=0)
    sigma = (expected * (1 - expected) / DRAWS).sqrt()
    found = frequencies(draws(DRAWS, temperature=temperature, **cut))
    assert ((found - expected).abs() <= 4 * sigma).all()


def test_all_greedy_draws_nothing() -> None:
    assert put_draws([request(), request(temperature=1e-9)], [1, 1], Direct()) is None
    assert set(draws(5)) == {0}


@pytest.mark.parametrize("best", [0, 5])
def test_a_greedy_row_among_sampled_ones_is_the_argmax(best: int) -> None:  # case B20
    requests = [request(temperature=2.0, seed=n) if n % 2 else request() for n in range(40)]
    ids = chosen(LOGITS.roll(best).expand(40, -1), requests, [1] * 40)
    assert set(ids[::2]) == {best}
    assert len(set(ids[1::2])) > 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-50])
def test_a_tiny_temperature_is_the_argmax(temperature: float) -> None:
    requests = [request(temperature=temperature), request(temperature=1.0)]
    assert chosen((LOGITS * 1e4).expand(2, -1), requests, [1, 1])[0] == 0


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 3}, {0, 7, 4}),
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 2, "top_p": 0.5}, {0}),  # within the two, the first holds 0.52
        ({"top_k": 99}, set(range(8))),
        ({"top_k": 2**70}, set(range(8))),
    ],
    ids=str,
)
def test_what_is_cut_off_is_never_drawn(params: dict[str, Any], kept: set[int]) -> None:
    assert set(draws(1000, temperature=3.0, **params)) == kept


def test_a_row_does_not_depend_on_its_batch() -> None:
    params: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7},
    ]
    requests = [request(seed, **one) for seed, one in enumerate(params)]
    alone = [chosen(LOGITS[None], [one], [9])[0] for one in requests]
    assert chosen(LOGITS.expand(4, -1), requests, [9] * 4) == alone


def test_given_the_same_random_numbers_it_chooses_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers(seed: int, position: int, n: int) -> Any:
        return _exponentials(torch.tensor([seed]), torch.tensor([position]), n)[0].numpy()

    monkeypatch.setattr(sampling, "_exponentials", numbers)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 50, generator=generator) * 3
    requests = [
        request(n, temperature=0.3 + n % 4, top_k=(n % 3) * 5, top_p=1.0 if n % 2 else 0.8) for n in range(64)
    ]
    positions = [*range(64)]
    assert chosen(logits, requests, positions) == sample(logits, requests, positions).tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_random_numbers_are_exponential(seed: int) -> None:
    numbers = _exponentials(torch.tensor([seed]), torch.tensor([7]), MANY)[0].double()
    assert (numbers > 0).all()
    assert abs(numbers.mean() - 1) < 4 / MANY**0.5
    ordered = np.sort(1 - np.exp(-numbers.numpy()))
    furthest = np.abs(ordered - (np.arange(MANY) + 0.5) / MANY).max()
    assert furthest < 1.63 / MANY**0.5  # Kolmogorov's bound at 1 %


def test_neighbours_have_nothing_in_common() -> None:
    seeds, positions = torch.arange(8).repeat_interleave(8), torch.arange(8).repeat(8)
    numbers = _exponentials(seeds, positions, 64)
    assert len(set(numbers.flatten().tolist())) == numbers.numel()
    correlations = torch.corrcoef(numbers) - torch.eye(64)
    assert correlations.abs().max() < 6 / 64**0.5
