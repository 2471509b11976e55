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


def chosen() -> dict[str, str]:
    return {name: os.environ[name] for name in WAITING if name in os.environ}


def test_waiting_threads_spin_but_not_for_long(untouched: pytest.MonkeyPatch) -> None:
    spin_briefly()
    assert chosen() == WAITING


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_who_chose_how_gnus_wait_is_left_alone(untouched: pytest.MonkeyPatch, name: str) -> None:
    untouched.setenv(name, "7")
    spin_briefly()
    assert chosen() == {name: "7"}


def test_a_choice_for_intels_says_nothing_of_gnus(untouched: pytest.MonkeyPatch) -> None:
    untouched.setenv("KMP_BLOCKTIME", "7")
    spin_briefly()
    assert chosen() == WAITING | {"KMP_BLOCKTIME": "7"}
