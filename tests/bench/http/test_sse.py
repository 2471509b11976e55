"""The parser of server-sent events, fed the same streams in every way they may be cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.bench.http import sse
from roseinfer.bench.http.sse import Event, EventParser, SseError


def recorded(line_end: str) -> bytes:
    """As servers stream: a comment, a role chunk, text of several scripts, a usage chunk, the end."""
    lines = [": ping"]
    for content in ("Grüße", " 世界", " 🌹", "\\n"):
        lines += [f'data: {{"choices": [{{"delta": {{"content": "{content}"}}}}]}}', ""]
    lines += ["event: ping", "data:two", "data: lines", "id: 7", "", ": more", "", "data: [DONE]", "", ""]
    return line_end.join(lines).encode()


EXPECTED = [
    *(f'{{"choices": [{{"delta": {{"content": "{c}"}}}}]}}' for c in ("Grüße", " 世界", " 🌹", "\\n")),
    "two\nlines",
    "[DONE]",
]


def events_of(pieces: list[bytes]) -> list[Event]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_a_stream_reads_the_same_cut_anywhere(line_end: str) -> None:  # case E10
    stream = recorded(line_end)
    for cut in range(len(stream) + 1):
        assert [event.data for event in events_of([stream[:cut], stream[cut:]])] == EXPECTED


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_a_stream_reads_the_same_cut_twice(line_end: str) -> None:
    stream = recorded(line_end)[-70:]
    whole = events_of([stream])
    for i in range(len(stream) + 1):
        for j in range(i, len(stream) + 1):
            assert events_of([stream[:i], stream[i:j], stream[j:]]) == whole


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_a_stream_reads_the_same_byte_by_byte(line_end: str) -> None:
    stream = recorded(line_end)
    assert [event.data for event in events_of([bytes([byte]) for byte in stream])] == EXPECTED


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_an_event_comes_with_the_read_that_ends_it(line_end: str) -> None:
    stream = f"data: a{line_end}{line_end}".encode()
    parser = EventParser()
    came = [bool(parser.feed(bytes([byte]))) for byte in stream]
    # Two CRLF end an event at the second CR: its LF may come late.
    assert came.index(True) == len(stream) - (2 if line_end == "\r\n" else 1)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1), st.data())
def test_text_survives_any_cuts(texts: list[str], data: st.DataObject) -> None:
    stream = b"".join(b"data: %b\n\n" % json.dumps(text, ensure_ascii=False).encode() for text in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [json.loads(event.data) for event in events_of(pieces)] == texts


def test_several_events_of_one_read_come_apart() -> None:
    first, second = events_of([b"data: a\n\ndata: b\n\n"])
    assert (first.data, second.data) == ("a", "b")


def test_an_event_says_its_kind() -> None:
    assert events_of([b"event: error\ndata: x\n\ndata: y\n\n"]) == [Event("x", "error"), Event("y", "")]


def test_keep_alives_are_no_events() -> None:  # case E8
    assert events_of([b": keep-alive\n\n", b":\n\n", b"\n\n", b"event: ping\n\n", b"retry: 5\n\n"]) == []


def test_one_space_belongs_to_the_format_and_more_to_the_data() -> None:
    assert [event.data for event in events_of([b"data:a\n\n", b"data:  b\n\n"])] == ["a", " b"]


def test_a_byte_order_mark_at_the_beginning_is_passed_over() -> None:
    stream = b"\xef\xbb\xbfdata: a\n\n"
    for cut in range(len(stream)):
        assert [event.data for event in events_of([stream[:cut], stream[cut:]])] == ["a"]


def test_bytes_that_are_no_utf8_are_replaced() -> None:
    assert [event.data for event in events_of([b"data: a\xffb\n\n"])] == ["a\N{REPLACEMENT CHARACTER}b"]


@pytest.mark.parametrize("stream", [b"data: a", b"data: a\n", b"data: a\r", b"data: a\r\n"])
def test_a_last_event_without_its_empty_line_comes_at_the_end(stream: bytes) -> None:
    parser = EventParser()
    assert parser.feed(stream) == []
    assert parser.end() == [Event("a", "")]


def test_nothing_is_left_at_the_end_of_a_stream_that_ended() -> None:
    parser = EventParser()
    parser.feed(b"data: a\n\n")
    assert parser.end() == []


@pytest.mark.parametrize("piece", [b"x" * 64, b"data: " + b"x" * 57 + b"\n"])
def test_an_event_that_does_not_end_is_given_up(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MOST_EVENT_BYTES", 1000)
    with pytest.raises(SseError, match="1000"):
        events_of([piece] * 20)


def test_keep_alives_without_end_are_no_event_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MOST_EVENT_BYTES", 1000)
    parser = EventParser()
    for _ in range(200):
        assert parser.feed(b": keep-") + parser.feed(b"alive\n") == []
