"""The client of the in-process target: sends a workload's requests when they are due and takes what comes back.

One thread sends, one consumer takes all deliveries from one mailbox. Nothing here waits for the server before the
next send, unless the user asked for it: a closed loop, or a cap on what is outstanding.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import islice
from math import inf
from types import TracebackType
from typing import Final, NamedTuple, Self

from roseinfer.bench.load import CLOSED_LOOP_REFUSED_PAUSE_S, Load
from roseinfer.bench.rows import Attempt, unsent_because
from roseinfer.bench.workload import Workload
from roseinfer.errors import RoseinferError, SchedulerManagerOverloadedError
from roseinfer.manager import LONGEST_WAIT_S, Prompt, SchedulerManager
from roseinfer.request import SamplingParams, TokenEvent
from roseinfer.stream import RequestStream

LEAD_S: Final = 0.01
"""Time between the last preparation and the first arrival."""

PROMPTS_AHEAD: Final = 4
"""A user, made before they are needed, where nobody knows how many a closed loop will need."""

clock: Final = time.perf_counter


class Played(NamedTuple):
    """What a client saw. `t0` is time zero in clock seconds; `attempts` are in the order of arrival.

    `index_of` gives the request_index of a request id. `peak_outstanding` is counted by the client, None where it has
    no bound on it. Of a closed loop, `refill_lags_s` is how long each request's user had been free when it was sent,
    and `ran_out_s` when the last request was sent, in seconds from `t0`, None where there were more.
    """

    attempts: list[Attempt]
    t0: float
    started_utc: str
    index_of: dict[int, int]
    peak_outstanding: int | None
    refill_lags_s: list[float]
    ran_out_s: float | None


class Client:
    """Plays one workload, in a `with` that its consumer's thread does not outlive.

    Raises InputError where a prompt cannot be made.
    """

    def __init__(
        self, manager: SchedulerManager, load: Load, workload: Workload, *, ignore_eos: bool
    ) -> None:
        self._manager = manager
        self._load = load
        self._scheduled_s = None if workload.scheduled_s is None else workload.scheduled_s.tolist()
        self._prompts = workload.prompts
        # What can be made before time zero is: the sender has no time to lose.
        lengths = workload.output_tokens.tolist()
        params = {n: SamplingParams(n, ignore_eos=ignore_eos) for n in set(lengths)}
        self._params = [params[n] for n in lengths]
        is_endless = self._scheduled_s is None and load.ends_by_time_alone
        if not is_endless and not isinstance(self._prompts, list):
            self._prompts = list(self._prompts)
        self._pause_s = CLOSED_LOOP_REFUSED_PAUSE_S if self._scheduled_s is None else 0.0
        self._permits = None if load.max_concurrency is None else Permits()
        self._consumer = _Consumer(manager, load.timeout_s, self._permits)
        self._streams: list[RequestStream | None] = []  # of the requests sent, None for those that got none
        self._refill_lags_s: list[float] = []
        self._ran_out_s: float | None = None
        self._t0 = 0.0
        self._started_utc = datetime.now(UTC)

    def __enter__(self) -> Self:
        self._consumer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._consumer.stop()  # what is missing after an exception, an interrupt say, will not come

    def play(self) -> Played:
        """From the first arrival to the last delivery."""
        if self._scheduled_s is None:
            attempts = self._loop()
        else:
            attempts = self._keep_schedule(self._scheduled_s)
        index_of = {
            stream.request_id: index for index, stream in enumerate(self._streams) if stream is not None
        }
        self._consumer.finish(len(index_of))
        for attempt, stream in zip(
            attempts, self._streams, strict=False
        ):  # those at the end may not have been sent
            if stream is not None:
                attempt.timings = stream.timings
                attempt.prompt_tokens = stream.prompt_tokens
                attempt.cached_tokens = stream.cached_tokens
                attempt.inflight = stream.inflight_before
                attempt.gave_up_s = self._consumer.gave_up_s.get(stream.request_id)
        for received_s, events in self._consumer.batches:
            for request_id, its_events in _by_request(events).items():
                index = index_of.get(request_id)
                if index is None:  # its submission failed, after an engine that died had ended it
                    continue
                attempt = attempts[index]
                if attempt.gave_up_s is None or received_s <= attempt.gave_up_s:
                    attempt.deliveries.append((received_s, its_events))
        peak_outstanding = None if self._permits is None else self._permits.peak_outstanding
        return Played(
            attempts,
            self._t0,
            self._started_utc.isoformat(),
            index_of,
            peak_outstanding,
            self._refill_lags_s,
            self._ran_out_s,
        )

    def _start(self, permits_from_s: Iterable[float]) -> float:
        """Sets time zero, a moment from now, and returns when sending ends. Permits count from time zero."""
        self._t0 = clock() + LEAD_S
        self._started_utc = datetime.now(UTC) + timedelta(seconds=LEAD_S)
        if self._permits is not None:
            self._permits.hand_out(self._t0 + from_s for from_s in permits_from_s)
        return inf if self._load.duration_s is None else self._t0 + self._load.duration_s

    def _keep_schedule(self, scheduled_s: list[float]) -> list[Attempt]:
        """Open loop: each request at its due time, whatever became of those before it."""
        permits, cap = self._permits, self._load.max_concurrency
        attempts = [Attempt(at_s) for at_s in scheduled_s]
        until_s = self._start([0.0] * (cap or 0))
        for attempt, prompt, params in zip(attempts, self._prompts, self._params, strict=True):
            # To an absolute time: being late once never shifts the next.
            due_s = self._t0 + attempt.scheduled_s
            if (early_s := due_s - clock()) > 0:
                time.sleep(early_s)
            if permits is None:
                self._send(attempt, prompt, params)
                continue
            came_s = permits.take(until_s)
            if came_s is None:
                break
            attempt.permitted_s = came_s if came_s > due_s else None
            if not self._send(attempt, prompt, params, until_s):
                break
        for attempt in attempts[len(self._streams) :]:
            attempt.gave_up_s = clock()
            attempt.unsent_because = unsent_because(cap)
        return attempts

    def _loop(self) -> list[Attempt]:
        """Closed loop: each user sends the next request when the last one has ended, or a moment after a refusal."""
        permits, starts_s = self._permits, self._load.user_starts_s
        assert permits is not None
        n_ahead = PROMPTS_AHEAD * len(starts_s)
        prompts = iter(self._prompts)
        ready = deque(islice(prompts, n_ahead))
        attempts: list[Attempt] = []
        until_s = self._start(starts_s)
        for params in self._params:
            while len(ready) < n_ahead and not permits.is_free and (made := [*islice(prompts, 1)]):
                ready += made
            # However short the duration is, somebody begins: nothing follows from a run without a request.
            end_s = until_s if attempts else inf
            came_s = permits.take(end_s)
            if came_s is None:
                break
            attempt = Attempt(0.0)
            if not self._send(attempt, ready.popleft() if ready else next(prompts), params, end_s):
                break
            assert attempt.sent_s is not None
            attempt.scheduled_s = attempt.sent_s - self._t0
            attempts.append(attempt)
            self._refill_lags_s.append(attempt.sent_s - came_s)
        else:
            self._ran_out_s = attempts[-1].scheduled_s
        return attempts

    def _send(self, attempt: Attempt, prompt: Prompt, params: SamplingParams, until_s: float = inf) -> bool:
        """False: by now it is `until_s` (clock seconds), and nothing was sent."""
        waiting, now = self._manager.waiting, clock()
        if now >= until_s:
            return False
        attempt.waiting, attempt.sent_s = waiting, now
        try:
            stream = self._manager.submit(prompt, params, mailbox=self._consumer.mailbox)
            attempt.returned_s = clock()
        except RoseinferError as failure:
            attempt.returned_s = clock()
            # Its traceback would keep this frame alive, and with it the manager and its KV cache.
            attempt.failure = failure.with_traceback(None)
            if isinstance(failure, SchedulerManagerOverloadedError):
                attempt.inflight = failure.inflight
            self._streams.append(None)
            if self._permits is not None:
                self._permits.give_back(attempt.returned_s + self._pause_s)
        else:
            self._streams.append(stream)
            self._consumer.expect(stream.request_id, attempt.sent_s)
        return True


class Permits:
    """A bound on what a client has outstanding. One thread takes permits, in order; any gives them back.

    Counts what is outstanding on its own: `peak_outstanding` is the most that there ever was.
    """

    def __init__(self) -> None:
        self.peak_outstanding = 0
        self._outstanding = 0
        self._free_s: list[float] = []  # a heap: when each permit that nobody holds comes free, or came
        self._is_closed = False
        self._condition = threading.Condition()

    def hand_out(self, times_s: Iterable[float]) -> None:
        """Permits to begin with, each from its time on (clock seconds)."""
        self._free_s = sorted(times_s)

    @property
    def is_free(self) -> bool:
        """`take` would return a permit at once."""
        with self._condition:
            return bool(self._free_s) and self._free_s[0] <= clock()

    def take(self, until_s: float) -> float | None:
        """Waits for a permit and returns when it came free (both in clock seconds).

        None once it is `until_s`, whatever is free then, or after `close`.
        """
        with self._condition:
            while True:
                now = clock()
                next_s = self._free_s[0] if self._free_s else inf
                if now >= until_s or self._is_closed:
                    return None
                if next_s <= now:
                    self._outstanding += 1
                    self.peak_outstanding = max(self.peak_outstanding, self._outstanding)
                    return heapq.heappop(self._free_s)
                self._condition.wait(min(next_s - now, until_s - now, LONGEST_WAIT_S))

    def give_back(self, at_s: float) -> None:
        """A request has ended, however it did; its permit comes free at `at_s` (clock seconds)."""
        with self._condition:
            self._outstanding -= 1
            heapq.heappush(self._free_s, at_s)
            self._condition.notify()

    def close(self) -> None:
        """No permit will come any more."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()


