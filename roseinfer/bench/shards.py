"""The cells of a simulation shared out among processes: each runs one at a time, and saves it."""

from __future__ import annotations

import multiprocessing
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self, TypeVar

from roseinfer.bench import measurement
from roseinfer.bench.http.parent import tie_to
from roseinfer.bench.measurement import Bench, CellRun
from roseinfer.bench.store import RunFolder
from roseinfer.bench.termination import without_ctrl_c
from roseinfer.errors import RoseinferError, RunError

END_S: Final = 5.0
"""Patience with a process that is about to end, for its exit code."""

T = TypeVar("T")


class Lost(NamedTuple):
    """Why a worker is no more; `began`: its cell may have been the reason."""

    reason: str
    began: bool = True


class Crew(Protocol):
    """Workers, each of which runs one cell at a time."""

    def has_room(self) -> bool:
        """Another cell can be begun."""
        ...

    def begin(self, run: CellRun) -> None:
        """Gives it to a worker, which is started for it if need be."""
        ...

    def wait(self) -> tuple[CellRun, Lost | None]:
        """The next of those begun that is over, and how its worker was lost; None: it is on disk.

        Raises what running or saving it raised.
        """
        ...


def share_out(todo: Sequence[CellRun], crew: Crew, begins: Callable[[CellRun], None]) -> None:
    """Runs every cell of `todo`, and one whose worker dies a second time; one that never began is not counted.

    `begins` is told of each. Raises RunError for one that two workers died of, or what running a cell raised.
    """
    left, running, told, died = deque(todo), 0, set[CellRun](), set[CellRun]()
    while left or running:
        while left and crew.has_room():
            run = left.popleft()
            if run not in told:
                told.add(run)
                begins(run)
            crew.begin(run)
            running += 1
        run, lost = crew.wait()
        running -= 1
        if lost is None:
            continue
        if lost.began:
            if run in died:
                raise RunError(
                    f"{run}: its worker died, and so did the one that ran it again ({lost.reason})"
                )
            died.add(run)
        left.appendleft(run)


def outcome(of: str, work: Callable[[], T]) -> T | Exception:
    """What `work` returns, or what it raises, as another process can be told it: an error of one clear line."""
    try:
        return work()
    except (RoseinferError, OSError) as error:
        return error
    except Exception as error:
        failure = RunError(f"{of}: {type(error).__name__}: {error}")
        failure.add_note(traceback.format_exc())
        return failure


def run_cells(
    bench: Bench,
    shards: int,
    folder: RunFolder,
    todo: Sequence[CellRun],
    begins: Callable[[CellRun], None],
) -> None:
    """Runs and saves all of `todo` in `shards` processes; nothing of them is left when this returns or raises."""
    with Shards(bench, shards, folder) as crew:
        share_out(todo, crew, begins)


class Shards:
    """Up to `shards` processes, each started when it is first needed."""

    def __init__(self, bench: Bench, shards: int, folder: RunFolder) -> None:
        self._bench = bench
        self._shards = shards
        self._folder = folder
        self._processes: dict[Pipe, BaseProcess] = {}
        self._idle: list[Pipe] = []
        self._busy: dict[Pipe, CellRun] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
        for pipe, process in self._processes.items():
            pipe.close()
            process.join()
            process.close()
        if kind is not None:
            self._folder.clear_leftovers()

    def has_room(self) -> bool:
        return len(self._busy) < self._shards

    def begin(self, run: CellRun) -> None:
        pipe = self._idle.pop() if self._idle else self._start()
        self._busy[pipe] = run
        with suppress(BrokenPipeError):  # it has died: `wait` finds that out
            pipe.send(run)

    def wait(self) -> tuple[CellRun, Lost | None]:
        pipe = wait(list(self._busy))[0]
        assert isinstance(pipe, Pipe)
        run = self._busy.pop(pipe)
        try:
            failure: Exception | None = pipe.recv()
        except (EOFError, ConnectionError):
            process = self._processes.pop(pipe)
            process.join(END_S)
            lost = Lost(f"exit code {process.exitcode}")
            process.kill()
            process.join()
            pipe.close()
            self._folder.clear_leftovers(run.key)
            return run, None if run.key in self._folder.finished_cells() else lost
        if failure is not None:
            raise failure
        self._idle.append(pipe)
        return run, None

    def _start(self) -> Pipe:
        # A fresh interpreter each: a fork would copy the locks that other threads of this process hold.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self._bench, self._folder.path), daemon=True)
        resource_tracker.ensure_running()  # else starting the process starts it, and lets SIGINT through again
        with without_ctrl_c():
            process.start()
            self._processes[ours] = process
        theirs.close()
        return ours


def _work(pipe: Pipe, bench: Bench, path: Path) -> None:
    """One process: runs and saves the cells that it is sent, and answers with what went wrong, or None."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    tie_to(parent.pid)
    folder = RunFolder.open(path)
    with suppress(EOFError):  # the parent has no more
        while True:
            run: CellRun = pipe.recv()
            pipe.send(outcome(str(run), partial(measurement.run_and_save, run, bench, folder)))
