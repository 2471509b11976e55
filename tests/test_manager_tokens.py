"""SchedulerManager with a budget of tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from roseinfer.errors import InputError, RequestFailedError, SchedulerManagerOverloadedError
from roseinfer.manager import SchedulerManager
from roseinfer.request import SamplingParams
from tests.manager_driver import by_hand, finish, turn
from tests.scripted import ScriptedEngine, ScriptedTokenizer, StepGate


def refused(
    manager: SchedulerManager, prompt: str | Sequence[int], new_tokens: int = 1
) -> SchedulerManagerOverloadedError:
    with pytest.raises(SchedulerManagerOverloadedError) as caught:
        manager.submit(prompt, SamplingParams(new_tokens))
    return caught.value


class Words(ScriptedTokenizer):
    """A token is a word, behind one that the tokenizer puts in front."""

    def encode(self, text: str) -> list[int]:
        return [2, *[ord(word[0]) for word in text.split()]]


def wordy() -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.make_tokenizer = Words
    return engine


@pytest.mark.parametrize(("new_tokens", "gets_in"), [(9, True), (10, True), (11, False)])
def test_prompt_and_most_new_tokens_count(new_tokens: int, gets_in: bool) -> None:  # case A7
    manager = by_hand(admission="tokens:100")
    manager.submit([1] * 70, SamplingParams(10))
    if gets_in:
        manager.submit([1] * 10, SamplingParams(new_tokens))
    else:
        error = refused(manager, [1] * 10, new_tokens)
        assert (error.reason, error.limit, error.measured, error.asked) == ("tokens", 100, 80, 21)
    manager.close()


def test_a_request_holds_its_tokens_until_its_end_was_read() -> None:
    manager = by_hand(admission="tokens:10")
    stream = manager.submit([1] * 8, SamplingParams(2))
    turn(manager)
    assert refused(manager, [1]).measured == 10  # 9 of them are computed
    finish(manager)
    assert refused(manager, [1]).measured == 10
    assert len(list(stream.tokens())) == 2
    manager.submit([1] * 9, SamplingParams(1))
    manager.close()
    assert manager.counts().held_tokens == 0


def test_a_text_counts_its_bytes_until_it_is_tokenised() -> None:
    manager = SchedulerManager(wordy(), admission="tokens:40", start=False)
    text = "one two three"  # 13 bytes, 4 tokens
    manager.submit(text, SamplingParams(6))
    assert manager.counts().held_tokens == 1 + 13 + 6  # and what the tokenizer adds
    assert refused(manager, [1] * 21).reason == "tokens"
    turn(manager)
    assert manager.counts().held_tokens == 4 + 6
    manager.submit([1] * 29, SamplingParams(1))
    assert manager.counts().held_tokens == 40
    manager.close()
    assert manager.counts().held_tokens == 0


def test_a_text_longer_than_the_budget_gets_in_alone_and_runs_if_its_tokens_fit() -> None:
    manager = SchedulerManager(wordy(), admission="tokens:20", start=False)
    text = "aaaaaaaaaa bbbbbbbbbb cccccccccc"  # 32 bytes, 4 tokens
    other = manager.submit([1], SamplingParams(1))
    assert refused(manager, text).reason == "tokens"  # it may fit: nobody knows yet
    finish(manager)
    list(other.tokens())
    stream = manager.submit(text, SamplingParams(2))
    finish(manager)
    assert len(list(stream.tokens())) == 2
    assert manager.counts().peak_held_tokens == 20
    manager.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_text_that_can_never_fit_the_budget_ends_with_the_refusal_and_frees_its_slot(workers: int) -> None:
    with SchedulerManager(wordy(), admission="tokens:20", tokenize_workers=workers) as manager:
        stream = manager.submit("a " * 30, SamplingParams(2))
        with pytest.raises(RequestFailedError) as caught:
            list(stream.tokens())
        error = caught.value.__cause__
        assert isinstance(error, SchedulerManagerOverloadedError)
        assert (error.reason, error.stage, error.limit, error.asked) == (
            *("tokens-never-fits", "queued", 20, 33),
        )
        assert stream.timings.first_scheduled_s is None
        assert "".join(manager.submit("a b", SamplingParams(2)).text()) == "ab"


def test_token_ids_that_can_never_fit_the_budget_are_refused_at_once() -> None:
    manager = by_hand(admission="tokens:20")
    assert refused(manager, [1] * 20).reason == "tokens-never-fits"
    assert manager.counts().reserved == 0
    manager.close()


def test_nothing_is_opened_for_a_request_without_tokens() -> None:  # case A9
    encoded: list[str] = []

    class Counting(ScriptedTokenizer):
        def encode(self, text: str) -> list[int]:
            encoded.append(text)
            return super().encode(text)

    engine = ScriptedEngine()
    engine.make_tokenizer = Counting
    manager = SchedulerManager(engine, admission="tokens:10", start=False)
    manager.submit([1] * 9, SamplingParams(1))
    del encoded[:]
    refused(manager, "Hello")
    assert (encoded, len(manager._streams)) == ([], 1)
    manager.close()


def test_both_forms_of_a_limit_are_refused_before_anything_starts() -> None:
    with pytest.raises(InputError, match="max_inflight_requests 4"):
        SchedulerManager(ScriptedEngine(), max_inflight_requests=4, admission="tokens:10")
    with pytest.raises(InputError, match="admission 'tokens:many'"):
        SchedulerManager(ScriptedEngine(), admission="tokens:many")


def test_of_64_requests_at_once_exactly_those_get_in_that_the_budget_holds() -> None:  # cases A1, A2, A23
    for _ in range(20):
        gate, barrier = StepGate(), threading.Barrier(16)
        manager = SchedulerManager(ScriptedEngine(gate), admission="inflight:40+tokens:200")
        reasons: list[str] = []

        def ask(
            manager: SchedulerManager = manager,
            barrier: threading.Barrier = barrier,
            reasons: list[str] = reasons,
        ) -> None:
            barrier.wait()
            for _ in range(4):
                try:
                    manager.submit([1] * 9, SamplingParams(1))
                except SchedulerManagerOverloadedError as error:
                    reasons.append(error.reason)

        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = manager.counts()
        assert (counts.inflight, counts.peak_held_tokens, reasons) == (20, 200, ["tokens"] * 44)
        gate.opened.set()
        manager.close()
