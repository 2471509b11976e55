"""How OpenMP's threads wait."""

import os
import threading

import pytest

from roseinfer.openmp import WAITING, in_passing, spin_briefly


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which nobody chose anything; what is set in it is taken back."""
    for name in WAITING:
        monkeypatch.setenv(name, "to be taken back")
        monkeypatch.delenv(name)
    return monkeypatch


def test_waiting_threads_spin_but_not_for_long(untouched: pytest.MonkeyPatch) -> None:
    spin_briefly()
    assert {name: os.environ.get(name) for name in WAITING} == WAITING


@pytest.mark.parametrize("name", WAITING)
def test_what_the_user_chose_stays_and_stays_alone(untouched: pytest.MonkeyPatch, name: str) -> None:
    untouched.setenv(name, "7")
    spin_briefly()
    assert {name: os.environ[name] for name in WAITING if name in os.environ} == {name: "7"}


def test_what_is_done_in_passing_leaves_no_thread() -> None:
    worker = in_passing(threading.current_thread)
    assert worker is not threading.current_thread()
    assert not worker.is_alive()


def test_what_goes_wrong_in_passing_comes_out() -> None:
    def fails() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        in_passing(fails)
