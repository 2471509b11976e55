"""How often a recommendation is "sure" where there is nothing to be sure of, and where there is."""

from __future__ import annotations

import numpy as np
import pytest

from roseinfer.bench.recommend import Evidence, Recommendation, parse_slo

OFFERED = 200


def evidence(limit: int, served: list[int]) -> Evidence:
    """What served so many of `OFFERED` in each repeat."""
    return Evidence(
        limit=f"inflight:{limit}",
        offered=OFFERED * len(served),
        served=sum(served),
        repeats={repeat: (count, OFFERED) for repeat, count in enumerate(served)},
        reject_rate=0.0,
        wasted_share=0.0,
        judgements=(),
        why_not=(),
    )


def how_sure(*served: list[int]) -> str:
    """Of limits that served so many in each repeat."""
    tried = tuple(evidence(limit, counts) for limit, counts in enumerate(served, start=1))
    chosen = max(tried, key=lambda one: one.served)
    sentence = Recommendation({}, (parse_slo("p99_ttft:250"),), tried, chosen).how_sure()
    assert sentence is not None
    return sentence


def share_of_sure(lead: float, repeats: int, *, n_limits: int = 2, sweeps: int) -> float:
    """Of sweeps whose last limit serves by `lead` more than the others, in repeats that differ among themselves."""
    draws = np.random.default_rng(0)
    sure = 0
    for _ in range(sweeps):
        shares = np.clip(draws.normal(0.5, 0.1, repeats), 0.1, 0.7)
        leads = np.array([0.0] * (n_limits - 1) + [lead])
        served = draws.binomial(OFFERED, shares + leads[:, None])
        sure += how_sure(*served.tolist()).startswith("Sure of it")
    return sure / sweeps


@pytest.mark.parametrize("repeats", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("n_limits", [2, 3])
def test_of_limits_that_serve_alike_it_is_seldom_sure(repeats: int, n_limits: int) -> None:
    assert share_of_sure(0.0, repeats, n_limits=n_limits, sweeps=500) <= 0.05


@pytest.mark.parametrize("repeats", [6, 8, 12])
def test_of_a_large_lead_it_is_nearly_always_sure(repeats: int) -> None:
    assert share_of_sure(0.25, repeats, sweeps=100) >= 0.95


@pytest.mark.parametrize(
    ("repeats", "few"),
    [(1, "1 paired repeat is"), (2, "2 paired repeats are"), (5, "5 paired repeats are")],
)
def test_below_six_repeats_no_lead_is_sure_and_that_is_said(repeats: int, few: str) -> None:
    assert how_sure([10] * repeats, [190] * repeats) == (
        "Not sure: 90.0 points more of the offered requests are served within the goal than with 1, the runner-up,"
        f" but {few} too few to tell whether by chance: that takes 6 at least."
    )


def test_six_repeats_that_all_agree_are_enough() -> None:
    assert how_sure([10] * 6, [10 + 2 * ahead for ahead in range(1, 7)]) == (
        "Sure of it: 3.5 points more of the offered requests are served within the goal than with 1, the runner-up"
        " (median of 6 paired repeats, 95 %: 1.0 to 6.0 points)."
    )
