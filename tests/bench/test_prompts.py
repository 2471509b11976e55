"""Composed prompts: exact lengths, each of its own text, the same again for the same seed."""

from __future__ import annotations

import pytest

from roseinfer.bench.prompts import POOL_WORDS, OnDemand, PromptMaker
from roseinfer.errors import InputError
from roseinfer.tokenization import BUILTIN_VOCAB_SIZE, FastTokenizer, builtin_tokenizer
from tests.bench.experiments import WORDS, WordTokenizer


class WithStart(WordTokenizer):
    """Puts a special token in front, as many models want it."""

    def encode(self, text: str) -> list[int]:
        return [len(WORDS), *super().encode(text)]


class Fusing(WordTokenizer):
    """Two words side by side become one token: no text of exactly n tokens can be put together from words."""

    def encode(self, text: str) -> list[int]:
        return super().encode(text)[::2] if len(text.split()) > 3 else super().encode(text)


class Crossing(WordTokenizer):
    """The fifth token depends on the sixth: a shared prefix of five cannot be kept, though the length can."""

    def encode(self, text: str) -> list[int]:
        ids = super().encode(text)
        return [*ids[:4], (ids[4] + ids[5] + 1) % len(WORDS), *ids[5:]] if len(ids) > 5 else ids


class WithoutWords(WordTokenizer):
    def decode(self, ids: list[int]) -> str:
        return "*" * len(ids)


@pytest.fixture(scope="module")
def builtin() -> FastTokenizer:
    return builtin_tokenizer()


@pytest.mark.parametrize("n_tokens", [1, 2, 31, 500])
def test_a_prompt_has_exactly_the_length_asked_for(builtin: FastTokenizer, n_tokens: int) -> None:  # case I1
    maker = PromptMaker(builtin, BUILTIN_VOCAB_SIZE)
    for index in range(5):
        assert len(builtin.encode(maker.text(7, index, n_tokens))) == n_tokens


def test_special_tokens_count(builtin: FastTokenizer) -> None:  # case I2
    tokenizer = WithStart()
    assert len(tokenizer.encode(PromptMaker(tokenizer, len(WORDS)).text(0, 0, 5))) == 5


def test_a_shared_start_is_made_once_a_seed() -> None:
    class Counting(WordTokenizer):
        texts: list[str] = []  # noqa: RUF012

        def encode(self, text: str) -> list[int]:
            self.texts.append(text)
            return super().encode(text)

    tokenizer = Counting()
    maker = PromptMaker(tokenizer, len(WORDS))
    tokenizer.texts.clear()
    for index in range(5):
        maker.text(3, index, 16, 9)
    assert sum(len(text.split()) == 9 for text in tokenizer.texts) == 1
    assert maker.text(4, 0, 16, 9).split()[:9] != maker.text(3, 0, 16, 9).split()[:9]


def test_prompts_of_one_seed_differ_from_their_first_tokens_on() -> None:  # case I7
    tokenizer = WordTokenizer()
    maker = PromptMaker(tokenizer, len(WORDS))
    starts = {tuple(tokenizer.encode(maker.text(3, index, 16))[:4]) for index in range(200)}
    assert len(starts) == 200


def test_a_prompt_follows_from_seed_and_index_alone() -> None:  # case C5
    maker, again = (PromptMaker(WordTokenizer(), len(WORDS)) for _ in range(2))
    again.text(1, 0, 8)  # what was asked before does not matter
    assert maker.text(5, 3, 8) == again.text(5, 3, 8)
    assert len({maker.text(5, 3, 8), maker.text(6, 3, 8), maker.text(5, 4, 8)}) == 3


def test_the_words_of_a_large_vocabulary_are_bounded(builtin: FastTokenizer) -> None:
    maker = PromptMaker(builtin, BUILTIN_VOCAB_SIZE)
    assert len(maker._words) == len(set(maker._words)) == POOL_WORDS


def test_a_vocabulary_larger_than_the_tokenizer_is_no_problem() -> None:
    assert PromptMaker(WordTokenizer(), 10 * len(WORDS)).text(0, 0, 3)  # padded embeddings


def test_a_tokenizer_without_words_is_refused() -> None:
    with pytest.raises(InputError, match="use --prompt"):
        PromptMaker(WithoutWords(), len(WORDS))


def test_a_length_that_special_tokens_fill_alone_is_refused() -> None:
    maker = PromptMaker(WithStart(), len(WORDS))
    with pytest.raises(InputError, match="the tokenizer alone adds 1 tokens"):
        maker.text(0, 0, 1)


def test_a_text_that_misses_its_length_is_never_given_out() -> None:
    with pytest.raises(InputError, match="no text of this length"):
        PromptMaker(Fusing(), len(WORDS)).text(0, 0, 8)


@pytest.mark.parametrize("n_tokens", [6, 7, 300])
def test_a_prompt_with_a_shared_prefix_has_its_exact_length_too(
    builtin: FastTokenizer, n_tokens: int
) -> None:  # case I1
    maker = PromptMaker(builtin, BUILTIN_VOCAB_SIZE)
    ids = [builtin.encode(maker.text(7, index, n_tokens, prefix_tokens=5)) for index in range(5)]
    assert {len(one) for one in ids} == {n_tokens}
    assert len({tuple(one[:5]) for one in ids}) == 1
    assert len({one[5] for one in ids}) == 5


def test_a_prefix_follows_from_the_seed_alone() -> None:  # case I7
    maker = PromptMaker(WordTokenizer(), len(WORDS))
    prefixes = {maker.text(seed, index, 8, 4)[:12] for seed in (1, 2) for index in range(3)}
    assert len(prefixes) == 2


def test_special_tokens_are_part_of_the_prefix() -> None:  # case I2
    tokenizer = WithStart()
    maker = PromptMaker(tokenizer, len(WORDS))
    ids = [tokenizer.encode(maker.text(0, index, 5, prefix_tokens=3)) for index in range(20)]
    assert {len(one) for one in ids} == {5}
    assert len({tuple(one[:3]) for one in ids}) == 1
    assert len({one[3] for one in ids}) > 10


def test_prompts_are_made_when_they_are_asked_for() -> None:
    made: list[int] = []

    def make(index: int) -> str:
        made.append(index)
        return str(index)

    prompts = OnDemand(make, 1_000_000)
    assert (len(prompts), prompts[7], prompts[-1]) == (1_000_000, "7", "999999")
    assert list(prompts[2:4]) == ["2", "3"]
    assert made == [7, 999_999, 2, 3]
    with pytest.raises(IndexError):
        prompts[1_000_000]


def test_a_prefix_that_comes_out_differently_is_never_given_out() -> None:  # case I1
    maker = PromptMaker(Crossing(), len(WORDS))
    assert maker.text(0, 0, 8, prefix_tokens=4)
    with pytest.raises(InputError, match="no text of this length"):
        maker.text(0, 0, 8, prefix_tokens=5)
