"""Plays a load with one client, or with several processes of which each has its share, on one clock."""

from __future__ import annotations

import gc
import heapq
import multiprocessing
import os
import pickle
import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from typing import Final

from roseinfer.bench.client import LEAD_S
from roseinfer.bench.http.answers import count_single_tokens
from roseinfer.bench.http.client import HttpClient, clock
from roseinfer.bench.http.exchange import ClientLoad, Endpoint, HttpPlayed, HttpRequest
from roseinfer.bench.http.parent import tie_to
from roseinfer.bench.load import Load
from roseinfer.bench.retries import Retrier
from roseinfer.bench.termination import LONGEST_WAIT_S, Interruption, held, interruptible, without_ctrl_c
from roseinfer.errors import InputError, RunError

_STOP: Final = signal.SIGUSR1
"""What interrupts a worker: a terminal sends SIGINT to all of us, and a second one must not come so."""


def play(
    endpoint: Endpoint,
    load: Load,
    scheduled_s: list[float] | None,
    bodies: Sequence[bytes],
    retrier: Retrier,
    *,
    client_workers: int = 1,
) -> HttpPlayed:
    """Sends `bodies` as `scheduled_s` (seconds from time zero; None: a closed loop) and `load` have it.

    Each of `client_workers` is a client of its own, with its own budget of retries. Whatever servers do is in what it
    returns. Raises RunError where a run is impossible, and InputError where
    workers are to share what cannot be shared: a closed loop, or a cap on what is outstanding.
    """
    if client_workers > 1:
        if scheduled_s is None or load.max_concurrency is not None:
            why = "cannot share --max-concurrency: its permits are one queue"
            raise InputError("--client-workers", client_workers, why)
        played = _play_shares(endpoint, load, scheduled_s, bodies, retrier, client_workers)
    else:
        with held(), ExitStack() as stack:
            with interruptible():
                client = HttpClient(endpoint, load, scheduled_s, bodies, retrier)
                stack.enter_context(client)
            played = client.play()
    count_single_tokens(request.tries[-1] for request in played.requests if request.tries)
    return played


def _play_shares(
    endpoint: Endpoint,
    load: Load,
    scheduled_s: list[float],
    bodies: Sequence[bytes],
    retrier: Retrier,
    n: int,
) -> HttpPlayed:
    with held(), ExitStack() as stack:
        workers: dict[Pipe, BaseProcess] = {}
        with interruptible():
            for worker in range(n):
                share = (
                    endpoint,
                    load,
                    scheduled_s[worker::n],
                    list(bodies[worker::n]),
                    retrier,
                    worker,
                    n,
                )
                _start(share, workers, stack)
            for pipe in workers:
                _hear(pipe)  # it has its connections
        t0 = clock() + LEAD_S
        started = datetime.now(UTC) + timedelta(seconds=LEAD_S)
        for pipe in workers:
            pipe.send(t0)
        shares: list[HttpPlayed] = []
        try:
            for pipe in workers:
                has_come = False
                while not has_come:
                    with interruptible():
                        has_come = pipe.poll(LONGEST_WAIT_S)
                shares.append(_hear(pipe))
        except Interruption:
            for process in workers.values():
                assert process.pid is not None
                os.kill(process.pid, _STOP)  # one that has ended is there until it is joined
            shares += [_hear(pipe) for pipe in list(workers)[len(shares) :]]
        return _merged(shares, t0, started)


def _start(share: tuple[object, ...], workers: dict[Pipe, BaseProcess], stack: ExitStack) -> None:
    # A fresh interpreter each: a fork would copy the locks that other threads of this process hold.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    stack.callback(ours.close)
    process = context.Process(target=_work, args=(theirs, *share), daemon=True)
    resource_tracker.ensure_running()  # else starting the process starts it, and lets SIGINT through again
    try:
        with without_ctrl_c():
            process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RunError(f"a worker cannot be given its share: {error}") from error
    finally:
        theirs.close()
    stack.callback(_end, process)
    workers[ours] = process


def _work(pipe: Pipe, endpoint: Endpoint, load: Load, scheduled_s: list[float], bodies: list[bytes],
          retrier: Retrier, worker: int, workers: int) -> None:  # fmt: skip
    """One worker: says when it is ready, is told time zero, returns what it played, until `_STOP` at most."""
    signal.signal(_STOP, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to the whole group, it is for the parent to act on
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    tie_to(parent.pid, signal.SIGKILL)
    gc.freeze()
    with suppress(KeyboardInterrupt), held((_STOP,)):
        with HttpClient(
            endpoint, load, scheduled_s, bodies, retrier, worker=worker, workers=workers
        ) as client:
            pipe.send(None)
            played = client.play(pipe.recv())
        pipe.send(played)


def _hear(pipe: Pipe) -> HttpPlayed:
    try:
        said: HttpPlayed = pipe.recv()
    except (EOFError, ConnectionError) as error:
        raise RunError("a process of --client-workers has died") from error
    return said


def _end(process: BaseProcess) -> None:
    """However far it is. One that has played its share is about to end on its own."""
    process.kill()
    process.join()
    process.close()


def _merged(shares: list[HttpPlayed], t0: float, started: datetime) -> HttpPlayed:
    """Request i of worker k of n is request i * n + k of all."""
    requests = [
        shares[i % len(shares)].requests[i // len(shares)]
        for i in range(sum(len(share.requests) for share in shares))
    ]
    return HttpPlayed(
        requests,
        t0,
        started.isoformat(),
        _count_outstanding(requests),
        sum(share.connections for share in shares),
        sum(share.resent for share in shares),
        _worst(shares),
        [],
        None,
        min((share.interrupted_s for share in shares if share.interrupted_s is not None), default=None),
    )


def _worst(shares: list[HttpPlayed]) -> ClientLoad:
    loads = [share.client_load for share in shares]
    return ClientLoad(
        max(load.busy_share for load in loads),
        max(load.busy_share_max_100ms for load in loads),
        max(load.longest_turn_s for load in loads),
        max((load.p99_read_lag_s for load in loads if load.p99_read_lag_s is not None), default=None),
    )


def _count_outstanding(requests: list[HttpRequest]) -> int:
    """Sets what all workers together had outstanding when each was sent, and returns the most there ever was."""
    ends_s: list[float] = []
    peak = 0
    for request in sorted((request for request in requests if request.tries), key=_sent_s):
        while ends_s and ends_s[0] <= _sent_s(request):
            heapq.heappop(ends_s)
        request.inflight = len(ends_s)
        ended_s = request.tries[-1].ended_s
        assert ended_s is not None
        heapq.heappush(ends_s, ended_s)
        peak = max(peak, len(ends_s))
    return peak


def _sent_s(request: HttpRequest) -> float:
    sent_s = request.tries[0].sent_s
    assert sent_s is not None
    return sent_s
