from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from roseinfer.errors import InputError, RequestFailedError
from roseinfer.request import FinishReason, TokenEvent
from roseinfer.stream import Mailbox, RequestStream, Token
from tests.scripted import EOS, ScriptedDecoder
from tests.stream_desk import Desk, a_token, an_end

# ---- collector and mailboxes ----


def test_events_reach_the_mailbox_of_their_request_in_order() -> None:
    desk = Desk()
    boxes = [Mailbox(desk.collector) for _ in range(2)]
    for request_id, box in enumerate(boxes):
        desk.collector.open(request_id, box)
    events = [a_token(1, "a"), a_token(0, "b"), a_token(1, "c")]
    desk.publish(*events)
    assert boxes[1].take() == [events[0], events[2]]
    assert boxes[0].take() == [events[1]]
    assert boxes[0].take(timeout_s=0.0) == []


def test_requests_may_share_a_mailbox() -> None:
    desk = Desk()
    box = Mailbox(desk.collector)
    for request_id in range(2):
        desk.collector.open(request_id, box)
    events = [a_token(1, "a"), a_token(0, "b")]
    desk.publish(*events)
    desk.publish(an_end(0))
    assert box.take() == [*events, an_end(0)]


def test_the_collector_forgets_a_request_with_its_terminal_event() -> None:  # case B9
    desk = Desk()
    desk.stream(0)
    desk.stream(1)
    desk.publish(an_end(0))
    assert len(desk.collector) == 1
    desk.publish(an_end(1))
    assert len(desk.collector) == 0


def test_a_blocked_reader_wakes_when_something_is_published() -> None:
    desk = Desk()
    box = Mailbox(desk.collector)
    desk.collector.open(0, box)
    taken: list[TokenEvent] = []
    reader = threading.Thread(target=lambda: taken.extend(box.take()))
    reader.start()
    desk.waits.waiting.acquire()
    desk.publish(a_token(0, "a"))
    reader.join()
    assert taken == [a_token(0, "a")]


def test_a_blocked_reader_can_be_woken_with_nothing() -> None:
    desk = Desk()
    box = Mailbox(desk.collector)
    taken: list[list[TokenEvent]] = []
    reader = threading.Thread(target=lambda: taken.append(box.take()))
    reader.start()
    desk.waits.waiting.acquire()
    box.wake()
    reader.join()
    assert taken == [[]]


def test_a_reader_that_is_woken_before_it_waits_does_not_wait_once() -> None:
    desk = Desk()
    box = Mailbox(desk.collector)
    desk.collector.open(0, box)
    box.wake()
    assert box.take() == []
    box.wake()
    desk.publish(a_token(0, "a"))
    assert box.take() == [a_token(0, "a")]
    assert box.take(timeout_s=0.0) == []


def test_all_blocked_readers_wake_that_a_step_has_something_for() -> None:
    desk = Desk()
    streams = [desk.stream(i) for i in range(4)]
    readers = [threading.Thread(target=list, args=(stream.tokens(),)) for stream in streams]
    for reader in readers:
        reader.start()
    for _ in readers:
        desk.waits.waiting.acquire()
    desk.publish(*[an_end(i) for i in range(4)])
    for reader in readers:
        reader.join()
    assert [stream.finish_reason for stream in streams] == [FinishReason.LENGTH] * 4


def test_when_the_engine_dies_every_open_stream_ends_with_the_error() -> None:
    desk = Desk()
    streams = [desk.stream(i) for i in range(3)]
    desk.publish(a_token(0, "a"), an_end(2))
    error = RuntimeError("dead")
    desk.collector.end_all(error, 7.0)
    for stream in streams[:2]:
        with pytest.raises(RequestFailedError) as caught:
            list(stream.tokens())
        assert caught.value.__cause__ is error
    assert list(streams[2].tokens()) == []
    assert len(desk.collector) == 0


# ---- a stream and its reader ----


