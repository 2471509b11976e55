"""Prompts of plain words, for servers whose tokenizer is not known."""

from __future__ import annotations

import pytest

from roseinfer.bench.words import WordCounter, WordMaker

MAKER = WordMaker()


@pytest.mark.parametrize("n", [1, 2, 32])
def test_a_text_has_as_many_words_as_asked_for(n: int) -> None:
    text = MAKER.text(7, 0, n)
    assert len(text.split()) == len(WordCounter().encode(text)) == n


def test_texts_follow_from_seed_and_index() -> None:  # case C5
    assert MAKER.text(7, 3, 9) == WordMaker().text(7, 3, 9)
    assert MAKER.text(7, 3, 9) != MAKER.text(8, 3, 9)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_no_two_texts_begin_with_the_same_word(seed: int) -> None:  # case I7
    first_words = {MAKER.text(seed, index, 2).split()[0] for index in range(20_000)}
    assert len(first_words) == 20_000


def test_a_shared_prefix_is_shared_and_no_more_than_that() -> None:
    one, other = (MAKER.text(7, index, 9, prefix_tokens=4).split() for index in (0, 1))
    assert one[:4] == other[:4]
    assert one[4] != other[4]
    assert len(one) == 9
