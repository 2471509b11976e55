"""Ranges, with a recorder in place of NVTX."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from roseinfer.errors import InputError
from roseinfer.manager import SchedulerManager
from roseinfer.nvtx import NvtxRanges
from roseinfer.request import SamplingParams
from roseinfer.stream import RequestStream
from tests.manager_driver import by_hand, finish, turn
from tests.scripted import ScriptedEngine


class Recorder:
    """What was pushed and popped, and the ranges of requests: their names, those that are open, by handle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stack: list[str] = []
        self.phases: list[str] = []
        self.stages: list[str] = []
        self.open: dict[int, str] = {}
        self._handles = count(1)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        for name in ("range_push", "range_pop", "range_start", "range_end"):
            monkeypatch.setattr(torch.cuda.nvtx, name, getattr(self, name))

    def range_push(self, name: str) -> None:
        self.stack.append(name)
        self.phases.append("/".join(self.stack))

    def range_pop(self) -> None:
        self.stack.pop()

    def range_start(self, name: str) -> int:
        handle = next(self._handles)
        self.open[handle] = name
        self.stages.append(name)
        return handle

    def range_end(self, handle: int) -> None:
        del self.open[handle]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def read(stream: RequestStream) -> int:
    return sum(1 for _ in stream.tokens())


def test_a_step_is_planned_launched_waited_for_and_committed(recorder: Recorder) -> None:
    manager = by_hand(nvtx=True)
    manager.submit([1], SamplingParams(1))
    turn(manager)
    assert recorder.phases == ["plan", "launch", "wait", "commit"]
    assert recorder.stack == []


def test_an_overlapped_step_is_launched_before_the_last_one_is_waited_for(recorder: Recorder) -> None:
    manager = by_hand(nvtx=True, overlap_steps=True)
    manager.submit([1], SamplingParams(2))
    finish(manager)
    assert recorder.phases == [
        *("plan", "launch", "plan", "launch", "wait", "commit"),
        *("plan", "wait", "commit", "plan"),
    ]


def test_token_ids_wait_are_computed_and_decode(recorder: Recorder) -> None:
    manager = by_hand(nvtx=True)
    stream = manager.submit([1], SamplingParams(3))
    assert recorder.stages == ["request 0 queue"]
    turn(manager)
    assert recorder.stages == ["request 0 queue", "request 0 prefill", "request 0 decode"]
    assert [*recorder.open.values()] == ["request 0 decode"]
    finish(manager)
    assert recorder.open == {}
    assert read(stream) == 3


def test_a_text_is_tokenised_first(recorder: Recorder) -> None:
    manager = by_hand(nvtx=True)
    manager.submit("ab", SamplingParams(1))
    assert recorder.stages == ["request 0 tokenize", "request 0 queue"]
    finish(manager)
    assert recorder.stages[2:] == ["request 0 prefill"]  # its only token ends it
    assert recorder.open == {}


def test_a_prompt_in_chunks_is_in_one_prefill(recorder: Recorder) -> None:
    manager = by_hand(nvtx=True, max_batch_size=1, max_num_batched_tokens=4)
    manager.submit([1] * 11, SamplingParams(1))
    finish(manager)
    assert recorder.stages == ["request 0 queue", "request 0 prefill"]


def test_an_abort_ends_the_stage_that_it_meets(recorder: Recorder) -> None:
    manager = by_hand(nvtx=True, max_batch_size=1)
    running, waiting = manager.submit([1], SamplingParams(9)), manager.submit([1], SamplingParams(9))
    turn(manager)
    waiting.close()
    running.close()
    finish(manager)
    assert recorder.open == {}
    assert recorder.stages[-1] == "request 0 decode"


def test_a_step_that_fails_closes_what_it_opened(recorder: Recorder) -> None:
    def fail(plan: object) -> None:
        raise RuntimeError("scripted failure")

    manager = by_hand(ScriptedEngine(compute=fail), nvtx=True)
    manager.submit([1], SamplingParams(9))
    finish(manager)
    assert (recorder.stack, recorder.open) == ([], {})


def test_threads_leave_nothing_open(recorder: Recorder) -> None:
    with SchedulerManager(ScriptedEngine(), nvtx=True, tokenize_workers=2) as manager:
        streams = [manager.submit("a" * n, SamplingParams(4)) for n in range(1, 20)]
        streams[7].close()
        assert [read(stream) for stream in streams if stream is not streams[7]] == [4] * 18
    assert (recorder.stack, recorder.open) == ([], {})


def test_without_cuda_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(InputError, match="nvtx True: this torch was built without CUDA"):
        by_hand(nvtx=True)


def test_torch_has_these_functions() -> None:
    for name in ("range_push", "range_pop", "range_start", "range_end"):
        assert callable(getattr(torch.cuda.nvtx, name))


def test_a_stage_after_the_end_is_none(recorder: Recorder) -> None:
    marks = NvtxRanges()
    marks.advance(3, "queue")
    assert recorder.stages == []
