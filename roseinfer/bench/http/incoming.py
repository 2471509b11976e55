"""One answer as it comes in: from the reads of a connection, with their times, to a filled attempt."""

from __future__ import annotations

from typing import Final

from roseinfer.bench.http.answers import DONE, AnswerReader
from roseinfer.bench.http.connection import READ_BYTES
from roseinfer.bench.http.exchange import Failure, HttpAttempt
from roseinfer.bench.http.wire import AnswerParser

MOST_HELD_BYTES: Final = 1024 * 1024
"""Of one answer. One that is longer may have no end at all."""

LONGEST_SIGN_BYTES: Final = len(b"event: error")
"""Of what makes an answer to be understood at once; it may lie across two reads."""

_EVENT_END: Final = b"\n\n\r\n"  # and that of a chunk
_LAST_CHUNK: Final = b"0\r\n\r\n"
_MESSAGE_END: Final = b"\r\n\r\n"
_DONE: Final = DONE.encode()
_FINAL: Final = (Failure.BAD_ANSWER, Failure.STREAM_ERROR)
"""Nothing that follows can mend it, and a server need not end its answer after it."""


class Incoming:
    """Takes reads and says when the answer has ended; how it ended is in `attempt.failure`, None if it is whole.

    With `may_wait` a stream that looks like most is kept as it came, and understood by `understand`: while a client is
    busy it has better things to do. `waits` then says so, and what it will say is no more than counts and times, or
    that an event was no JSON.
    """

    __slots__ = ("_attempt", "_ended_s", "_parser", "_reader", "_reads", "_tail",
                 "has_bytes", "held_bytes", "is_reusable", "waits")  # fmt: skip

    def __init__(self, attempt: HttpAttempt, *, may_wait: bool) -> None:
        self._attempt = attempt
        self._parser = AnswerParser()
        self._reader: AnswerReader | None = None
        self._reads: list[tuple[bytes, float]] = []
        self._tail = b""  # of a read that ended within an event
        self._ended_s: float | None = None  # of an answer that waits, and looks whole
        self.has_bytes = False
        self.held_bytes = 0
        self.is_reusable = False  # its connection, once it has ended
        self.waits = may_wait

    def read(self, data: bytes, received_s: float) -> bool:
        """Whether the answer has ended with this read."""
        if not self.waits:
            self.has_bytes = True
            return self._take(data, received_s)
        if not self.has_bytes:
            self.has_bytes = True
            self.waits = _looks_like_most(data)
        self._reads.append((data, received_s))
        self.held_bytes += len(data)
        window, self._tail = self._tail + data, b""
        if (
            self.waits
            and b'"error"' not in window
            and b'"abort"' not in window
            and b"event: error" not in window
        ):
            # It cannot have ended with whole events, and it has with a last chunk behind [DONE]: in the text of a
            # stream neither can stand, its line ends are escaped.
            if data.endswith(_EVENT_END) and self.held_bytes <= MOST_HELD_BYTES:
                return False
            # More is there than one read takes: who is behind must not begin to understand, and fall back further.
            if len(data) == READ_BYTES and data[-4:] != _MESSAGE_END and self.held_bytes <= MOST_HELD_BYTES:
                self._tail = data[-LONGEST_SIGN_BYTES:]
                return False
            if data.endswith(_LAST_CHUNK) and self._has_just_said_done():
                self._ended_s = received_s
                self.is_reusable = True
                return True
        return self.understand()

    def _has_just_said_done(self) -> bool:
        return any(_DONE in data for data, _ in self._reads[-2:])

    def understand(self) -> bool:
        """Understands what was kept, and from now on all as it comes; whether the answer has ended."""
        self.waits = False
        reads, self._reads, self.held_bytes = self._reads, [], 0
        has_ended = False
        for data, received_s in reads:
            has_ended = self._take(data, received_s)
            if has_ended:
                break
        if self._ended_s is not None and not self._parser.is_complete and self._attempt.failure is None:
            self._attempt.failure = Failure.BAD_ANSWER
            self._attempt.error = "the answer went on after [DONE] and a last chunk"
        if self._attempt.failure is not None and not has_ended:
            self.settle()
        return has_ended

    def close(self, received_s: float, *, is_clean: bool) -> bool:
        """The connection is gone: whether the answer was whole all the same.

        It may end with its connection, if that ended in order; and it may lack nothing but the end of its message.
        """
        if self.understand():
            return True
        reader = self._reader
        if reader is None or not (reader.is_done or (is_clean and self._parser.end())):
            return False
        reader.end(received_s)
        return True

    def settle(self) -> None:
        """No more will come, and the answer has not ended."""
        if self._reader is not None:
            self._reader.settle()

    def _take(self, data: bytes, received_s: float) -> bool:
        parser, reader, attempt = self._parser, self._reader, self._attempt
        body = parser.feed(data)
        if reader is None and parser.status_code is not None:
            attempt.head_s = received_s
            reader = self._reader = AnswerReader(attempt, parser.status_code, parser.headers)
        if reader is not None and body:
            reader.read(body, received_s)
        if parser.is_complete and reader is not None:
            reader.end(received_s)
            self.is_reusable = parser.is_reusable
            return True
        if parser.error is not None and attempt.failure is None:
            attempt.failure, attempt.error = Failure.BAD_ANSWER, parser.error
        if parser.error is not None or attempt.failure in _FINAL:
            self.settle()
            return True
        return False


def _looks_like_most(data: bytes) -> bool:
    """The head of a stream in chunks, on a connection that stays open."""
    head = data[: data.find(b"\r\n\r\n") + 2].lower()
    return (
        head.startswith(b"http/1.1 200 ")
        and b"\r\ntransfer-encoding: chunked\r\n" in head
        and b"\r\ncontent-type: text/event-stream" in head
        and b"\r\ncontent-encoding:" not in head
        and b"close" not in head
    )
