"""The simulated client: which request may be sent, and when. No clock: `now` is an argument.

A schedule is kept whatever the server does, unless the client's own cap binds: then requests are held back, first
come first served. In a closed loop there is no schedule: every request is held back, and a user who is free takes
the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from roseinfer.bench.retries import Retrier
    from roseinfer.sim.virtual import Arrival, Sent


class ClientRules(NamedTuple):
    """What a client does besides sending on schedule. Seconds; None: not asked for.

    max_concurrency: requests outstanding at a time. user_starts_s: a closed loop of so many users, and when each of
    them comes. refused_pause_s: from a refusal to the next request of that user. duration_s: where requests wait for
    permits, none is sent from then on. timeout_s: from sending to giving up. retrier makes who decides what is tried
    again, and per_try_timeout_s is from sending a try to giving that up.
    """

    max_concurrency: int | None = None
    user_starts_s: tuple[float, ...] | None = None
    refused_pause_s: float = 0.0
    duration_s: float | None = None
    timeout_s: float | None = None
    retrier: Callable[[], Retrier] | None = None
    per_try_timeout_s: float | None = None

    @property
    def is_closed(self) -> bool:
        return self.user_starts_s is not None


class Story:
    """A request whose client may try it again: its tries so far, of which `n_open` are not over for the engine.

    `is_over`: no other try follows.
    """

    __slots__ = ("arrival", "is_over", "n_open", "permitted_s", "tries")

    def __init__(self, arrival: Arrival, permitted_s: float) -> None:
        self.arrival = arrival
        self.permitted_s = permitted_s
        self.tries: list[Sent] = []
        self.n_open = 0
        self.is_over = False


class Comebacks:
    """A client's requests that it may try again, by index, until all of their tries are over."""

    def __init__(self, rules: ClientRules, retrier: Retrier) -> None:
        self._retrier = retrier
        self._timeout_s = float("inf") if rules.timeout_s is None else rules.timeout_s
        self._per_try_s = float("inf") if rules.per_try_timeout_s is None else rules.per_try_timeout_s
        self._stories: dict[int, Story] = {}

    def due(self, index: int) -> tuple[int, Arrival, float]:
        """A request whose next try is due, as `Outbox.take` gives it."""
        return index, self._stories[index].arrival, self._stories[index].permitted_s

    def next_try(self, due: tuple[int, Arrival, float]) -> int:
        """The number of the try that is sent now; the story of its request begins with 1."""
        index, arrival, permitted_s = due
        story = self._stories.get(index)
        if story is None:
            story = self._stories[index] = Story(arrival, permitted_s)
            self._retrier.begin()
        return len(story.tries) + 1

    def add(self, sent: Sent) -> None:
        """This try was sent."""
        story = self._stories[sent.index]
        story.tries.append(sent)
        story.n_open += 1
        sent.attempt = len(story.tries)

    def give_up_s(self, sent: Sent) -> float:
        """When the client gives this try up; inf: never."""
        return min(self._end_s(sent), sent.sent_s + self._per_try_s)

    def served(self, sent: Sent) -> None:
        self._stories[sent.index].is_over = True

    def again_s(self, sent: Sent, failure: BaseException | None, now: float) -> float | None:
        """When a try that has failed is followed by another; None: the request is over for its client."""
        left_s = self._end_s(sent) - now
        delay_s = self._retrier.delay_after_s(failure, sent.index, sent.attempt, left_s)
        if delay_s is None:
            self._stories[sent.index].is_over = True
            return None
        return now + delay_s

    def end(self, sent: Sent) -> Sent | None:
        """The engine is done with this try. The last one of its request, with the others, where all of it is over."""
        story = self._stories[sent.index]
        story.n_open -= 1
        if story.n_open or not story.is_over:
            return None
        del self._stories[sent.index]
        *earlier, last = story.tries
        last.earlier = tuple(earlier)
        return last

    def _end_s(self, sent: Sent) -> float:
        return self._stories[sent.index].tries[0].sent_s + self._timeout_s


class Outbox:
    """The requests that are held back, and the permits that nobody holds.

    `held` is what was due and not sent yet; a closed loop takes from `arrivals` what it comes to. A request is
    outstanding from `take` to `ended` or `refused`.
    """

    def __init__(self, rules: ClientRules, arrivals: Iterator[tuple[int, Arrival]]) -> None:
        self.held: deque[tuple[int, Arrival]] = deque()
        self.taken = 0
        self.outstanding = 0
        self.peak = 0
        self._rules = rules
        self._arrivals = arrivals
        # When each permit came free, first come first; None: no bound.
        self._permits_s: deque[float] | None = None
        if rules.is_closed:
            self._permits_s = deque()
        elif rules.max_concurrency is not None:
            self._permits_s = deque([0.0] * rules.max_concurrency)
        self._until_s = float("inf") if rules.duration_s is None else rules.duration_s

    def take(self, now: float) -> tuple[int, Arrival, float] | None:
        """The request to send now, None while there is none or it has to wait.

        Of a request there is its place in the workload, the arrival, and since when nothing but the sender's other
        work keeps it from being sent.
        """
        permits_s = self._permits_s
        if permits_s is None:
            if not self.held:
                return None
            index, arrival = self.held.popleft()
            permitted_s = arrival.time_s
        else:
            if not permits_s or now >= self._until_s or not self._has_one():
                return None
            index, arrival = self.held.popleft()
            free_s = permits_s.popleft()
            if self._rules.is_closed:
                arrival, permitted_s = arrival._replace(time_s=now), now
            else:
                permitted_s = max(arrival.time_s, free_s)
        self.taken += 1
        self.outstanding += 1
        self.peak = max(self.peak, self.outstanding)
        return index, arrival, permitted_s

    def ended(self, now: float) -> None:
        """A request is over for the client, however it ended."""
        self.outstanding -= 1
        if self._permits_s is not None:
            self._permits_s.append(now)

    def refused(self, now: float) -> float | None:
        """A request was refused. When its permit comes free: `add_user` has to be told then; None: it is free."""
        if not self._rules.is_closed:
            self.ended(now)
            return None
        self.outstanding -= 1
        return now + self._rules.refused_pause_s

    def add_user(self, now: float) -> None:
        """A user of a closed loop comes, or comes back."""
        assert self._permits_s is not None
        self._permits_s.append(now)

    def is_exhausted(self) -> bool:
        """Every request of the workload was taken."""
        return not self._has_one()

    def _has_one(self) -> bool:
        if not self.held:
            # Of a schedule, whoever plays it puts requests in when they are due.
            following = next(self._arrivals, None) if self._rules.is_closed else None
            if following is None:
                return False
            self.held.append(following)
        return True
