"""Text to ids and back: fast tokenizers, text of a token stream, stop strings, and the built-in vocabulary.

No torch and no transformers here: importing this module costs milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from string import ascii_lowercase, ascii_uppercase

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

BUILTIN_VOCAB_SIZE = 50257
BUILTIN_EOS_ID = BUILTIN_VOCAB_SIZE - 1
BUILTIN_EOS_TOKEN = "<|endoftext|>"
BUILTIN_BYTE_IDS = range(256)
"""Ids of the built-in vocabulary whose tokens are single bytes, not text of their own."""


class ChatText(str):
    """A prompt that has the special tokens that the model expects: no tokenizer puts any in front of it."""

    __slots__ = ()


class FastTokenizer:
    """A `tokenizers.Tokenizer` with fixed settings: never truncates, never pads. One per thread: see `clone`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the model expects in front, unless it is a ChatText."""
        # encode() holds the GIL (over a second for a megabyte of text), encode_batch() releases it.
        is_complete = isinstance(text, ChatText)
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=not is_complete)
        return encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of all ids at once, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return self.tokenizer.decode(ids)

    def new_decoder(self) -> StreamDecoder:
        """A decoder for one stream of output tokens. Decoders of one tokenizer may live in several threads."""
        return StreamDecoder(self.tokenizer)

    def clone(self) -> FastTokenizer:
        """An independent copy, for another thread."""
        return FastTokenizer(Tokenizer.from_str(self.tokenizer.to_str()))


class StreamDecoder:
    """Text of one stream, token by token: never half a character, and no special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown: list[int] = []  # the tokens behind the last piece: what a tail is decoded after
        self._open: list[int] = []  # tokens that have not become text yet

    def step(self, token_id: int) -> str:
        """The text that this token completes, "" while a character is still open."""
        self._open.append(token_id)
        piece = self._stream.step(self._tokenizer, token_id)
        if piece is None:
            return ""
        self._shown, self._open = self._open, []
        return piece

    def finish(self) -> str:
        """What is left at the end of the stream: an unfinished character shows as U+FFFD."""
        # Decoded behind the last piece, since many decoders drop a space at the start of a text.
        before = self._tokenizer.decode(self._shown)
        tail = self._tokenizer.decode(self._shown + self._open)[len(before) :]
        self._open = []
        return tail


class StopMatcher:
    """Cuts a stream of text where the first of some stop strings is completed; the stop itself is never shown.

    Holds back only text that may be the beginning of a stop string. What it gives out does not depend on how
    the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What may be shown now. Sets `stopped` when a stop string is complete; later text is dropped."""
        if self.stopped:
            return ""
        text = self._held + text
        # The stop that is complete first wins, as it would if the text came character by character.
        found = [(begin + len(stop), begin) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        n_held = self._possible_stop(text)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def finish(self) -> str:
        """The text still held back: at the end of the stream it was no stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for n in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0


def builtin_tokenizer() -> FastTokenizer:
    """The tokenizer of `builtin:gpt2`: byte-level BPE of 50257 tokens, made here, nothing to download.

    Any text round-trips. `"Hello" * n` is exactly n tokens, and so are n words of one to three lower-case
    letters with a space in front of each. Every id but BUILTIN_BYTE_IDS and BUILTIN_EOS_ID decodes to
    printable text that no other id has.
    """
    vocab, merges = _builtin_vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BUILTIN_EOS_TOKEN, special=True, normalized=False)])
    return FastTokenizer(tokenizer)


@lru_cache(maxsize=1)
def _builtin_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Tokens with their ids, and merges in order of rank."""
    space = "\u0120"  # how byte-level BPE spells the byte 0x20
    lower, upper = ascii_lowercase, ascii_uppercase
    pairs = list(product(lower, lower))
    # Lowest ranks win. "Hello" comes first and is part of no merge, so that a run of it cannot fuse; words with
    # a space in front come next, so that no merge of bare letters can cut into them.
    merges = [("H", "e"), ("He", "l"), ("Hel", "l"), ("Hell", "o")]
    merges += [(space, a) for a in lower]
    merges += [(space + a, b) for a, b in pairs]
    merges += [(space + a + b, c) for a, b in pairs for c in lower]
    merges += pairs
    merges += [(a + b, c) for a, b in pairs for c in lower]
    merges += [(space, a) for a in upper]
    merges += [(space + a, b) for a, b in product(upper, lower)]
    merges += [(space + a + b, c) for a, b in product(upper, lower) for c in lower]
    merges = merges[: BUILTIN_EOS_ID - len(BUILTIN_BYTE_IDS)]

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())  # one printable stand-in per byte
    tokens += [left + right for left, right in merges]
    tokens.append(BUILTIN_EOS_TOKEN)
    return {token: token_id for token_id, token in enumerate(tokens)}, merges
