"""Lengths: the distributions asked for, cut to what fits, and refused where cutting would change them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from roseinfer.bench.flag_values import Lengths, parse_lengths
from roseinfer.bench.lengths import cut_to_fit, draw_lengths, scaled
from roseinfer.bench.seeds import BLOCK_ROWS, Stream


def drawn(
    text: str,
    typical: int = 100,
    n: int = 20_000,
    *,
    seed: int = 0,
    repeat: int = 0,
    stream: Stream = Stream.PROMPT_LENGTHS,
) -> NDArray[np.int64]:
    lengths = parse_lengths("--prompt-len-dist", text)
    return draw_lengths(lengths, typical, n, seed=seed, repeat=repeat, stream=stream)


def array(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def test_distributions_are_read_from_their_text() -> None:
    assert parse_lengths("", "fixed") == Lengths("fixed", 0.0)
    assert parse_lengths("", "uniform:0.5") == Lengths("uniform", 0.5)
    assert parse_lengths("", "lognormal:1.2") == Lengths("lognormal", 1.2)


def test_fixed_lengths_are_all_the_same() -> None:
    assert set(drawn("fixed")) == {100}


def test_uniform_lengths_reach_both_ends_alike() -> None:
    counts = np.bincount(drawn("uniform:0.2"))
    assert np.flatnonzero(counts).tolist() == list(range(80, 121))
    assert stats.chisquare(counts[80:]).pvalue > 0.001


def test_uniform_lengths_are_at_least_one_token() -> None:
    assert np.unique(drawn("uniform:1", typical=2)).tolist() == [1, 2, 3, 4]


def test_lognormal_lengths_have_the_median_and_spread_asked_for() -> None:
    tokens = drawn("lognormal:0.5", typical=1000)
    assert np.median(tokens) == pytest.approx(1000, rel=0.02)
    assert np.std(np.log(tokens)) == pytest.approx(0.5, rel=0.02)
    assert abs(stats.skew(np.log(tokens))) < 0.1


def test_lognormal_lengths_are_at_least_one_token() -> None:
    assert drawn("lognormal:1", typical=1).min() == 1


def test_a_wild_lognormal_stays_a_whole_number() -> None:
    assert drawn("lognormal:5", typical=2**31 - 1).max() == 2**31 - 1


def test_one_seed_gives_the_lengths_again_and_another_others() -> None:  # case C5
    first = drawn("uniform:0.5").tolist()
    assert first == drawn("uniform:0.5").tolist()
    others = [drawn("uniform:0.5", seed=1), drawn("uniform:0.5", repeat=1)]
    others.append(drawn("uniform:0.5", stream=Stream.OUTPUT_LENGTHS))
    assert all(first != other.tolist() for other in others)


def test_a_longer_run_begins_as_a_shorter_one() -> None:
    longer = drawn("uniform:0.5", n=2 * BLOCK_ROWS + 3)
    assert len(longer) == 2 * BLOCK_ROWS + 3
    assert longer[:50].tolist() == drawn("uniform:0.5", n=50).tolist()
    assert longer[:50].tolist() != longer[BLOCK_ROWS : BLOCK_ROWS + 50].tolist()


def test_scaling_rounds_and_leaves_a_token() -> None:
    assert scaled(array(1, 10, 14, 1000), 0.125).tolist() == [1, 1, 2, 125]


def test_what_fits_is_not_cut() -> None:
    prompts, outputs = cut_to_fit(array(5, 10), array(5, 6), least_prompt_tokens=1, most_tokens=16)
    assert (prompts.tolist(), outputs.tolist()) == ([5, 10], [5, 6])


def test_prompts_are_cut_to_what_their_output_leaves() -> None:
    prompts, outputs = cut_to_fit(array(50, 1, 9), array(4, 4, 40), least_prompt_tokens=3, most_tokens=16)
    assert (prompts.tolist(), outputs.tolist()) == ([12, 3, 3], [4, 4, 13])


def test_prompts_that_must_stay_as_they_are_leave_less_for_the_output() -> None:
    asked = array(10, 10)
    prompts, outputs = cut_to_fit(asked, array(4, 40), least_prompt_tokens=asked, most_tokens=16)
    assert (prompts.tolist(), outputs.tolist()) == ([10, 10], [4, 6])
