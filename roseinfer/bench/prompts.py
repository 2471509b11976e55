"""Prompts of an exact length in tokens, each of its own text, as a function of (seed, index)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar, overload

import numpy as np

from roseinfer.errors import InputError

POOL_WORDS: Final = 4096
_WORD: Final = re.compile(r"[A-Za-z]+")
_ATTEMPTS: Final = 8


Made = TypeVar("Made")


class OnDemand(Sequence[Made]):
    """The `n` prompts of a workload, say; each is made when it is asked for, since a million are much to keep."""

    def __init__(self, make: Callable[[int], Made], n: int) -> None:
        self._make = make
        self._n = n

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> Made: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Made]: ...
    def __getitem__(self, index: int | slice) -> Made | Sequence[Made]:
        places = range(self._n)[index]
        return self._make(places) if isinstance(places, int) else [self._make(i) for i in places]


class Encoder(Protocol):
    """What counting needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...


class PromptTokenizer(Encoder, Protocol):
    """What composing needs of a tokenizer."""

    def decode(self, ids: list[int]) -> str: ...


class PromptMaker:
    """Composes text out of words that are one token each, and checks the length of what came out.

    Raises InputError where the tokenizer has too few such words to compose from.
    """

    def __init__(self, tokenizer: PromptTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._overhead = len(tokenizer.encode(""))  # special tokens that the tokenizer puts in front
        self._words = self._one_token_words(vocab_size)
        self._prefixes: dict[tuple[int, int], tuple[str, list[int]]] = {}  # by seed and length
        if len(self._words) < 2:
            why = "the tokenizer has no words of one token to compose prompts from: use --prompt"
            raise InputError("--prompt-len", None, why)

    @property
    def special_tokens(self) -> int:
        """What the tokenizer puts in front of every text."""
        return self._overhead

    def text(self, seed: int, index: int, n_tokens: int, prefix_tokens: int = 0) -> str:
        """The text of request `index`: exactly `n_tokens` tokens, special ones included.

        Texts of one seed share their first `prefix_tokens` tokens, and these follow from the seed alone.
        """
        n_words, n_shared = n_tokens - self._overhead, max(prefix_tokens - self._overhead, 0)
        if n_words < 1:
            raise InputError("--prompt-len", n_tokens, f"the tokenizer alone adds {self._overhead} tokens")
        shared, shared_ids = self._prefix(seed, n_shared)
        rng = np.random.default_rng([seed, index])
        for _ in range(_ATTEMPTS):
            text = shared + self._some_words(rng, n_words - n_shared)
            ids = self._tokenizer.encode(text)
            if len(ids) == n_tokens and ids[: len(shared_ids)] == shared_ids:
                return text
        raise InputError("--prompt-len", n_tokens, "no text of this length could be composed: use --prompt")

    def _prefix(self, seed: int, n_words: int) -> tuple[str, list[int]]:
        known = self._prefixes.get((seed, n_words))
        if known is None:
            shared = self._some_words(np.random.default_rng([seed, 0, 1]), n_words)
            known = self._prefixes[seed, n_words] = shared, self._tokenizer.encode(shared)
        return known

    def _some_words(self, rng: np.random.Generator, n: int) -> str:
        return "".join(self._words[i] for i in rng.integers(len(self._words), size=n))

    def _one_token_words(self, vocab_size: int) -> list[str]:
        words = []
        for token_id in range(vocab_size):
            word = self._tokenizer.decode([token_id]).strip()
            if _WORD.fullmatch(word):
                text = " " + word
                # Three in a row: the first may be special, and neighbours must not fuse.
                if self._tokenizer.encode(text * 3)[self._overhead :] == [token_id] * 3:
                    words.append(text)
                    if len(words) == POOL_WORDS:
                        break
        return words
