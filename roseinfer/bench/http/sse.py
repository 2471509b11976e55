"""Server-sent events: from the bytes of a stream to the data of its events, however the bytes are cut."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

MOST_EVENT_BYTES: Final = 8 * 1024 * 1024

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_BOM: Final = b"\xef\xbb\xbf"


class SseError(ValueError):
    """An event that does not end."""


class Event(NamedTuple):
    """`kind` is what its `event` field says, "" mostly."""

    data: str
    kind: str


class EventParser:
    """Takes events from the body of an answer. Comments, ids and events without data are passed over.

    Bytes that are no UTF-8 become U+FFFD, as the format has it.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of a line that has not ended
        self._parts_bytes = 0
        self._event_bytes = 0  # of the lines of an event that has not ended
        self._skips_lf = False  # the last byte was a CR that ended a line
        self._is_first = True
        self._data: list[bytes] = []
        self._kind = b""

    def feed(self, body: bytes) -> list[Event]:
        """The events that end in `body`. Raises SseError."""
        if body[:6] == b"data: " and body[-2:] == b"\n\n" and not (self._event_bytes or self._parts_bytes):
            # As nearly every server writes nearly every read: events of one line each.
            datas = body[6:-2].decode("utf-8", "replace").split("\n\ndata: ")
            if body.count(b"\n") == 2 * len(datas) and b"\r" not in body:
                self._is_first = False
                self._skips_lf = False  # what it would skip is no "data: "
                return [Event(data, "") for data in datas]
        return self._lines(body)

    def end(self) -> list[Event]:
        """The whole body was there: the last event, where a server left out the empty line after it."""
        return self._lines(b"\n\n") if self._is_amid_event() else []

    def _is_amid_event(self) -> bool:
        return bool(self._event_bytes or self._parts_bytes)

    def _lines(self, body: bytes) -> list[Event]:
        if self._skips_lf and body:
            self._skips_lf = False
            body = body.removeprefix(b"\n")
        if not body:
            return []
        *ended, rest = _LINE_END.split(body)
        events: list[Event] = []
        if ended:
            self._skips_lf = body[-1:] == b"\r"
            ended[0] = b"".join([*self._parts, ended[0]])
            self._parts, self._parts_bytes = [], 0
            for line in ended:
                self._line(line, events)
        if rest:
            self._parts.append(rest)
            self._parts_bytes += len(rest)
        if self._event_bytes + self._parts_bytes > MOST_EVENT_BYTES:
            raise SseError(f"an event of more than {MOST_EVENT_BYTES} bytes")
        return events

    def _line(self, line: bytes, events: list[Event]) -> None:
        if self._is_first:
            self._is_first = False
            line = line.removeprefix(_BOM)
        if not line:
            if self._data:
                events.append(_event(b"\n".join(self._data), self._kind))
            self._data, self._kind, self._event_bytes = [], b"", 0
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._event_bytes += len(line) + 1
        elif name == b"event":
            self._kind = value
            self._event_bytes += len(line) + 1


def _event(data: bytes, kind: bytes) -> Event:
    return Event(data.decode("utf-8", "replace"), kind.decode("utf-8", "replace"))
