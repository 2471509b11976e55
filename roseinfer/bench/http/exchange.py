"""What passes between the client of a server and the target that makes rows of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple


class Endpoint(NamedTuple):
    """Where requests go: `path` is that of the API call, `headers` are sent with each."""

    scheme: str
    host: str
    port: int
    path: str
    headers: tuple[tuple[str, str], ...] = ()


BUSY: Final = (429, 503)
"""Statuses of a server that has no room."""


class Failure(StrEnum):
    """Why a try has no complete answer. The server said it (STATUS, STREAM_ERROR), or nobody did."""

    STATUS = "status"  # an answer other than 2xx
    STREAM_ERROR = "stream error"  # an error event after a 200
    BAD_ANSWER = "bad answer"  # what came is no answer of this API
    REFUSED = "connection refused"
    RESET = "connection reset"  # before or in the middle of an answer
    CLOSED = "connection closed"  # the server ended its answer, or the connection, before that was whole
    RESOLVE = "host not found"
    CLIENT_LIMIT = "client limit"  # no ports or no file descriptors left here: never the server's doing
    TLS = "TLS"
    TIMEOUT = "timeout"  # the client's own deadline
    INTERRUPTED = "interrupted"  # the user had enough of the whole run
    OTHER = "other"


@dataclass(slots=True)
class HttpAttempt:
    """One try of one request, in clock seconds; None for what did not happen.

    `sent_s` is just before its bytes were handed to the system, or a connection was opened for it where none was
    free; `head_s` when its head had been read, `ended_s` when the client knew how it ended. `deliveries` are the
    events that held generated text, each at the time of the read that completed it and with its number of tokens:
    all None where the server does not say. They are kept of a try that failed, too. `retry_after_s` is what the server
    asked for.
    """

    sent_s: float | None = None
    head_s: float | None = None
    ended_s: float | None = None
    status_code: int | None = None
    failure: Failure | None = None
    error: str | None = None
    error_code: str | None = None
    reject_reason: str | None = None
    retry_after_s: float | None = None
    deliveries: list[tuple[float, int | None]] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    timings: dict[str, Any] | None = None

    @property
    def is_busy(self) -> bool:
        """The server was full: it said 429 or 503, also after its 200 if that was before any text."""
        if self.failure is Failure.STREAM_ERROR:
            return not self.deliveries and (self.error_code or "") in map(str, BUSY)
        return self.failure is Failure.STATUS and self.status_code in BUSY


@dataclass(slots=True)
class HttpRequest:
    """One offered request and its tries. `permitted_s` is None where the client's own cap did not hold it back.

    `scheduled_s` is in seconds from time zero, the other moments are clock seconds. One without tries was never sent:
    `gave_up_s` is when its client stopped, `unsent_because` why. Of one that was interrupted as it waited for its next
    try, `gave_up_s` is when that was.
    """

    scheduled_s: float
    permitted_s: float | None = None
    tries: list[HttpAttempt] = field(default_factory=list)
    inflight: int | None = None  # what this client had outstanding when it was first sent
    gave_up_s: float | None = None
    unsent_because: str | None = None


class ClientLoad(NamedTuple):
    """How busy a client was: the share of its time in which it did not wait, and that of its busiest 100 ms.

    `longest_turn_s` is the longest that it did not look for what came. What it read may have lain there for
    `p99_read_lag_s` before, by the 99th percentile over all reads: in the times that it received something at. None
    where it read nothing. Of several processes each figure is the worst.
    """

    busy_share: float
    busy_share_max_100ms: float
    longest_turn_s: float
    p99_read_lag_s: float | None


class HttpPlayed(NamedTuple):
    """What a client saw, in the order of arrival. `t0` is time zero in clock seconds.

    `resent` counts the requests that went out on an idle connection as the server closed it, and again on a new one:
    each of the two is a try. `interrupted_s` (clock seconds) is when a user ended it all, None where nobody
    did. The rest is as in `bench.client.Played`.
    """

    requests: list[HttpRequest]
    t0: float
    started_utc: str
    peak_outstanding: int
    connections: int
    resent: int
    client_load: ClientLoad
    refill_lags_s: list[float]
    ran_out_s: float | None
    interrupted_s: float | None = None
