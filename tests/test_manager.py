"""SchedulerManager: who gets in. What becomes of them is in test_manager_streams.py and test_manager_ends.py."""

from __future__ import annotations

import asyncio
import threading
from array import array
from typing import Any, NamedTuple

import numpy as np
import pytest

from roseinfer.errors import (
    InputError,
    PromptTooLongError,
    RequestFailedError,
    SchedulerManagerOverloadedError,
)
from roseinfer.manager import SchedulerManager
from roseinfer.request import SamplingParams
from roseinfer.stream import RequestStream
from tests.manager_driver import (
    assert_all_slots_are_free,
    by_hand,
    finish,
    refused,
    run_in_thread,
    settle,
    turn,
)
from tests.scripted import ScriptedEngine, ScriptedTokenizer, StepGate

# ---- the limit ----


def test_with_limit_1_a_second_request_is_refused_until_the_first_stream_has_been_consumed() -> None:
    with SchedulerManager(ScriptedEngine(), max_inflight_requests=1) as manager:
        first = manager.add_request("Hello", max_new_tokens=3)
        with pytest.raises(SchedulerManagerOverloadedError):
            manager.add_request("Hello")
        assert "".join(manager.stream_text(first)) == "abc"
        second = manager.add_request("Hello", max_new_tokens=2)
        assert "".join(manager.stream_text(second)) == "ab"


def test_a_request_that_has_ended_keeps_its_slot_until_its_end_was_read() -> None:
    manager = by_hand(max_inflight_requests=1)
    stream = manager.submit([1], SamplingParams(2))
    finish(manager)
    refused(manager)
    tokens = stream.tokens()
    next(tokens)
    refused(manager)
    next(tokens)  # the last token: the slot is free though the iteration has not ended
    manager.submit([1])


class Try(NamedTuple):
    gate: StepGate
    manager: SchedulerManager
    streams: list[RequestStream]
    refusals: list[SchedulerManagerOverloadedError]


def test_of_256_requests_at_once_64_get_in_in_each_of_200_tries() -> None:  # cases A1, A2
    tries: list[Try] = []

    def begin() -> None:
        gate = StepGate()
        tries.append(Try(gate, SchedulerManager(ScriptedEngine(gate), max_inflight_requests=64), [], []))

    def end() -> None:
        gate, manager, streams, refusals = tries[-1]
        assert (len(streams), len(refusals)) == (64, 192)
        assert manager.counts().peak_inflight == 64
        assert {error.inflight for error in refusals} == {64}
        gate.opened.set()
        manager.close()

    begun, ended = threading.Barrier(64, begin), threading.Barrier(64, end)

    def client() -> None:
        for _ in range(200):
            begun.wait()
            _, manager, streams, refusals = tries[-1]
            for _ in range(4):
                try:
                    streams.append(manager.submit("Hello"))
                except SchedulerManagerOverloadedError as error:
                    refusals.append(error)
            ended.wait()

    threads = [threading.Thread(target=client) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tries) == 200