def test_tokens_come_with_the_engines_stamps() -> None:
    desk = Desk()
    stream = desk.stream()
    desk.say("abc", end=FinishReason.LENGTH)
    assert list(stream.tokens()) == [Token(ord(letter), float(i)) for i, letter in enumerate("abc")]
    assert stream.finish_reason is FinishReason.LENGTH


def test_the_slot_is_free_before_the_last_token_is_handed_out() -> None:
    desk = Desk()
    stream = desk.stream()
    desk.say("ab", end=FinishReason.LENGTH)
    tokens = stream.tokens()
    next(tokens)
    assert desk.asked == []
    next(tokens)
    assert desk.asked == [("acknowledge", 0)]
    assert list(tokens) == []
    assert desk.asked == [("acknowledge", 0)]


def test_an_eos_first_is_an_empty_text_and_one_token() -> None:  # case B15
    desk = Desk()
    texts, tokens = desk.stream(0), desk.stream(1)
    desk.publish(*[TokenEvent(i, EOS, 1.0, FinishReason.STOP) for i in range(2)])
    assert list(texts.text()) == []
    assert list(tokens.tokens()) == [Token(EOS, 1.0)]
    assert texts.finish_reason is FinishReason.STOP
    assert desk.asked == [("acknowledge", 0), ("acknowledge", 1)]


def test_an_error_is_raised_to_the_reader_after_the_tokens_before_it() -> None:
    desk = Desk()
    stream = desk.stream(5)
    error = ValueError("broken")
    desk.publish(a_token(5, "a"), TokenEvent(5, None, 1.0, FinishReason.ERROR, error))
    tokens = stream.tokens()
    assert next(tokens).token_id == ord("a")
    with pytest.raises(RequestFailedError, match="request 5 failed: broken") as caught:
        next(tokens)
    assert caught.value.__cause__ is error
    assert stream.finish_reason is FinishReason.ERROR
    assert desk.asked == [("acknowledge", 5)]


def test_a_stream_that_was_read_stays_empty() -> None:
    desk = Desk()
    stream = desk.stream()
    desk.say("a", end=FinishReason.STOP)
    assert list(stream.text()) == ["a"]
    assert list(stream.text()) == []
    assert list(stream.tokens()) == []


def test_two_readers_see_only_their_own_tokens_complete_however_late() -> None:  # case B17
    desk = Desk()
    fast, slow = desk.stream(0), desk.stream(1)
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(fast.text()))
    reader.start()
    for mine, other in zip("abcdef", "uvwxyz", strict=True):
        desk.publish(a_token(0, mine), a_token(1, other))
    desk.publish(an_end(0), an_end(1))
    reader.join()
    assert "".join(seen) == "abcdef"
    assert "".join(slow.text()) == "uvwxyz"


def test_a_stalled_reader_delays_nobody_and_costs_what_its_request_produced() -> None:  # case B23
    desk = Desk()
    streams = [desk.stream(i, max_new_tokens=50) for i in range(16)]
    readers = [stream.tokens() for stream in streams[1:]]
    for step in range(50):
        end = FinishReason.LENGTH if step == 49 else None
        desk.publish(*[TokenEvent(i, 65, float(step), end) for i in range(16)])
        assert [next(reader).engine_time_s for reader in readers] == [float(step)] * 15
    stalled = streams[0]._mailbox
    assert stalled is not None
    assert len(stalled._events) == 50
    assert [token.engine_time_s for token in streams[0].tokens()] == [float(step) for step in range(50)]


def test_a_stream_of_a_shared_mailbox_cannot_be_iterated() -> None:
    """It would take the tokens of the others for its own."""
    desk = Desk()
    stream = desk.stream()
    stream._mailbox = None
    with pytest.raises(InputError, match="shared mailbox"):
        next(stream.tokens())
    assert desk.asked == []


