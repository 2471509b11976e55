"""A wait that ends at a moment, and not at the next whole millisecond."""

from __future__ import annotations

import resource
import select
import time
from collections.abc import Iterator

import pytest

from roseinfer.bench.http.alarm import Alarm
from roseinfer.errors import RunError


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    made = Alarm()
    yield made
    made.close()


def goes_off(alarm: Alarm, timeout_s: float = 20.0) -> bool:
    with select.epoll() as epoll:
        epoll.register(alarm.fd, select.EPOLLIN)
        return bool(epoll.poll(timeout_s))


def test_it_goes_off_at_its_moment_on_the_clock_of_the_client(alarm: Alarm) -> None:
    at_s = time.perf_counter() + 0.0105
    alarm.set(at_s)
    assert goes_off(alarm)
    assert time.perf_counter() >= at_s


def test_a_moment_that_is_over_goes_off_at_once(alarm: Alarm) -> None:
    alarm.set(time.perf_counter() - 1.0)
    assert goes_off(alarm)


def test_it_is_silent_once_it_was_cleared(alarm: Alarm) -> None:
    alarm.set(time.perf_counter())
    assert goes_off(alarm)
    alarm.clear()
    assert not goes_off(alarm, 0)


def test_a_moment_can_be_set_again_after_it(alarm: Alarm) -> None:
    at_s = time.perf_counter()
    for _ in range(2):
        alarm.set(at_s)
        assert goes_off(alarm)
        alarm.clear()


def test_one_that_is_set_anew_forgets_the_moment_before(alarm: Alarm) -> None:
    alarm.set(time.perf_counter())
    assert goes_off(alarm)
    alarm.set(time.perf_counter() + 60.0)
    assert not goes_off(alarm, 0)
    alarm.clear()  # and there is nothing to read


def test_a_process_without_files_left_says_so() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(RunError, match="no file descriptor left"):
            Alarm()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
