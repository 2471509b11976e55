"""Policies through a SchedulerManager: what its callers see, and what it keeps."""

from __future__ import annotations

import threading

import pytest

from roseinfer.errors import PromptTooLongError, RequestFailedError, SchedulerManagerOverloadedError
from roseinfer.manager import SchedulerManager
from roseinfer.request import SamplingParams
from roseinfer.stream import RequestStream
from tests.scripted import FakeClock, ScriptedEngine, ScriptedTokenizer

SHORT = SamplingParams(2, ignore_eos=True)


def refusal_of(stream: RequestStream) -> SchedulerManagerOverloadedError:
    with pytest.raises(RequestFailedError) as caught:
        list(stream.tokens())
    refusal = caught.value.__cause__
    assert isinstance(refusal, SchedulerManagerOverloadedError)
    return refusal


def by_hand(admission: str, clock: FakeClock) -> SchedulerManager:
    return SchedulerManager(ScriptedEngine(), max_batch_size=1, admission=admission, clock=clock, start=False)


def test_an_evicted_stream_ends_with_the_refusal() -> None:  # case A27
    manager = by_hand("inflight:1+priority", FakeClock())
    low = manager.submit([1], SHORT, priority=1)
    high = manager.submit([1], SHORT, priority=0)
    while manager.step():
        pass
    refusal = refusal_of(low)
    assert (refusal.reason, refusal.stage) == ("evicted", "queued")
    assert len(list(high.tokens())) == 2
    assert (manager.inflight, len(manager._streams)) == (0, 0)


def test_an_evicted_stream_that_nobody_reads_is_forgotten() -> None:
    clock = FakeClock()
    manager = by_hand("inflight:1+priority", clock)
    low = manager.submit([1], SHORT, priority=1)
    high = manager.submit([1], SHORT, priority=0)
    while manager.step():
        pass
    assert len(list(high.tokens())) == 2
    assert low.request_id in manager._streams
    clock.now = 61.0
    manager.step()
    assert not manager._streams


def test_an_evicted_stream_may_be_closed_before_it_is_told() -> None:  # case A3
    manager = by_hand("inflight:1+priority", FakeClock())
    low = manager.submit([1], SHORT, priority=1)
    high = manager.submit([1], SHORT, priority=0)
    low.close()
    while manager.step():
        pass
    assert manager.inflight == 1
    assert len(list(high.tokens())) == 2
    assert (manager.inflight, len(manager._streams)) == (0, 0)


def test_nobody_is_evicted_for_what_cannot_run() -> None:
    manager = by_hand("inflight:1+priority", FakeClock())
    low = manager.submit([1], SHORT, priority=1)
    with pytest.raises(PromptTooLongError):
        manager.submit([1] * 5000, SHORT, priority=0)
    while manager.step():
        pass
    assert len(list(low.tokens())) == 2


def test_a_prompt_whose_tokeniser_hangs_times_out_though_nothing_runs() -> None:  # case A12
    engine, opened = ScriptedEngine(), threading.Event()

    class Hanging(ScriptedTokenizer):
        def encode(self, text: str) -> list[int]:
            if text:
                opened.wait()
            return super().encode(text)

    engine.make_tokenizer = Hanging
    with SchedulerManager(engine, admission="queue-timeout:50ms", tokenize_workers=1) as manager:
        stream = manager.submit("abc", SHORT)
        try:
            assert refusal_of(stream).reason == "queue-timeout"  # nothing else could wake the engine
        finally:
            opened.set()
