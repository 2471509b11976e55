"""The client of a server: sends requests over HTTP when they are due, and notes when what comes back.

One thread does it all. What is due is sent first; then everything that came is read, each read with its time; then
it is taken apart, and sending looks in between. What a usual stream says is understood when all is over. So neither
a slow server nor many answers at once hold back a send.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import count, islice
from math import inf
from typing import Final, Self

import numpy as np

from roseinfer.bench.client import LEAD_S, PROMPTS_AHEAD
from roseinfer.bench.http.connection import MOST_READY, Breakage, Connection, Pool, breakage_of, many_files
from roseinfer.bench.http.exchange import (
    ClientLoad,
    Endpoint,
    Failure,
    HttpAttempt,
    HttpPlayed,
    HttpRequest,
)
from roseinfer.bench.http.incoming import Incoming
from roseinfer.bench.http.loop_load import LoopLoad
from roseinfer.bench.http.offers import Offer, Try
from roseinfer.bench.http.retries import is_worth_a_retry
from roseinfer.bench.http.wire import request_bytes, request_head
from roseinfer.bench.load import CLOSED_LOOP_REFUSED_PAUSE_S, Load
from roseinfer.bench.retries import Retrier
from roseinfer.bench.rows import INTERRUPTED, unsent_because
from roseinfer.bench.stats import percentile
from roseinfer.bench.termination import Interruption, held, interruptible
from roseinfer.no_gc import no_gc

MOST_SENDS: Final = 256
"""Sent in a row before something is read: a client that is late must not go deaf as well."""

MOST_WAITING_BYTES: Final = 128 * 1024 * 1024
"""Of all answers together that are understood when all is over. What more comes is understood as it comes."""

MOST_OPENED: Final = 8
"""Connections opened in a row before something is read, which may free some: a late client that only opens is later."""

SENT_AGAIN: Final = "while it was idle; the request was sent again on a new one"

_LOST_RACE: Final = (Failure.RESET, Failure.CLOSED)

clock: Final = time.perf_counter


class HttpClient:
    """Plays one load against one server, in a `with` that no connection outlives.

    `scheduled_s` are the due times of an open loop, in seconds from time zero; None in a closed loop. Those at once,
    and the users who are there at once, find their connections open. A request keeps its permit (of `max_concurrency`)
    over all its tries, and `timeout_s` counts from its first. `duration_s` ends the sending of new requests; what was
    sent is carried through, with its retries. Request i of this `worker` is number i * `workers` + `worker` of all.

    Raises RunError where a request cannot be written at all.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        load: Load,
        scheduled_s: list[float] | None,
        bodies: Sequence[bytes],
        retrier: Retrier,
        *,
        worker: int = 0,
        workers: int = 1,
    ) -> None:
        self._endpoint = endpoint
        self._head = request_head(endpoint)
        self._load = load
        self._scheduled_s = scheduled_s
        self._retrier = retrier
        self._worker = worker
        self._workers = workers
        is_endless = scheduled_s is None and load.ends_by_time_alone
        self._n_bodies = len(bodies)
        # What can be made before time zero is: the sender has no time to lose.
        self._bodies: Iterator[bytes] = iter(bodies if is_endless else list(bodies))
        self._n_ahead = PROMPTS_AHEAD * len(load.user_starts_s) if scheduled_s is None else 0
        self._ready: deque[bytes] = deque(islice(self._bodies, self._n_ahead))
        self._stack = ExitStack()

        self._requests: list[HttpRequest] = [HttpRequest(at_s) for at_s in scheduled_s or ()]
        self._n_sent = 0
        self._tries: dict[Connection, Try] = {}
        self._retries: list[tuple[float, int, Offer]] = []  # a heap; the number keeps equals in order
        self._numbers = count()
        self._deadlines: deque[Offer] = (
            deque()
        )  # in the order of first sending, which is that of the deadlines
        self._per_try_timeout_s = load.retries.per_try_timeout_s
        self._try_deadlines: deque[tuple[float, Try]] = (
            deque()
        )  # in the order of sending, which is theirs too
        self._free_s: list[float] | None = (
            None  # a heap: when each permit that nobody holds came free, or will
        )
        self._waiting: list[Incoming] = []  # answers that nobody had to understand at once
        self._waiting_bytes = 0
        self._outstanding = 0
        self._peak_outstanding = 0
        self._resent = 0
        self._is_reusing = False  # this server keeps connections open
        self._refill_lags_s: list[float] = []
        self._ran_out_s: float | None = None
        self._t0 = 0.0
        self._until_s = inf
        self._wake_s = -inf  # when something is to be sent next, as far as it is known

    def __enter__(self) -> Self:
        """Finds the server and opens connections ahead."""
        with ExitStack() as stack:
            stack.enter_context(many_files())
            self._pool = stack.enter_context(Pool(self._endpoint))
            self._pool.open_ahead(self._most_at_once())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def play(self, t0: float | None = None) -> HttpPlayed:
        """From time zero, a moment from now or `t0` (clock seconds), to the end of the last request.

        Or to a signal that interrupts it (see `termination.held`): then it is what there is until then.
        """
        load = self._load
        self._t0 = clock() + LEAD_S if t0 is None else t0
        started_utc = datetime.now(UTC) + timedelta(seconds=self._t0 - clock())
        if load.max_concurrency is not None:
            starts_s = load.user_starts_s if self._scheduled_s is None else [0.0] * load.max_concurrency
            self._free_s = sorted(self._t0 + start_s for start_s in starts_s)
            if load.duration_s is not None:
                self._until_s = self._t0 + load.duration_s
        interrupted_s = None
        with held(), no_gc():  # a pass over all that it keeps would take tens of milliseconds
            self._loop_load = LoopLoad(clock())
            try:
                self._run()
            except Interruption:
                interrupted_s = self._give_up_all()
            for answer in self._waiting:
                answer.understand()
        return HttpPlayed(
            self._requests,
            self._t0,
            started_utc.isoformat(),
            self._peak_outstanding,
            self._pool.opened,
            self._resent,
            self._client_load(),
            self._refill_lags_s,
            self._ran_out_s,
            interrupted_s,
        )

    def _client_load(self) -> ClientLoad:
        load = self._loop_load
        lags_s = np.frombuffer(load.read_lags_s)
        p99_s = percentile(lags_s, 99) if lags_s.size else None
        share = load.busy_share
        return ClientLoad(share, max(load.busy_share_max, share), load.longest_turn_s, p99_s)

    def _most_at_once(self) -> int:
        cap = inf if self._load.max_concurrency is None else self._load.max_concurrency
        if self._scheduled_s is None:
            at_once = self._load.user_starts_s.count(0.0)
        else:
            at_once = max(Counter(self._scheduled_s).values(), default=0)
        return int(min(at_once, cap, self._n_bodies))

    def _run(self) -> None:
        while True:
            if self._deadlines or self._try_deadlines:
                self._give_up_overdue()  # first: what is read after its deadline came too late
            if clock() >= self._wake_s:
                self._send_due()
            if not self._outstanding and self._wake_s == inf:
                return
            self._hear()

    # --- sending

    def _send_due(self) -> None:
        """Sends what is due, new requests and retries; then sees to it that the next finds a connection open.

        Sets when it is to be called again, unless something ends before.
        """
        most_opened = self._pool.opened + MOST_OPENED
        for _ in range(MOST_SENDS):
            if self._pool.opened >= most_opened:
                break
            now = clock()
            if self._retries and self._retries[0][0] <= now:
                _, _, offer = heapq.heappop(self._retries)
                if now < offer.deadline_s:
                    self._try(offer)
                else:
                    self._finish(offer, now)
            elif self._next_due_s() <= now:
                self._send_next(now)
            else:
                break
        self._wake_s = self._next_due_s()
        if self._retries:
            self._wake_s = min(self._wake_s, self._retries[0][0])
        if self._is_reusing and self._n_sent < self._n_bodies and not self._pool.has_spare:
            self._open_spare()

    def _next_due_s(self) -> float:
        """When the next request is to be sent, or will not be any more; inf: never, or when another has ended."""
        n, free_s = self._n_sent, self._free_s
        if n == self._n_bodies:
            return inf
        due_s = -inf if self._scheduled_s is None else self._t0 + self._scheduled_s[n]
        if free_s is None:
            return due_s
        permitted_s = free_s[0] if free_s else inf
        return min(max(due_s, permitted_s), self._until_s)

    def _send_next(self, now: float) -> None:
        came_s = -inf
        if self._free_s is not None:
            # However short the duration is, somebody begins: nothing follows from a run without a request.
            if now >= self._until_s and (self._scheduled_s is not None or self._n_sent):
                self._stop_sending()
                return
            came_s = heapq.heappop(self._free_s)
        if self._scheduled_s is None:
            request = HttpRequest(0.0)
            self._requests.append(request)
            body = self._ready.popleft() if self._ready else next(self._bodies)
        else:
            request = self._requests[self._n_sent]
            body = next(self._bodies)
            request.permitted_s = came_s if came_s > self._t0 + request.scheduled_s else None
        self._n_sent += 1
        request.inflight = self._outstanding
        self._outstanding += 1
        self._peak_outstanding = max(self._peak_outstanding, self._outstanding)
        offer = Offer((self._n_sent - 1) * self._workers + self._worker, request, body, inf)
        self._retrier.begin()
        sent_s = self._try(offer)
        if self._scheduled_s is None:
            request.scheduled_s = sent_s - self._t0
            self._refill_lags_s.append(sent_s - came_s)
            if self._n_sent == self._n_bodies:
                self._ran_out_s = request.scheduled_s

    def _stop_sending(self) -> None:
        for request in self._requests[self._n_sent :]:
            request.gave_up_s = clock()
            request.unsent_because = unsent_because(self._load.max_concurrency)
        self._n_bodies = self._n_sent

    def _try(self, offer: Offer, *, on_a_new_connection: bool = False) -> float:
        """Returns when it was sent (clock seconds)."""
        sent_s = clock()
        attempt = HttpAttempt(sent_s=sent_s)
        if not offer.request.tries and self._load.timeout_s is not None:
            offer.deadline_s = sent_s + self._load.timeout_s
            self._deadlines.append(offer)
        offer.request.tries.append(attempt)
        answer = Incoming(attempt, may_wait=self._waiting_bytes < MOST_WAITING_BYTES)
        exchange = Try(offer, attempt, answer)
        if self._per_try_timeout_s is not None:
            self._try_deadlines.append((sent_s + self._per_try_timeout_s, exchange))
        self._begin(exchange, None if on_a_new_connection else self._pool.take())
        return sent_s

    def _begin(self, exchange: Try, connection: Connection | None) -> None:
        """On `connection`, or on one that is opened for it."""
        try:
            if connection is None:
                connection = self._pool.open()
            connection.exchanges += 1
            exchange.offer.connection = connection
            self._tries[connection] = exchange
            connection.send(request_bytes(self._head, exchange.offer.body))
        except OSError as error:
            self._fail(exchange, breakage_of(error), clock())
        else:
            self._pool.watch(connection)

    def _open_spare(self) -> None:
        cap = self._load.max_concurrency
        if cap is None or len(self._pool.connections) < cap:
            try:
                self._pool.open_spare()
            except OSError:
                return  # whoever needs it will find out, and say so

    # --- what comes back

    def _hear(self) -> None:
        """Waits for something to come, or for something to do, and sees to what came."""
        until_s = self._waits_until_s()
        began_s = clock()
        with interruptible():
            ready = self._pool.ready(until_s)
        self._loop_load.waited(began_s, clock())
        for connection, received_s, data in self._receive(ready):
            self._see_to(connection, received_s, data)
            if clock() >= self._wake_s and self._pool.has_idle:
                self._send_due()

    def _receive(self, ready: list[Connection]) -> list[tuple[Connection, float, bytes | Breakage | None]]:
        """Reads all before any of it is understood: what waits unread has no time yet."""
        came: list[tuple[Connection, float, bytes | Breakage | None]] = []
        read_lags_s, since_s = self._loop_load.read_lags_s, self._loop_load.since_s
        for connection in ready:
            data: bytes | Breakage | None = None
            if connection.is_open:
                try:
                    data = connection.receive()
                except OSError as error:
                    data = breakage_of(error)
            now = clock()
            came.append((connection, now, data))
            read_lags_s.append(now - since_s)
        return came

    def _see_to(self, connection: Connection, received_s: float, data: bytes | Breakage | None) -> None:
        exchange = self._tries.get(connection)
        if exchange is not None and isinstance(data, bytes) and data and not connection.wants_write:
            self._read(exchange, data, received_s)
        else:
            self._take(connection, received_s, data)

    def _waits_until_s(self) -> float:
        if len(self._ready) < self._n_ahead and (made := [*islice(self._bodies, 1)]):
            self._ready += made
            return -inf
        moment_s = self._wake_s
        if self._deadlines:
            moment_s = min(moment_s, self._deadlines[0].deadline_s)
        if self._try_deadlines:
            moment_s = min(moment_s, self._try_deadlines[0][0])
        return moment_s

    def _take(self, connection: Connection, received_s: float, data: bytes | Breakage | None) -> None:
        if connection.is_closed:
            return  # given up since
        exchange = self._tries.get(connection)
        if not connection.is_open or connection.wants_write:
            try:
                connection.advance()
            except OSError as error:
                data = breakage_of(error)
            else:
                self._pool.watch(connection)
                if connection.is_open and exchange is None:
                    self._pool.give_back(connection)
                    return
        if data is None:
            return
        if exchange is None:  # closed while it was idle, or the server speaks unasked
            self._pool.drop(connection)
        elif isinstance(data, Breakage):
            self._break(connection, exchange, data, received_s)
        elif data:
            self._read(exchange, data, received_s)
        else:
            when = "in the middle of its answer" if exchange.answer.has_bytes else "before its answer"
            closed = Breakage(Failure.CLOSED, f"the server closed the connection {when}")
            self._break(connection, exchange, closed, received_s)

    def _read(self, exchange: Try, data: bytes, received_s: float) -> None:
        if exchange.answer.read(data, received_s):
            self._end(exchange, received_s)

    def _break(self, connection: Connection, exchange: Try, broken: Breakage, received_s: float) -> None:
        if exchange.answer.close(received_s, is_clean=broken.failure is Failure.CLOSED):
            self._end(exchange, received_s)
        elif connection.exchanges > 1 and broken.failure in _LOST_RACE and connection.has_lost_race:
            # The server closed a connection that was idle, as the request was on its way. That says nothing about the
            # request: it goes out again, once, as the connection is new. Both are tries, and it is counted.
            attempt, offer = exchange.attempt, exchange.offer
            attempt.failure, attempt.error, attempt.ended_s = broken.failure, SENT_AGAIN, received_s
            del self._tries[connection]
            offer.connection = None
            self._pool.drop(connection)
            self._resent += 1
            self._try(offer, on_a_new_connection=True)
        else:
            self._fail(exchange, broken, received_s)

    # --- ends

    def _fail(self, exchange: Try, broken: Breakage, at_s: float) -> None:
        """A status that had come stays what it was; so does a failure that the server had told of."""
        attempt = exchange.attempt
        if attempt.failure is None:
            attempt.failure, attempt.error = broken
        if not exchange.answer.waits:
            exchange.answer.settle()
        self._end(exchange, at_s)

    def _end(self, exchange: Try, at_s: float) -> None:
        attempt, offer, connection = exchange.attempt, exchange.offer, exchange.offer.connection
        if connection is not None:
            offer.connection = None
            del self._tries[connection]
            if exchange.answer.is_reusable and connection.has_sent_all:
                self._is_reusing = True
                self._pool.give_back(connection)
            else:
                self._pool.drop(connection)
        attempt.ended_s = at_s
        if exchange.answer.waits:
            self._waiting.append(exchange.answer)
            self._waiting_bytes += exchange.answer.held_bytes
        if attempt.failure is not None:
            delay_s = None
            if is_worth_a_retry(attempt):
                n_tries, left_s = len(offer.request.tries), offer.deadline_s - at_s
                delay_s = self._retrier.delay_s(
                    offer.index, n_tries, retry_after_s=attempt.retry_after_s, left_s=left_s
                )
            if delay_s is not None:
                heapq.heappush(self._retries, (at_s + delay_s, next(self._numbers), offer))
                self._wake_s = min(self._wake_s, at_s + delay_s)
                return
        self._finish(offer, at_s)

    def _finish(self, offer: Offer, at_s: float) -> None:
        """No try of it follows: its permit comes free."""
        offer.is_over = True
        self._outstanding -= 1
        if self._free_s is not None:
            is_refused = self._scheduled_s is None and offer.request.tries[-1].failure is not None
            free_s = at_s + (CLOSED_LOOP_REFUSED_PAUSE_S if is_refused else 0.0)
            heapq.heappush(self._free_s, free_s)
            self._wake_s = min(self._wake_s, free_s)

    def _give_up_overdue(self) -> None:
        now, deadlines = clock(), self._deadlines
        while deadlines and (deadlines[0].is_over or deadlines[0].deadline_s < now):
            offer = deadlines.popleft()
            if offer.connection is not None:
                self._give_up(self._tries[offer.connection], f"--timeout {self._load.timeout_s:g}", now)
        tries = self._try_deadlines
        while tries and (tries[0][1].attempt.ended_s is not None or tries[0][0] < now):
            _, exchange = tries.popleft()
            if exchange.attempt.ended_s is None:
                self._give_up(exchange, f"--per-try-timeout {self._per_try_timeout_s:g}", now)

    def _give_up(self, exchange: Try, bound: str, now: float) -> None:
        """Of one that lacks nothing but the end of its message only the connection is overdue."""
        assert exchange.offer.connection is not None
        overdue = Breakage(Failure.TIMEOUT, f"no whole answer within {bound}")
        self._break(exchange.offer.connection, exchange, overdue, now)

    def _give_up_all(self) -> float:
        """What is there by now, unread maybe, is all that there will be. Returns when that was (clock seconds)."""
        for _ in range(0, len(self._pool.connections), MOST_READY):
            for connection, received_s, data in self._receive(self._pool.ready(-inf)):
                self._see_to(connection, received_s, data)
        now = clock()
        for connection, exchange in list(self._tries.items()):
            self._break(connection, exchange, Breakage(Failure.INTERRUPTED, ""), now)
        for _, _, offer in self._retries:
            offer.request.gave_up_s = now
        for request in self._requests[self._n_sent : self._n_bodies]:
            request.gave_up_s = now
            request.unsent_because = INTERRUPTED
        return now
