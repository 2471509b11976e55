"""A prompt as callers hand it in, text or token ids, and what is wrong with it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from roseinfer.errors import InputError

Prompt = str | Sequence[int]


def check_text(prompt: str) -> None:
    """Raises InputError for text that has no bytes."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError("prompt", prompt[error.start : error.end], "is half a character") from error


def checked_ids(prompt: Sequence[int], vocab_size: int) -> array[int]:
    """The token ids, as a copy of its own. Raises InputError for what is none of a vocabulary of that size."""
    try:
        ids = array("q", prompt)  # refuses what is no whole number
    except (TypeError, OverflowError) as error:
        raise InputError("prompt", type(prompt), f"must be text or token ids ({error})") from error
    if bool in map(type, prompt):
        raise InputError("prompt", type(prompt), "must be text or token ids (True and False are none)")
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise InputError("prompt", [min(ids), max(ids)], f"token ids must lie in [0, {vocab_size})")
    return ids


def most_tokens(prompt: Prompt) -> int:
    """An upper bound of a prompt's tokens, quick: callers that are refused pay for it too."""
    if isinstance(prompt, str):
        # A token is a byte at least (special ones that a tokenizer adds apart), a character at most four.
        return len(prompt) if prompt.isascii() else 4 * len(prompt)
    if isinstance(prompt, bytes | bytearray) or not hasattr(prompt, "__len__"):
        raise InputError("prompt", type(prompt), "must be text or token ids")
    return len(prompt)
