"""The exceptions that roseinfer raises.

RoseinferError
 ├── InputError (ValueError)              a flag or argument with a value that cannot work
 │    ├── PromptTooLongError              a prompt that could never be served here
 │    └── ModelError                      a model that cannot be found, read or computed
 ├── SchedulerManagerOverloadedError      refused by admission (RuntimeError)
 ├── ManagerClosedError                   the manager is closed, or its engine is dead (RuntimeError)
 ├── RequestFailedError                   a stream that ended with an error (RuntimeError)
 ├── RunError                             a measurement that could not be carried out (RuntimeError)
 └── InvariantError                       bookkeeping that contradicts itself: a bug (AssertionError)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final


class RoseinferError(Exception):
    """Base of everything that this package raises on purpose. Pickles, so that it can cross processes."""

    def __reduce__(self) -> tuple[Callable[..., RoseinferError], tuple[object, ...]]:
        # What an exception does by itself calls its class with `args`, which need not be what the class takes.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(
    kind: type[RoseinferError], args: tuple[object, ...], attributes: dict[str, object]
) -> RoseinferError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class InputError(RoseinferError, ValueError):
    """A flag or argument holds a value that cannot work.

    `name` is the flag or argument as its user wrote it, `value` what stood there.
    """

    def __init__(self, name: str, value: object, why: str) -> None:
        super().__init__(f"{name} {value!r}: {why}")
        self.name = name
        self.value = value
        self.why = why


def check_whole(name: str, value: object, at_least: int) -> None:
    """Raises InputError unless `value` is an int of at least so much. True and 1.0 are no whole numbers here."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise InputError(name, value, f"must be a whole number >= {at_least}")


class PromptTooLongError(InputError):
    """`prompt_tokens + max_new_tokens` exceeds `bound_tokens`, the size of `bound` ("context" or "KV cache")."""

    def __init__(self, prompt_tokens: int, max_new_tokens: int, bound: str, bound_tokens: int) -> None:
        super().__init__(
            "prompt",
            f"{prompt_tokens} tokens",
            f"with max_new_tokens={max_new_tokens} it needs {prompt_tokens + max_new_tokens} tokens,"
            f" the {bound} holds {bound_tokens}",
        )
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.bound = bound
        self.bound_tokens = bound_tokens


class ModelError(InputError):
    """A model that cannot be found, read, or computed faithfully by this engine."""


TOKENS_NEVER_FIT: Final = "tokens-never-fits"
"""The reason of a refusal that no waiting mends: the request alone asks for more than the token budget."""


QUEUE_TIMEOUT: Final = "queue-timeout"
"""The reason of one that was dropped because its first token could not be there in time any more."""


SLO_NEVER_MET: Final = "slo-never-met"
"""The same of a request that would miss the goal alone as well."""

NEVER: Final = (TOKENS_NEVER_FIT, SLO_NEVER_MET)
"""Reasons that no waiting mends: who comes back is refused again."""


class SchedulerManagerOverloadedError(RoseinferError, RuntimeError):
    """Admission refused the request, or dropped it while it waited.

    `limit` is the configured bound that was met and `measured` what stood against it, in the unit of the `reason`:
      inflight, aimd, gradient  requests in flight when the request came; the latter two are limits that move
      tokens, tokens-never-fits tokens held when the request came, beside the `asked` of its own; the last: it alone
                                asks for more than the budget, and no waiting mends it
      slo, slo-never-met        seconds: the goal and the TTFT that it is expected to keep; the last: alone as well
      queue-timeout             seconds: how long it might wait, or when its first token was due, and had waited
      codel                     seconds: the target and the delay of the request
      evicted                   classes: the request's own, and 0; its place went to a higher one
    `inflight` is always the requests in flight. `stage` is "submit", where nothing was tokenised, queued or opened for
    it, or "queued"; then its stream ends with this error. `retry_after_s` is the expected time until there is room,
    None while that is unknown, or never.
    """

    def __init__(
        self,
        *,
        limit: float,
        inflight: int,
        reason: str,
        retry_after_s: float | None,
        measured: float | None = None,
        asked: int = 1,
        stage: str = "submit",
    ) -> None:
        super().__init__(limit, inflight, reason, retry_after_s)
        self.limit = limit
        self.inflight = inflight
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.measured = inflight if measured is None else measured
        self.asked = asked
        self.stage = stage

    def __str__(self) -> str:
        # Made when somebody reads it: a refusal has to be cheap.
        limit, measured = self.limit, self.measured
        match self.reason:
            case "tokens-never-fits":
                what = f"asks for {self.asked} tokens in flight, the limit alone is {limit}"
            case "tokens":
                held = f"{measured} held, {self.asked} more asked for"
                what = f"too many tokens in flight: {held}, limit {limit}"
            case "slo" | "slo-never-met":
                what = f"its first token is predicted in {measured:.3g} s, the goal is {limit:g} s"
            case "queue-timeout":
                what = f"after a wait of {measured:.3g} s its {limit:.3g} s were over, or too short"
            case "codel":
                what = f"it waited for {measured:.3g} s in a queue that stands, the target is {limit:g} s"
            case "evicted":
                what = f"a request of a higher class took its place, {self.inflight} in flight"
            case _:
                what = f"too many inflight requests: {self.inflight} in flight, limit {limit}"
        return f"{what} ({self.reason})"


class ManagerClosedError(RoseinferError, RuntimeError):
    """The manager takes no more requests: it was closed, or its engine died (then `__cause__` says of what)."""


class RequestFailedError(RoseinferError, RuntimeError):
    """A stream ended with an error; `__cause__` is the exception that ended it."""

    def __init__(self, request_id: int, message: str) -> None:
        super().__init__(f"request {request_id} failed: {message}")
        self.request_id = request_id


class RunError(RoseinferError, RuntimeError):
    """A measurement could not be carried out, or its files could not be written."""


class InvariantError(RoseinferError, AssertionError):
    """Bookkeeping contradicts itself. Always a bug in roseinfer, never a user's mistake."""
