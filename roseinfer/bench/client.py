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
from math import inf
from types import TracebackType
from typing import Final, NamedTuple, Self

from roseinfer.bench.load import Load
from roseinfer.bench.rows import Attempt
from roseinfer.bench.workload import Workload
from roseinfer.errors import RoseinferError, SchedulerManagerOverloadedError
from roseinfer.manager import LONGEST_WAIT_S, Prompt, SchedulerManager
from roseinfer.request import SamplingParams, TokenEvent
from roseinfer.stream import RequestStream

LEAD_S: Final = 0.01
"""Time between the last preparation and the first arrival."""

clock: Final = time.perf_counter


class Played(NamedTuple):
    """What a client saw. `t0` is time zero in clock seconds; `attempts` are in the order of arrival.

    `index_of` gives the request_index of a request id. `peak_outstanding` is counted by the client, None where it has
    no bound on it.
    """

    attempts: list[Attempt]
    t0: float
    started_utc: str
    index_of: dict[int, int]
    peak_outstanding: int | None


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
        if self._scheduled_s is not None and not isinstance(self._prompts, list):
            self._prompts = list(self._prompts)
        self._permits = None if load.max_concurrency is None else Permits()
        self._consumer = _Consumer(manager, load.timeout_s, self._permits)
        self._streams: list[RequestStream | None] = []  # of the requests sent, None for those that got none
        self._t0 = 0.0
        self._started_utc = datetime.now(UTC)

    def __enter__(self) -> Self:
        self._consumer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._consumer.finish(0)  # what is missing after an exception, an interrupt say, will not come

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
                attempt.inflight = stream.inflight_before
                attempt.gave_up_s = self._consumer.gave_up_s.get(stream.request_id)
        for received_s, events in self._consumer.batches:
            for request_id, its_events in _by_request(events).items():
                attempt = attempts[index_of[request_id]]
                if attempt.gave_up_s is None or received_s <= attempt.gave_up_s:
                    attempt.deliveries.append((received_s, its_events))
        peak_outstanding = None if self._permits is None else self._permits.peak_outstanding
        return Played(attempts, self._t0, self._started_utc.isoformat(), index_of, peak_outstanding)

    def _start(self, permits_from_s: list[float]) -> float:
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
            if permits is not None:
                came_s = permits.take(until_s)
                if came_s is None:
                    break
                attempt.permitted_s = came_s if came_s > due_s else None
            self._send(attempt, prompt, params)
        for attempt in attempts[len(self._streams) :]:
            attempt.gave_up_s = clock()
            attempt.unsent_because = f"not sent: --max-concurrency {cap} was reached until --duration ended"
        return attempts

    def _loop(self) -> list[Attempt]:
        """Closed loop: each user sends the next request when the last one has ended."""
        permits, users, prompts, total = (
            self._permits,
            self._load.max_concurrency,
            self._prompts,
            len(self._params),
        )
        assert permits is not None
        assert users is not None
        ready = deque(prompts[index] for index in range(min(users, total)))
        attempts: list[Attempt] = []
        until_s = self._start(user_starts_s(users, self._load.ramp_s or 0.0))
        for index, params in enumerate(self._params):
            if permits.take(until_s) is None or clock() >= until_s:
                break
            attempt = Attempt(0.0)
            self._send(attempt, ready.popleft(), params)
            assert attempt.sent_s is not None
            attempt.scheduled_s = attempt.sent_s - self._t0
            attempts.append(attempt)
            if index + users < total:
                ready.append(prompts[index + users])
        return attempts

    def _send(self, attempt: Attempt, prompt: Prompt, params: SamplingParams) -> None:
        attempt.waiting = self._manager.waiting
        attempt.sent_s = clock()
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
                self._permits.give_back(attempt.returned_s)
        else:
            self._streams.append(stream)
            self._consumer.expect(stream.request_id, attempt.sent_s)


