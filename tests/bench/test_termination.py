"""Signals that wait until something can be made of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from roseinfer.bench.termination import Interruption, Termination, held, interruptible


@pytest.fixture(autouse=True)
def _a_foreground_process() -> Iterator[None]:
    """A shell that puts us into the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_is_held_until_a_wait() -> None:
    steps = []
    with held():
        signal.raise_signal(signal.SIGINT)
        steps.append("went on")
        with pytest.raises(Interruption), interruptible():
            steps.append("waited")
    assert steps == ["went on"]


def test_a_signal_ends_a_wait() -> None:
    with held(), pytest.raises(Interruption), interruptible():
        signal.raise_signal(signal.SIGINT)


def test_where_nothing_waits_it_comes_at_the_end() -> None:
    steps = []

    def save() -> None:
        with held():
            signal.raise_signal(signal.SIGINT)
            steps.append("saved")

    with pytest.raises(KeyboardInterrupt) as error:
        save()
    assert steps == ["saved"]
    assert type(error.value) is KeyboardInterrupt  # nothing was cut short


def test_a_second_signal_comes_through_at_once() -> None:
    with held():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) as error:
            signal.raise_signal(signal.SIGINT)
        assert type(error.value) is KeyboardInterrupt


def test_after_an_interruption_the_next_comes_through_at_once() -> None:
    with held():
        with pytest.raises(Interruption), interruptible():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) as error:
            signal.raise_signal(signal.SIGINT)
        assert type(error.value) is KeyboardInterrupt


def test_outside_of_a_hold_nothing_is_held() -> None:
    with held():
        pass
    with interruptible(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_hold_within_a_hold_is_the_same() -> None:
    with held():
        with held():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interruption), interruptible():
            pass


def test_within_a_wait_a_hold_holds_again() -> None:
    """A server is warmed up while it is being started."""
    steps = []

    def warm_up() -> None:
        with held():
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")
        steps.append("never")

    with held(), pytest.raises(Interruption), interruptible():
        warm_up()
    assert steps == ["went on"]


def test_sigterm_is_held_as_well_and_its_own_handler_learns_of_it() -> None:
    with Termination() as termination, held():
        signal.raise_signal(signal.SIGTERM)
        assert not termination.came
        with pytest.raises(Interruption), interruptible():
            pass
        assert termination.came


def test_what_ends_the_process_or_is_ignored_is_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with held():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])


def test_another_thread_holds_nothing() -> None:
    def hold() -> None:
        with held(), interruptible():
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers: list[object] = []
    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_the_wait_of_another_thread_lets_nothing_through() -> None:
    waits, is_over = threading.Event(), threading.Event()

    def wait() -> None:
        with interruptible():
            waits.set()
            is_over.wait()

    thread = threading.Thread(target=wait)
    with held():
        thread.start()
        waits.wait()
        signal.raise_signal(signal.SIGINT)  # is held
        is_over.set()
        thread.join()
        with pytest.raises(Interruption), interruptible():
            pass
