"""How OpenMP's threads wait."""

import os

import pytest

from roseinfer.openmp import WAITING, spin_briefly


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
