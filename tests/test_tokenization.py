from __future__ import annotations

import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from roseinfer.tokenization import (
    BUILTIN_BYTE_IDS,
    BUILTIN_EOS_ID,
    BUILTIN_VOCAB_SIZE,
    FastTokenizer,
    StopMatcher,
    builtin_tokenizer,
)

TOKENIZER = builtin_tokenizer()
MIXED = "Grüße, 世界! 👩‍👩‍👧‍👦🇨🇭 naïve\u0301 \ufffd end"


def streamed(ids: list[int], tokenizer: FastTokenizer = TOKENIZER) -> tuple[list[str], str]:
    decoder = tokenizer.new_decoder()
    return [decoder.step(token_id) for token_id in ids], decoder.finish()


def test_the_builtin_vocabulary_has_the_size_of_gpt2s() -> None:
    assert TOKENIZER.tokenizer.get_vocab_size() == BUILTIN_VOCAB_SIZE == 50257


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 259, 1023])
def test_hello_repeated_is_one_token_each(n: int) -> None:
    assert TOKENIZER.encode("Hello" * n) == TOKENIZER.encode("Hello") * n


@given(st.lists(st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=3), min_size=1, max_size=30))
def test_short_words_are_one_token_each(words: list[str]) -> None:
    assert len(TOKENIZER.encode("".join(" " + word for word in words))) == len(words)


@given(st.text())
@settings(max_examples=300)
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_every_other_id_is_printable_text_of_its_own() -> None:
    ids = sorted(set(range(BUILTIN_VOCAB_SIZE)) - set(BUILTIN_BYTE_IDS) - {BUILTIN_EOS_ID})
    texts = [TOKENIZER.decode([token_id]) for token_id in ids]
    assert len(set(texts)) == len(ids) == 50000
    assert all(text.isascii() and text.isprintable() and text.strip() for text in texts)


def test_the_builtin_end_of_text_is_the_last_id() -> None:
    assert TOKENIZER.encode("<|endoftext|>") == [BUILTIN_EOS_ID]


def test_special_tokens_are_not_shown() -> None:
    pieces, tail = streamed([*TOKENIZER.encode("Hello"), BUILTIN_EOS_ID])
    assert "".join(pieces) + tail == "Hello"


