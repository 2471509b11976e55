"""Prompts for a server whose tokenizer is not known here: plain words, counted as such."""

from __future__ import annotations

from typing import Final

import numpy as np

_SYLLABLES: Final = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxyz" for vowel in "aeiou"]
_FIRST_WORDS: Final = 1 << 24
"""More than a cell may have requests, and fewer than there are words of four syllables."""


class WordCounter:
    """Stands for a tokenizer where only lengths are asked for: a token is a word."""

    def encode(self, text: str) -> list[int]:
        """As many ids as words, which say nothing else."""
        return list(range(len(text.split())))


class WordMaker:
    """Texts of made-up words, as `prompts.PromptMaker` makes texts of tokens."""

    special_tokens = 0

    def text(self, seed: int, index: int, n_tokens: int, prefix_tokens: int = 0) -> str:
        """The text of request `index`: `n_tokens` words, of which texts of one seed share the first `prefix_tokens`.

        The word after these no other text of the seed has, so that nothing else of a prompt is in any cache.
        """
        shared = _some_words(np.random.default_rng([seed, 0, 1]), prefix_tokens)
        own = _some_words(np.random.default_rng([seed, index]), n_tokens - prefix_tokens - 1)
        return " ".join([*shared, _first_word(seed, index), *own])


def _first_word(seed: int, index: int) -> str:
    """One-to-one in the index up to _FIRST_WORDS, and as a rule another one for another seed."""
    number = (index * (2 * seed + 1) + seed) % _FIRST_WORDS
    syllables = []
    for _ in range(4):
        number, place = divmod(number, len(_SYLLABLES))
        syllables.append(_SYLLABLES[place])
    return "".join(syllables)


def _some_words(rng: np.random.Generator, n: int) -> list[str]:
    places = rng.integers(len(_SYLLABLES), size=(n, 2))
    return [_SYLLABLES[first] + _SYLLABLES[second] for first, second in places]