class Counting(ScriptedEngine):
    """Counts what is opened for requests."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded = 0
        self.decoders = 0
        engine = self

        class CountingTokenizer(ScriptedTokenizer):
            def encode(self, text: str) -> list[int]:
                engine.encoded += 1
                return super().encode(text)

            def new_decoder(self) -> Any:
                engine.decoders += 1
                return super().new_decoder()

        self.make_tokenizer = CountingTokenizer


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_is_opened_for_a_refused_request(workers: int) -> None:  # case A9
    engine = Counting()
    with by_hand(engine, max_inflight_requests=1, tokenize_workers=workers) as manager:
        first = manager.submit([1])
        before = manager._inbox.qsize()
        for prompt in ("Hello", [1, 2]):
            refused(manager, prompt)
        assert (engine.encoded, engine.decoders) == (0, 0)
        assert manager._inbox.qsize() == before
        assert len(manager._collector) == len(manager._streams) == 1
        first.close()
        turn(manager)
        assert manager.submit([1]).request_id == first.request_id + 1  # no id either


def test_two_workers_one_running_one_queued_twelve_clients() -> None:  # case A11
    gate, start = StepGate(), threading.Barrier(13)
    ends: list[str] = []

    def client() -> None:
        start.wait()
        try:
            ends.append("".join(manager.submit("Hello", SamplingParams(3)).text()))
        except SchedulerManagerOverloadedError:
            ends.append("refused")
        refused_all.release()

    refused_all = threading.Semaphore(0)
    with SchedulerManager(
        ScriptedEngine(gate), max_inflight_requests=2, max_active_requests=1, tokenize_workers=2
    ) as manager:
        threads = [threading.Thread(target=client) for _ in range(12)]
        for thread in threads:
            thread.start()
        start.wait()
        for _ in range(10):
            refused_all.acquire()  # though nothing has finished
        assert ends == ["refused"] * 10
        gate.opened.set()
        for thread in threads:
            thread.join()
    assert ends[10:] == ["abc"] * 2


def test_on_an_event_loop_a_refusal_waits_for_nothing() -> None:  # case A22
    """Not for the engine, which is in a step, and not for a caller who is tokenising."""
    gate, encoding, go_on = StepGate(), threading.Event(), threading.Event()

    class SlowTokenizer(ScriptedTokenizer):
        def encode(self, text: str) -> list[int]:
            encoding.set()
            go_on.wait()
            return super().encode(text)

    engine = ScriptedEngine(gate)
    engine.make_tokenizer = SlowTokenizer
    with SchedulerManager(engine, max_inflight_requests=2) as manager:

        async def main() -> None:
            for prompt in ("Hello", "Hello" * 10_000, [1, 2]):
                refused(manager, prompt)

        manager.submit([1])
        gate.entered.wait()
        with run_in_thread(lambda: manager.submit("Hello")):
            encoding.wait()
            asyncio.run(main())
            go_on.set()
        gate.opened.set()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_inflight_requests", value) for value in (0, -1, 1.5, "16", True)],  # case A10
        *[("max_batch_size", value) for value in (0, -1, 1.5, None, "8")],
        *[("max_active_requests", value) for value in (0, -1, 1.5)],
        *[("max_num_batched_tokens", value) for value in (0, 8, 1.5)],
        *[("kv_cache_tokens", value) for value in (0, -1, 1.5, True)],
        *[("tokenize_workers", value) for value in (-1, 1.5, None)],
        *[("unread_timeout_s", value) for value in (0, -1, float("nan"), "60", None)],
    ],
)
def test_sizes_that_cannot_work_are_refused_before_anything_starts(name: str, value: Any) -> None:
    engine = ScriptedEngine()
    engine.make_tokenizer = lambda: pytest.fail("a tokenizer was made")
    with pytest.raises(InputError) as caught:
        SchedulerManager(engine, **{name: value})
    assert caught.value.name == name


# ---- prompts ----


@pytest.mark.parametrize(
    "prompt",
    [
        *([True], [1, False], [1.0], ["1"], [None], [-1], [ScriptedEngine.vocab_size], [2**70], [[1]]),
        *([], b"Hello", bytearray(8), None, 5, iter([1]), np.array([1.0]), np.array([[1]]), "\ud800"),
    ],
)
def test_what_is_neither_text_nor_token_ids_is_refused_and_keeps_no_slot(prompt: Any) -> None:
    manager = by_hand(max_inflight_requests=1)
    with pytest.raises(InputError) as caught:
        manager.submit(prompt)
    assert caught.value.name == "prompt"
    assert len(str(caught.value)) < 300
    assert_all_slots_are_free(manager, 1)


@pytest.mark.parametrize(
    "prompt", [[0, 5], (0, 5), array("q", [0, 5]), array("i", [0, 5]), range(0, 10, 5), np.array([0, 5])]
)
def test_token_ids_come_as_any_sequence_of_whole_numbers(prompt: Any) -> None:
    engine = ScriptedEngine()
    seen: list[int] = []
    engine.compute = lambda plan: seen.extend(plan.spans[0].request.prompt_ids or [])
    manager = by_hand(engine)
    manager.submit(prompt, SamplingParams(1))
    turn(manager)
    assert seen == [0, 5]


def test_a_prompt_is_copied_so_that_its_owner_may_reuse_it() -> None:
    manager = by_hand()
    prompt = [1, 2, 3]
    stream = manager.submit(prompt)
    prompt.clear()
    assert stream.prompt_tokens == 3


@pytest.mark.parametrize(("new_tokens", "bound"), [(4090, "context"), (400, "KV cache")])
def test_ids_that_can_never_fit_raise_and_keep_no_slot(new_tokens: int, bound: str) -> None:  # cases A15, A17
    manager = by_hand(max_inflight_requests=1, kv_cache_tokens=256)
    with pytest.raises(PromptTooLongError) as caught:
        manager.submit([1] * 100, SamplingParams(new_tokens))
    assert caught.value.bound == bound
    assert_all_slots_are_free(manager, 1)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("text", ["x" * 300, ""])
def test_a_text_that_can_never_fit_ends_with_an_error_and_frees_its_slot(workers: int, text: str) -> None:
    with SchedulerManager(
        ScriptedEngine(), max_inflight_requests=1, kv_cache_tokens=256, tokenize_workers=workers
    ) as manager:  # cases A15, A17
        with pytest.raises(RequestFailedError) as caught:
            list(manager.submit(text).tokens())
        assert isinstance(caught.value.__cause__, InputError)
        assert "".join(manager.submit("Hello", SamplingParams(3)).text()) == "abc"
        assert manager.inflight == 0


def test_a_call_with_bad_params_fails_alone() -> None:  # case B14
    manager = by_hand(max_inflight_requests=1)
    for value in (0, -1, 1.5, "8"):
        with pytest.raises(InputError):
            manager.add_request("Hello", value)  # type: ignore[arg-type]
    assert_all_slots_are_free(manager, 1)


class Tired(ScriptedTokenizer):
    def encode(self, text: str) -> list[int]:
        raise {"error": ValueError, "interrupt": KeyboardInterrupt}[text](text)


@pytest.mark.parametrize(("text", "kind"), [("error", ValueError), ("interrupt", KeyboardInterrupt)])
def test_a_caller_whose_tokeniser_raises_keeps_no_slot(
    text: str, kind: type[BaseException]
) -> None:  # case A4
    engine = ScriptedEngine()
    engine.make_tokenizer = Tired
    manager = by_hand(engine, max_inflight_requests=1)
    for _ in range(100):
        with pytest.raises(kind):
            manager.submit(text)
    assert_all_slots_are_free(manager, 1)


@pytest.mark.parametrize(("text", "kind"), [("error", ValueError), ("interrupt", KeyboardInterrupt)])
def test_a_worker_whose_tokeniser_raises_ends_the_stream(
    text: str, kind: type[BaseException]
) -> None:  # case A4
    engine = ScriptedEngine()
    engine.make_tokenizer = Tired
    with SchedulerManager(engine, max_inflight_requests=1, tokenize_workers=1) as manager:
        for _ in range(100):
            with pytest.raises(RequestFailedError) as caught:
                list(manager.submit(text).text())
            assert isinstance(caught.value.__cause__, kind)
        assert_all_slots_are_free(manager, 1)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", ["_enter", "_tokenized"])
def test_a_caller_interrupted_anywhere_keeps_no_slot(
    where: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # case A4
    manager = by_hand(max_inflight_requests=1)
    real = getattr(manager, where)

    def interrupted(*args: Any) -> None:
        if when == "after":
            real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(manager, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.submit("Hello")
    finish(manager)
    assert len(manager._collector) == len(manager._streams) == len(manager._core) == 0
    assert_all_slots_are_free(manager, 1)


def test_each_tokenizer_serves_one_worker_and_the_callers_share_one_more() -> None:  # case B13
    users: dict[int, set[str]] = {}

    class Noting(ScriptedTokenizer):
        def encode(self, text: str) -> list[int]:
            users.setdefault(id(self), set()).add(threading.current_thread().name)
            return super().encode(text)

    engine, made = ScriptedEngine(), []
    engine.make_tokenizer = lambda: made.append(Noting()) or made[-1]  # type: ignore[func-returns-value]
    with SchedulerManager(engine, tokenize_workers=3) as manager:
        for stream in [manager.submit("Hello", SamplingParams(1)) for _ in range(50)]:
            list(stream.tokens())
    assert len(made) == 4
    assert all(len(threads) == 1 for threads in users.values())


def test_a_prompt_whose_reader_has_left_is_not_tokenised() -> None:
    began, go_on, encoded = threading.Event(), threading.Event(), []

    class Slow(ScriptedTokenizer):
        def encode(self, text: str) -> list[int]:
            began.set()
            go_on.wait()
            encoded.append(text)
            return super().encode(text)

    engine = ScriptedEngine()
    engine.make_tokenizer = Slow
    with SchedulerManager(engine, tokenize_workers=1) as manager:
        first = manager.submit("first", SamplingParams(1))
        began.wait()
        for _ in range(20):
            manager.submit("unwanted").close()
        settle(manager)
        go_on.set()
        list(first.tokens())
        list(manager.submit("last", SamplingParams(1)).tokens())
    assert encoded == ["first", "last"]