def test_no_replacement_character_mid_stream() -> None:  # case B8
    ids = TOKENIZER.encode("世界 👩‍👩‍👧‍👦 ünï")
    assert len(ids) > 20  # characters are split over tokens
    pieces, tail = streamed(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + tail == "世界 👩‍👩‍👧‍👦 ünï"


def test_an_unfinished_character_comes_at_finish() -> None:  # case B8
    ids = TOKENIZER.encode("Hello世")[:-1]
    pieces, tail = streamed(ids)
    assert ("".join(pieces), tail) == ("Hello", "\ufffd")


def test_a_replacement_character_of_the_text_itself_is_kept() -> None:  # case B8
    pieces, tail = streamed(TOKENIZER.encode(MIXED))
    assert "".join(pieces) + tail == MIXED


@given(
    st.lists(
        st.one_of(st.sampled_from(BUILTIN_BYTE_IDS), st.integers(0, BUILTIN_VOCAB_SIZE - 1)), max_size=40
    )
)
@settings(max_examples=300)
def test_joined_pieces_are_the_text_of_all_ids(ids: list[int]) -> None:  # case B8
    pieces, tail = streamed(ids)
    assert "".join(pieces) + tail == TOKENIZER.decode(ids)


@pytest.mark.parametrize("text", ["a\u4e16b", "\U0001f469\u200d\U0001f467 \u00fc!", "x\u0301\u00e9\u20ac"])
def test_a_character_cut_at_any_byte_is_shown_once_it_is_whole(text: str) -> None:  # case E10
    """A token a byte, and the stream ends behind each of them."""
    alphabet = {char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    of_bytes = FastTokenizer(Tokenizer(models.BPE(vocab=alphabet, merges=[])))
    of_bytes.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    of_bytes.tokenizer.decoder = decoders.ByteLevel()
    data = text.encode()
    ids = of_bytes.encode(text)
    assert len(ids) == len(data)
    for cut in range(len(data) + 1):
        pieces, tail = streamed(ids[:cut], of_bytes)
        whole = data[:cut].decode(errors="ignore")
        assert "".join(pieces) == whole
        assert tail == data[:cut].decode(errors="replace")[len(whole) :]


def test_spaces_survive_a_decoder_that_strips_the_first() -> None:
    vocab = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    model = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    # As Llama 2's: bytes are tokens of last resort, and the first space belongs to the format.
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    half_a_character = 4 + 0xE4
    pieces, tail = streamed([1, 2, 3, half_a_character], FastTokenizer(model))
    assert "".join(pieces) + tail == "the cats\ufffd"


def test_settings_of_the_given_tokenizer_do_not_cut_or_pad() -> None:
    model = builtin_tokenizer().tokenizer
    model.enable_truncation(4)
    model.enable_padding(length=64)
    assert len(FastTokenizer(model).encode("Hello" * 9)) == 9


def test_clones_in_eight_threads() -> None:  # case B13
    answers: list[list[int]] = []

    def encode() -> None:
        tokenizer = TOKENIZER.clone()
        answers.extend(tokenizer.encode(MIXED) for _ in range(20))

    threads = [threading.Thread(target=encode) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [TOKENIZER.encode(MIXED)] * 160


@pytest.mark.alone
def test_encoding_a_megabyte_lets_other_threads_run() -> None:  # case B28
    text = "Hello" * 200_000
    gaps = [0.0]
    running, done = threading.Event(), threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not done.is_set():
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
            running.set()

    thread = threading.Thread(target=tick)
    thread.start()
    running.wait()
    begin = time.perf_counter()
    TOKENIZER.encode(text)
    took = time.perf_counter() - begin
    done.set()
    thread.join()
    assert max(gaps) < 0.8 * took  # with the GIL held it would be all of it


def test_importing_it_imports_no_torch() -> None:
    script = (
        "import sys, roseinfer.tokenization, roseinfer.model_source;"
        " sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# Stop strings.


def matched(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces)
    return shown + matcher.finish(), matcher.stopped


def test_a_stop_string_over_three_pieces_is_never_shown() -> None:  # case B11
    matcher = StopMatcher(["</end>"])
    assert [matcher.push(piece) for piece in ("ok </", "en", "d> more")] == ["ok ", "", ""]
    assert matcher.stopped


def test_held_text_that_was_no_stop_comes_at_the_end() -> None:  # case B11
    matcher = StopMatcher(["</end>"])
    assert (matcher.push("ok </en"), matcher.finish(), matcher.stopped) == ("ok ", "</en", False)


def test_only_a_possible_prefix_is_held_back() -> None:  # case B11
    matcher = StopMatcher(["a very long stop string"])
    assert matcher.push("nothing of it begins here") == "nothing of it begins here"


def test_text_after_a_stop_is_dropped() -> None:
    matcher = StopMatcher(["."])
    matcher.push("one.two")
    assert (matcher.push("three"), matcher.finish()) == ("", "")


def test_without_stop_strings_text_passes() -> None:
    assert matched([], ["any", "thing"]) == ("anything", False)


def test_a_stop_inside_the_possible_start_of_a_longer_one() -> None:
    assert matched(["abcd", "bc"], ["xabcd"]) == ("xa", True)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    text=st.text("abc", max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
@settings(max_examples=500)
def test_what_is_shown_does_not_depend_on_the_pieces(stops: list[str], text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    assert matched(stops, pieces) == matched(stops, [text]) == matched(stops, list(text))


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    text=st.text("abc", max_size=20),
)
def test_what_is_shown_is_the_text_before_the_first_stop(stops: list[str], text: str) -> None:
    shown, stopped = matched(stops, list(text))
    assert text.startswith(shown)
    assert stopped == any(stop in text for stop in stops)
    assert not any(stop in shown for stop in stops)
    assert stopped or shown == text