class Permits:
    """A bound on what a client has outstanding. One thread takes permits, in order; any gives them back.

    Counts what is outstanding on its own: `peak_outstanding` is the most that there ever was.
    """

    def __init__(self) -> None:
        self.peak_outstanding = 0
        self._outstanding = 0
        self._free_s: list[float] = []  # a heap: when each permit that nobody holds comes free, or came
        self._condition = threading.Condition()

    def hand_out(self, times_s: Iterable[float]) -> None:
        """Permits to begin with, each from its time on (clock seconds)."""
        self._free_s = sorted(times_s)

    def take(self, until_s: float) -> float | None:
        """Waits for a permit and returns when it came free; None if none does before `until_s` (both clock seconds)."""
        with self._condition:
            while True:
                now = clock()
                next_s = self._free_s[0] if self._free_s else inf
                if next_s <= now and next_s < until_s:
                    self._outstanding += 1
                    self.peak_outstanding = max(self.peak_outstanding, self._outstanding)
                    return heapq.heappop(self._free_s)
                if now >= until_s:
                    return None
                self._condition.wait(min(next_s - now, until_s - now, LONGEST_WAIT_S))

    def give_back(self, at_s: float) -> None:
        """A request has ended, however it did."""
        with self._condition:
            self._outstanding -= 1
            heapq.heappush(self._free_s, at_s)
            self._condition.notify()


def user_starts_s(users: int, ramp_s: float) -> list[float]:
    """When each user of a closed loop starts: max(1, floor(users * t / ramp)) of them are there at time t."""
    return [0.0, *(k * ramp_s / users for k in range(2, users + 1))]


class _Consumer:
    """Takes deliveries in a thread of its own; one clock reading a delivery. It sleeps while there is nothing to do.

    `gave_up_s` holds by request id when it stopped waiting for a request, `timeout_s` after that was sent.
    """

    def __init__(self, manager: SchedulerManager, timeout_s: float | None, permits: Permits | None) -> None:
        self.mailbox = manager.new_mailbox()
        self.batches: list[tuple[float, list[TokenEvent]]] = []
        self.gave_up_s: dict[int, float] = {}
        self._manager = manager
        self._timeout_s = timeout_s
        self._permits = permits
        self._deadlines: deque[tuple[float, int]] = deque()  # of requests in the order of sending
        self._over: set[int] = set()  # requests that ended and whose deadline is still in there
        self._expected: float = inf
        self._thread = threading.Thread(target=self._take, name="roseinfer-consumer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def expect(self, request_id: int, sent_s: float) -> None:
        """A request was sent, and counts against its deadline from now on."""
        if self._timeout_s is not None:
            self._deadlines.append((sent_s + self._timeout_s, request_id))

    def finish(self, expected: int) -> None:
        """Returns once `expected` streams have ended."""
        self._expected = expected
        self.mailbox.wake()
        self._thread.join()

    def _take(self) -> None:
        ended = 0
        while ended < self._expected:
            events = self.mailbox.take(timeout_s=self._patience_s())
            now = clock()
            if events:
                self.batches.append((now, events))
            for event in events:
                if event.finish_reason is not None:
                    self._manager.acknowledge(event.request_id)
                    ended += 1
                    if event.request_id not in self.gave_up_s:
                        self._over_now(event.request_id, now)
            self._give_up_overdue(now)

    def _patience_s(self) -> float:
        """Time to the next deadline. Of a request that is sent meanwhile it is later than `timeout_s` from now."""
        if self._timeout_s is None:
            return LONGEST_WAIT_S
        left_s = self._deadlines[0][0] - clock() if self._deadlines else self._timeout_s
        return min(max(0.0, left_s), LONGEST_WAIT_S)

    def _over_now(self, request_id: int, now: float) -> None:
        if self._timeout_s is not None:
            self._over.add(request_id)
        if self._permits is not None:
            self._permits.give_back(now)

    def _give_up_overdue(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = self._deadlines.popleft()
            if request_id in self._over:
                self._over.remove(request_id)
            else:
                self.gave_up_s[request_id] = now
                self._manager.abort(request_id)
                if self._permits is not None:
                    self._permits.give_back(now)


def _by_request(events: list[TokenEvent]) -> dict[int, list[TokenEvent]]:
    grouped: dict[int, list[TokenEvent]] = {}
    for event in events:
        grouped.setdefault(event.request_id, []).append(event)
    return grouped
