"""The client of the in-process target: sends a workload's requests when they are due and takes what comes back.

One thread sends, one consumer takes all deliveries from one mailbox; where clients retry, a third thread sends what
comes back (`resender`). Nothing here waits for the server before the next send, unless the user asked for it: a closed
loop, or a cap on what is outstanding.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from math import inf
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self

from roseinfer.bench.load import CLOSED_LOOP_REFUSED_PAUSE_S, Load
from roseinfer.bench.permits import Permits
from roseinfer.bench.priorities import TtftDeadlines
from roseinfer.bench.resender import Offer, Resender
from roseinfer.bench.retries import Retrier
from roseinfer.bench.rows import INTERRUPTED, Attempt, unsent_because
from roseinfer.bench.termination import LONGEST_WAIT_S, Interruption, held, interruptible
from roseinfer.bench.workload import Workload
from roseinfer.errors import RoseinferError, SchedulerManagerOverloadedError
from roseinfer.manager import LONGEST_WAIT_S as QUEUE_WAIT_S
from roseinfer.manager import SchedulerManager
from roseinfer.prompt import Prompt
from roseinfer.request import SamplingParams, TokenEvent
from roseinfer.stream import RequestStream

LEAD_S: Final = 0.01
"""Time between the last preparation and the first arrival."""

PROMPTS_AHEAD: Final = 4
"""A user, made before they are needed, where nobody knows how many a closed loop will need."""

clock: Final = time.perf_counter


class Played(NamedTuple):
    """What a client saw. `t0` is time zero in clock seconds; `attempts` are in the order of arrival, of a request the
    last.

    `index_of` gives the request_index of a request id. `peak_outstanding` is counted by the client, None where it has
    no bound on it. Of a closed loop, `refill_lags_s` is how long each request's user had been free when it was sent,
    and `ran_out_s` when the last request was sent, in seconds from `t0`, None where there were more. `interrupted_s`
    (clock seconds) is when a user ended it all, None where nobody did.
    """

    attempts: list[Attempt]
    t0: float
    started_utc: str
    index_of: dict[int, int]
    peak_outstanding: int | None
    refill_lags_s: list[float]
    ran_out_s: float | None
    interrupted_s: float | None = None


class Asked(NamedTuple):
    """What a request asks for besides its prompt, as `SchedulerManager.submit` takes it."""

    params: SamplingParams
    priority: int
    ttft_deadline_s: float | None


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
        self._asked = _asked(workload, load.ttft_deadlines, ignore_eos=ignore_eos)
        is_endless = self._scheduled_s is None and load.ends_by_time_alone
        if not is_endless and not isinstance(self._prompts, list):
            self._prompts = list(self._prompts)
        self._pause_s = CLOSED_LOOP_REFUSED_PAUSE_S if self._scheduled_s is None else 0.0
        self._permits = None if load.max_concurrency is None else Permits()
        retries = load.retries
        self._resender = Resender(Retrier(retries, workload.prompt_seed)) if retries.is_on else None
        patience_s = _least(load.timeout_s, retries.per_try_timeout_s)
        self._consumer = _Consumer(manager, patience_s, self._permits, self._resender)
        self._n_sent = 0  # requests, not tries
        self._last: dict[int, Attempt] = {}  # of requests that were tried again, by request_index
        # The tries that have a stream, by request id, and the request_index of each.
        self._answered: dict[int, tuple[int, Attempt, RequestStream]] = {}
        self._refill_lags_s: list[float] = []
        self._ran_out_s: float | None = None
        self._t0 = 0.0
        self._started_utc = datetime.now(UTC)

    def __enter__(self) -> Self:
        self._consumer.start()
        if self._resender is not None:
            self._resender.start(self._send_again)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._resender is not None:
            self._resender.stop()
        self._consumer.stop()  # what is missing after an exception, an interrupt say, will not come

    def play(self) -> Played:
        """From the first arrival to the last delivery, or to a signal that interrupts it (see `termination.held`)."""
        attempts = [] if self._scheduled_s is None else [Attempt(at_s) for at_s in self._scheduled_s]
        interrupted_s = None
        between_tries: list[Attempt] = []  # when an interruption came
        with held():
            try:
                if self._scheduled_s is None:
                    self._loop(attempts)
                else:
                    self._keep_schedule(attempts)
                if self._resender is not None:
                    self._resender.finish()
                self._consumer.finish(len(self._answered))
            except Interruption:
                if self._resender is not None:
                    self._resender.stop()
                    between_tries = self._resender.waiting()
                self._consumer.give_up_all()
                self._consumer.finish(len(self._answered))
                interrupted_s = self._consumer.interrupted_s or clock()
                for attempt in attempts[self._n_sent :]:
                    if attempt.unsent_because is None:
                        attempt.gave_up_s, attempt.unsent_because = interrupted_s, INTERRUPTED
        for attempt in between_tries:
            attempt.is_interrupted = True
        for request_id, (_, attempt, stream) in self._answered.items():
            attempt.prompt_tokens = stream.prompt_tokens
            attempt.cached_tokens = stream.cached_tokens
            attempt.inflight = stream.inflight_before
            attempt.predicted_ttft_s = stream.predicted_ttft_s
            attempt.gave_up_s = self._consumer.gave_up_s.get(request_id)
            attempt.is_interrupted |= attempt.gave_up_s is not None and attempt.gave_up_s == interrupted_s
        for attempt in between_tries:
            attempt.gave_up_s = interrupted_s
        for received_s, events in self._consumer.batches:
            for request_id, its_events in _by_request(events).items():
                if request_id not in self._answered:
                    continue  # its submission failed, after an engine that died had ended it
                _, attempt, _ = self._answered[request_id]
                if attempt.gave_up_s is None or received_s <= attempt.gave_up_s:
                    attempt.deliveries.append((received_s, its_events))
        peak_outstanding = None if self._permits is None else self._permits.peak_outstanding
        return Played(
            [self._last.get(index, attempt) for index, attempt in enumerate(attempts)],
            self._t0,
            self._started_utc.isoformat(),
            {request_id: index for request_id, (index, _, _) in self._answered.items()},
            peak_outstanding,
            self._refill_lags_s,
            self._ran_out_s,
            interrupted_s,
        )

    def note_timings(self) -> None:
        """To be called once its manager is closed: the slot of what was aborted comes free after its running step."""
        for _, attempt, stream in self._answered.values():
            attempt.timings = stream.timings

    def _start(self, permits_from_s: Iterable[float]) -> float:
        """Sets time zero, a moment from now, and returns when sending ends. Permits count from time zero."""
        self._t0 = clock() + LEAD_S
        self._started_utc = datetime.now(UTC) + timedelta(seconds=LEAD_S)
        if self._permits is not None:
            self._permits.hand_out(self._t0 + from_s for from_s in permits_from_s)
        return inf if self._load.duration_s is None else self._t0 + self._load.duration_s

    def _keep_schedule(self, attempts: list[Attempt]) -> None:
        """Open loop: each request at its due time, whatever became of those before it."""
        permits, cap = self._permits, self._load.max_concurrency
        until_s = self._start([0.0] * (cap or 0))
        for attempt, prompt, asked in zip(attempts, self._prompts, self._asked, strict=True):
            # To an absolute time: being late once never shifts the next.
            due_s = self._t0 + attempt.scheduled_s
            is_due = False
            while not is_due:
                with interruptible():
                    if (early_s := due_s - clock()) > 0:
                        time.sleep(min(early_s, LONGEST_WAIT_S))
                is_due = early_s <= LONGEST_WAIT_S
            if permits is None:
                self._send(attempt, prompt, asked)
                continue
            came_s = permits.take(until_s)
            if came_s is None:
                break
            attempt.permitted_s = came_s if came_s > due_s else None
            if not self._send(attempt, prompt, asked, until_s):
                break
        for attempt in attempts[self._n_sent :]:
            attempt.gave_up_s = clock()
            attempt.unsent_because = unsent_because(cap)

    def _loop(self, attempts: list[Attempt]) -> None:
        """Closed loop: each user sends the next request when the last one has ended, or a moment after a refusal."""
        permits, starts_s = self._permits, self._load.user_starts_s
        assert permits is not None
        n_ahead = PROMPTS_AHEAD * len(starts_s)
        prompts = iter(self._prompts)
        ready = deque(islice(prompts, n_ahead))
        until_s = self._start(starts_s)
        for asked in self._asked:
            while len(ready) < n_ahead and not permits.is_free and (made := [*islice(prompts, 1)]):
                ready += made
            # However short the duration is, somebody begins: nothing follows from a run without a request.
            end_s = until_s if attempts else inf
            came_s = permits.take(end_s)
            if came_s is None:
                break
            attempt = Attempt(0.0)
            if not self._send(attempt, ready.popleft() if ready else next(prompts), asked, end_s):
                break
            assert attempt.sent_s is not None
            attempt.scheduled_s = attempt.sent_s - self._t0
            attempts.append(attempt)
            self._refill_lags_s.append(attempt.sent_s - came_s)
        else:
            self._ran_out_s = attempts[-1].scheduled_s

    def _send(self, attempt: Attempt, prompt: Prompt, asked: Asked, until_s: float = inf) -> bool:
        """False: by now it is `until_s` (clock seconds), and nothing was sent."""
        waiting, now = self._manager.waiting, clock()
        if now >= until_s:
            return False
        offer = Offer(self._n_sent, attempt, prompt, asked)
        if self._load.timeout_s is not None:
            offer.deadline_s = now + self._load.timeout_s
        if self._resender is not None:
            self._resender.begin()
        self._submit(offer, waiting, now)
        self._n_sent += 1
        return True

    def _send_again(self, offer: Offer) -> None:
        """In the resender's thread."""
        last = offer.attempt
        offer.attempt = Attempt(last.scheduled_s, earlier=[*last.earlier, last])
        last.earlier = []
        self._last[offer.index] = offer.attempt
        self._submit(offer, self._manager.waiting, clock())
        self._consumer.mailbox.wake()  # its deadline may be the next

    def _submit(self, offer: Offer, waiting: int, now: float) -> None:
        attempt, asked = offer.attempt, offer.asked
        attempt.waiting, attempt.sent_s = waiting, now
        try:
            stream = self._manager.submit(
                offer.prompt,
                asked.params,
                mailbox=self._consumer.mailbox,
                priority=asked.priority,
                ttft_deadline_s=asked.ttft_deadline_s,
            )
            attempt.returned_s = clock()
        except RoseinferError as failure:
            attempt.returned_s = clock()
            # Its traceback would keep this frame alive, and with it the manager and its KV cache.
            attempt.failure = failure.with_traceback(None)
            if isinstance(failure, SchedulerManagerOverloadedError):
                attempt.inflight = failure.inflight
            self._ended(offer, attempt.returned_s, attempt.failure, pause_s=self._pause_s)
        else:
            self._answered[stream.request_id] = offer.index, attempt, stream
            per_try_s = self._load.retries.per_try_timeout_s
            give_up_s = offer.deadline_s if per_try_s is None else min(offer.deadline_s, now + per_try_s)
            self._consumer.expect(stream.request_id, give_up_s, partial(self._ended, offer))

    def _ended(
        self,
        offer: Offer,
        at_s: float,
        failure: BaseException | None,
        *,
        is_served: bool = False,
        pause_s: float = 0.0,
    ) -> None:
        """A try has ended (clock seconds), in whatever thread knows it. Its request is over unless another follows."""
        if self._resender is not None and not self._resender.is_last(
            offer, at_s, failure, is_served=is_served
        ):
            return
        if self._permits is not None:
            self._permits.give_back(at_s + pause_s)