# ---- stop strings ----


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("one<end>two", "one"),  # over several tokens
        ("<end>", ""),
        ("a<en", "a<en"),  # held as a possible stop, and then the stream ends
        ("a<enough", "a<enough"),
        ("<<end>", "<"),
        ("a<en<end>b", "a<en"),
    ],
)
def test_nothing_of_a_stop_string_is_shown_and_nothing_else_is_lost(
    said: str, shown: str
) -> None:  # case B11
    desk = Desk()
    stream = desk.stream(stop=("<end>",))
    desk.say(said, end=FinishReason.LENGTH)
    assert "".join(stream.text()) == shown
    assert stream.finish_reason is (FinishReason.STOP if "<end>" in said else FinishReason.LENGTH)


def test_text_that_was_held_back_is_shown_when_eos_comes() -> None:  # case B11
    desk = Desk()
    stream = desk.stream(stop=("xyz",))
    desk.say("axy")
    desk.publish(TokenEvent(0, EOS, 3.0, FinishReason.STOP))
    assert "".join(stream.text()) == "axy"


def test_a_stop_string_ends_the_request_too_once() -> None:
    desk = Desk()
    stream = desk.stream(stop=("b",))
    desk.say("abcd")
    assert list(stream.text()) == ["a"]
    assert desk.asked == [("close", 0)]


def test_a_stop_string_in_the_last_token_is_read_like_any_end() -> None:
    desk = Desk()
    stream = desk.stream(stop=("b",))
    desk.say("ab", end=FinishReason.LENGTH)
    assert list(stream.text()) == ["a"]
    assert stream.finish_reason is FinishReason.STOP
    assert desk.asked == [("acknowledge", 0)]


def test_tokens_end_with_the_one_that_completes_a_stop_string() -> None:
    desk = Desk()
    stream = desk.stream(stop=("bc",))
    desk.say("abcd")
    assert [chr(token.token_id) for token in stream.tokens()] == list("abc")


# ---- leaving ----


def leave_by_break(stream: RequestStream) -> None:
    for _ in stream.tokens():
        break


def leave_by_error(stream: RequestStream) -> None:
    def read() -> None:
        for _ in stream.text():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()


def leave_by_with(stream: RequestStream) -> None:
    with stream:
        pass


def leave_by_forgetting(stream: RequestStream) -> None:
    tokens = stream.tokens()
    next(tokens)
    del tokens


def leave_twice(stream: RequestStream) -> None:
    stream.close()
    stream.close()


@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_error, leave_by_with, leave_by_forgetting, leave_twice]
)
def test_a_reader_that_leaves_closes_its_stream_once(leave: Any) -> None:
    desk = Desk()
    stream = desk.stream()
    desk.say("abc")
    leave(stream)
    assert desk.asked == [("close", 0)]
    assert stream.finish_reason is FinishReason.ABORT
    assert list(stream.tokens()) == []


def test_a_decoder_that_raises_closes_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    stream = desk.stream()

    def no_decoder() -> ScriptedDecoder:
        raise ZeroDivisionError

    monkeypatch.setattr(desk, "new_decoder", no_decoder)
    with pytest.raises(ZeroDivisionError):
        next(stream.text())
    assert desk.asked == [("close", 0)]


def test_closing_from_another_thread_lets_a_blocked_reader_go() -> None:
    desk = Desk()
    stream = desk.stream()
    seen: list[Token] = []
    reader = threading.Thread(target=lambda: seen.extend(stream.tokens()))
    reader.start()
    desk.waits.waiting.acquire()
    stream.close()
    desk.publish(an_end(0, FinishReason.ABORT))  # what the manager answers
    reader.join()
    assert seen == []
    assert stream.finish_reason is FinishReason.ABORT


def test_pieces_of_text_are_never_empty() -> None:
    desk = Desk()
    stream = desk.stream(stop=("abc",))
    desk.say("abxabdab", end=FinishReason.LENGTH)
    pieces: Iterator[str] = stream.text()
    assert list(pieces) == ["abx", "abd", "ab"]