class _Consumer:
    """Takes deliveries in a thread of its own; one clock reading a delivery. It sleeps while there is nothing to do.

    A request that ends before its sender has said that it was sent counts from then on; one whose submission failed
    after the engine had ended it never does. `gave_up_s` holds by request id when it stopped waiting for a request,
    `timeout_s` after that was sent.
    """

    def __init__(self, manager: SchedulerManager, timeout_s: float | None, permits: Permits | None) -> None:
        self.mailbox = manager.new_mailbox()
        self.batches: list[tuple[float, list[TokenEvent]]] = []
        self.gave_up_s: dict[int, float] = {}
        self._manager = manager
        self._timeout_s = timeout_s
        self._permits = permits
        self._lock = threading.Lock()  # guards what follows up to the empty line
        self._waited_for: set[int] = set()  # requests sent, neither ended nor given up
        self._early_s: dict[int, float] = {}  # when requests ended that are not known to be sent
        self._deadlines: deque[tuple[float, int]] = deque()  # of requests in the order of sending
        self._ended = 0

        self._expected: float = inf
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="roseinfer-consumer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def expect(self, request_id: int, sent_s: float) -> None:
        """A request was sent, and counts against its deadline from now on."""
        with self._lock:
            self._waited_for.add(request_id)
            if self._timeout_s is not None:
                self._deadlines.append((sent_s + self._timeout_s, request_id))
            ended_s = self._early_s.pop(request_id, None)
            if ended_s is not None:
                self._end(request_id, ended_s)

    def finish(self, expected: int) -> None:
        """Returns once `expected` streams have ended. Raises whatever its thread died of."""
        self._join(expected)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Ends its thread, whatever is outstanding."""
        self._join(0)

    def _join(self, expected: int) -> None:
        self._expected = expected
        self.mailbox.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._take()
        except BaseException as error:  # else the sender would wait for permits for ever
            self._failure = error
            if self._permits is not None:
                self._permits.close()

    def _take(self) -> None:
        while self._ended < self._expected:
            events = self.mailbox.take(timeout_s=self._patience_s())
            now = clock()
            if events:
                self.batches.append((now, events))
            with self._lock:
                self._give_up_overdue(now)  # first: what is read after its deadline came too late
                for event in events:
                    if event.finish_reason is not None:
                        self._manager.acknowledge(event.request_id)
                        self._end(event.request_id, now)

    def _patience_s(self) -> float:
        """Time to the next deadline, as far as it is known.

        A request that was being submitted when this was asked is known later: if it is the only one, it may be
        given up as much after its deadline as its submission took.
        """
        if self._timeout_s is None:
            return LONGEST_WAIT_S
        left_s = self._deadlines[0][0] - clock() if self._deadlines else self._timeout_s
        return min(max(0.0, left_s), LONGEST_WAIT_S)

    def _end(self, request_id: int, now: float) -> None:
        if request_id in self._waited_for:
            self._leave(request_id, now)
        elif request_id not in self.gave_up_s:
            self._early_s[request_id] = now
            return
        self._ended += 1

    def _give_up_overdue(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] < now:
            _, request_id = self._deadlines.popleft()
            if request_id in self._waited_for:
                self.gave_up_s[request_id] = now
                self._manager.abort(request_id)
                self._leave(request_id, now)

    def _leave(self, request_id: int, now: float) -> None:
        self._waited_for.remove(request_id)
        if self._permits is not None:
            self._permits.give_back(now)


def _by_request(events: list[TokenEvent]) -> dict[int, list[TokenEvent]]:
    grouped: dict[int, list[TokenEvent]] = {}
    for event in events:
        grouped.setdefault(event.request_id, []).append(event)
    return grouped
