"""Prompts of an exact length in tokens, each of its own text, as a function of (seed, index)."""

from __future__ import annotations

import re
from typing import Final, Protocol

import numpy as np

from roseinfer.errors import InputError

POOL_WORDS: Final = 4096
_WORD: Final = re.compile(r"[A-Za-z]+")
_ATTEMPTS: Final = 8


class PromptTokenizer(Protocol):
    """What composing needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class PromptMaker:
    """Composes text out of words that are one token each, and checks the length of what came out.

    Raises InputError where the tokenizer has too few such words to compose from.
    """

    def __init__(self, tokenizer: PromptTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._overhead = len(tokenizer.encode(""))  # special tokens that the tokenizer puts in front
        self._words = self._one_token_words(vocab_size)
        if len(self._words) < 2:
            why = "the tokenizer has no words of one token to compose prompts from: use --prompt"
            raise InputError("--prompt-len", None, why)

    def text(self, seed: int, index: int, n_tokens: int) -> str:
        """The text of request `index`: exactly `n_tokens` tokens, special ones included."""
        n_words = n_tokens - self._overhead
        if n_words < 1:
            raise InputError("--prompt-len", n_tokens, f"the tokenizer alone adds {self._overhead} tokens")
        rng = np.random.default_rng([seed, index])
        for _ in range(_ATTEMPTS):
            text = "".join(self._words[i] for i in rng.integers(len(self._words), size=n_words))
            if len(self._tokenizer.encode(text)) == n_tokens:
                return text
        raise InputError("--prompt-len", n_tokens, "no text of this length could be composed: use --prompt")

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
