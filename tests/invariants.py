"""What must hold of every core after every step, whoever drives it. `conftest.py` watches all cores of all tests.

`Core.check` looks at the books as they stand; here stands what only those know who saw the events before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import pytest

from roseinfer.core import Core
from roseinfer.errors import InvariantError
from roseinfer.manager import SchedulerManager
from roseinfer.request import Request, TokenEvent
from roseinfer.sim.virtual import _Simulation
from roseinfer.ticket import TicketState


class Watch:
    """Follows the requests of one core from submission to their terminal events."""

    def __init__(self) -> None:
        self.open: dict[int, Request] = {}  # submitted, and no terminal event yet

    def saw(self, core: Core, events: Sequence[TokenEvent]) -> None:
        """Raises InvariantError unless each request ends once, in time, and with no more tokens than it asked for."""
        for event in events:
            request = self.open.get(event.request_id)
            if request is None:
                raise InvariantError(
                    f"request {event.request_id}: an event after the terminal one, or before any"
                )
            check_request(request)
            if event.finish_reason is not None:
                del self.open[event.request_id]
        if list(self.open) != core.live_ids():
            raise InvariantError("a live request has had its terminal event, or one that ended has had none")


def check_request(request: Request) -> None:
    """Raises InvariantError unless its tokens are as many as its stamps, no more than asked for, and in order."""
    n_tokens = len(request.output_ids)
    if n_tokens > request.params.max_new_tokens:
        raise InvariantError(f"request {request.request_id}: {n_tokens} tokens")
    if n_tokens != len(request.token_times_s):
        raise InvariantError(
            f"request {request.request_id}: {n_tokens} tokens, {len(request.token_times_s)} stamps"
        )
    stages = (request.reserved_s, request.tokenized_s, request.first_scheduled_s, *request.token_times_s)
    happened = [at_s for at_s in (*stages, request.finished_s) if at_s is not None]
    if any(later < earlier for earlier, later in pairwise(happened)):
        raise InvariantError(
            f"request {request.request_id}: a stage before the one that it follows: {happened}"
        )


def check_drained(manager: SchedulerManager) -> None:
    """Raises InvariantError if a manager with nothing to do keeps anything but slots of ended, unread streams."""
    live, inflight = manager._core.live_ids(), manager.inflight
    # `close` aborts: those streams have no slot any more, but their readers may still come for the end.
    holding = [s for s in manager._streams.values() if s._request.ticket.state is not TicketState.RELEASED]
    if sorted(manager._collector._mailboxes) != live:
        raise InvariantError("the collector keeps a mailbox of a request that has ended, or has lost one")
    if inflight != len(holding):
        raise InvariantError(f"{inflight} slots for {len(holding)} streams")
    if not live and manager._core.scheduler.kv_cache.used_tokens:
        raise InvariantError("KV blocks of requests that have ended")


CHANGES = ("submit", "tokenized", "take_dropped", "commit", "fail_step", "fail", "abort")
"""Methods of Core that return events."""


class Watched(NamedTuple):
    """What the watch found, as it comes."""

    violations: list[InvariantError]
    managers: WeakSet[SchedulerManager]  # some tests ask whether theirs is garbage


def watch_all(patch: pytest.MonkeyPatch) -> Watched:
    """Watches every core made from now on: its events, and its books between the turns of what drives it.

    Not within a turn, where the check would count as time that the engine took. `CoreDriver` checks by itself.

    A violation is raised where it is found, too, but there a test may take it for a failure that it expects.
    """
    found = Watched([], WeakSet())
    watches: WeakKeyDictionary[Core, Watch] = WeakKeyDictionary()

    @contextmanager
    def noting_violations() -> Iterator[None]:
        try:
            yield
        except InvariantError as violation:
            found.violations.append(violation)
            raise

    def watched(change: Callable[..., list[TokenEvent]]) -> Callable[..., list[TokenEvent]]:
        @wraps(change)
        def changed(core: Core, *args: Any) -> list[TokenEvent]:
            watch = watches.setdefault(core, Watch())
            if change.__name__ == "submit":
                watch.open[args[0].request_id] = args[0]
            events = change(core, *args)
            with noting_violations():
                watch.saw(core, events)
            return events

        return changed

    def checked(turn: Callable[..., Any], core_of: Callable[[Any], Core]) -> Callable[..., Any]:
        @wraps(turn)
        def turned(driver: Any, *args: Any) -> Any:
            result = turn(driver, *args)
            with noting_violations():
                core_of(driver).check()
            return result

        return turned

    @wraps(SchedulerManager.__init__)
    def made(manager: SchedulerManager, *args: Any, **kwargs: Any) -> None:
        make(manager, *args, **kwargs)
        found.managers.add(manager)

    make = SchedulerManager.__init__
    patch.setattr(SchedulerManager, "__init__", made)
    patch.setattr(SchedulerManager, "step", checked(SchedulerManager.step, lambda manager: manager._core))
    patch.setattr(_Simulation, "_start_step", checked(_Simulation._start_step, lambda run: run.core))
    for name in CHANGES:
        patch.setattr(Core, name, watched(getattr(Core, name)))
    return found