class Ended(Protocol):
    """Told when a try has ended (clock seconds), and of which error; unless it was served, its client gave it up."""

    def __call__(self, at_s: float, failure: BaseException | None, *, is_served: bool = False) -> None: ...


class _Consumer:
    """Takes deliveries in a thread of its own; one clock reading a delivery. It sleeps while there is nothing to do.

    A request that ends before its sender has said that it was sent counts from then on; one whose submission failed
    after the engine had ended it never does. `gave_up_s` holds by request id when it stopped waiting for a request, no
    sooner than `timeout_s` after that was sent. Those that wait for an end are closed where its thread dies.
    """

    def __init__(
        self,
        manager: SchedulerManager,
        timeout_s: float | None,
        permits: Permits | None,
        resender: Resender | None,
    ) -> None:
        self.mailbox = manager.new_mailbox()
        self.batches: list[tuple[float, list[TokenEvent]]] = []
        self.gave_up_s: dict[int, float] = {}
        self._manager = manager
        self._timeout_s = timeout_s
        self._waiting = [one for one in (permits, resender) if one is not None]
        self._lock = threading.Lock()  # guards what follows up to the empty line
        self._waited_for: dict[int, Ended] = {}  # requests sent, neither ended nor given up
        # When requests ended that are not known to be sent, and of what.
        self._early: dict[int, tuple[float, BaseException | None]] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap
        self._ended = 0

        self._is_over = threading.Event()
        self._is_to_give_up = False
        self.interrupted_s: float | None = None
        self._expected: float = inf
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="roseinfer-consumer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def expect(self, request_id: int, give_up_s: float, ended: Ended) -> None:
        """A request was sent, and is given up at `give_up_s` (clock seconds); `ended` is told when it is over."""
        with self._lock:
            self._waited_for[request_id] = ended
            if give_up_s < inf:
                heapq.heappush(self._deadlines, (give_up_s, request_id))
            early = self._early.pop(request_id, None)
            if early is not None:
                self._end(request_id, *early)

    def finish(self, expected: int) -> None:
        """Returns once `expected` streams have ended. Raises whatever its thread died of."""
        self._join(expected)
        if self._failure is not None:
            raise self._failure

    def give_up_all(self) -> None:
        """Has it take what is there by now, and give up the rest at `interrupted_s`; each is still to end."""
        self._is_to_give_up = True
        self.mailbox.wake()

    def stop(self) -> None:
        """Ends its thread, whatever is outstanding."""
        self._join(0)

    def _join(self, expected: int) -> None:
        self._expected = expected
        self.mailbox.wake()
        while not self._is_over.is_set():
            with (
                interruptible()
            ):  # not the join: a thread whose join was cut short counts as ended (CPython 3.11)
                self._is_over.wait(LONGEST_WAIT_S)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._take()
        except BaseException as error:  # else the sender would wait for permits for ever
            self._failure = error
            for one in self._waiting:
                one.close()
        finally:
            self._is_over.set()

    def _take(self) -> None:
        while self._ended < self._expected:
            gives_up = self._is_to_give_up
            events = self.mailbox.take(timeout_s=0.0 if gives_up else self._patience_s())
            now = clock()
            if events:
                self.batches.append((now, events))
            with self._lock:
                self._give_up_overdue(now)  # first: what is read after its deadline came too late
                for event in events:
                    if event.finish_reason is not None:
                        self._manager.acknowledge(event.request_id)
                        self._end(event.request_id, now, event.error)
                if gives_up:
                    self._is_to_give_up, self.interrupted_s = False, now
                    for request_id in list(self._waited_for):
                        self._give_up(request_id, now)

    def _patience_s(self) -> float:
        """Time to the next deadline, as far as it is known.

        A request that was being submitted when this was asked is known later: if it is the only one, it may be
        given up as much after its deadline as its submission took.
        """
        if self._timeout_s is None:
            return QUEUE_WAIT_S
        left_s = self._deadlines[0][0] - clock() if self._deadlines else self._timeout_s
        return min(max(0.0, left_s), QUEUE_WAIT_S)

    def _end(self, request_id: int, now: float, error: BaseException | None) -> None:
        if (ended := self._waited_for.pop(request_id, None)) is not None:
            ended(now, error, is_served=error is None)
        elif request_id not in self.gave_up_s:
            self._early[request_id] = now, error
            return
        self._ended += 1

    def _give_up_overdue(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] < now:
            _, request_id = heapq.heappop(self._deadlines)
            if request_id in self._waited_for:
                self._give_up(request_id, now)

    def _give_up(self, request_id: int, now: float) -> None:
        self.gave_up_s[request_id] = now
        self._manager.abort(request_id)
        self._waited_for.pop(request_id)(now, None)


def _asked(workload: Workload, deadlines: TtftDeadlines, *, ignore_eos: bool) -> list[Asked]:
    lengths, classes = workload.output_tokens.tolist(), workload.classes
    places = [0] * len(lengths) if classes is None else classes.places.tolist()
    deadlines_s = deadlines.of(() if classes is None else classes.names)
    known = {
        (n, place): Asked(SamplingParams(n, ignore_eos=ignore_eos), place, deadlines_s[place])
        for n, place in set(zip(lengths, places, strict=True))
    }
    return [known[one] for one in zip(lengths, places, strict=True)]


def _least(*durations_s: float | None) -> float | None:
    return min((duration_s for duration_s in durations_s if duration_s is not None), default=None)


def _by_request(events: list[TokenEvent]) -> dict[int, list[TokenEvent]]:
    grouped: dict[int, list[TokenEvent]] = {}
    for event in events:
        grouped.setdefault(event.request_id, []).append(event)
    return grouped
