"""How OpenMP's threads wait, and what is done without leaving any behind."""

import os
import signal
import subprocess
import sys
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


HELPERS = """
import os, time, torch
from roseinfer.openmp import in_passing
torch.set_num_threads(2)
def work(): return torch.ones(1000, 1000).mm(torch.ones(1000, 1000))
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
in_passing(work)
deadline_s = time.monotonic() + 10
while count() > before and time.monotonic() < deadline_s:  # a joined thread is gone a little later
    time.sleep(0.001)
after = count()
work()
print(after - before, count() - before)
"""


def test_what_is_done_in_passing_leaves_no_helper_of_openmp() -> None:
    out = subprocess.run([sys.executable, "-c", HELPERS], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["0", "1"]


def test_what_is_done_in_passing_leaves_no_thread() -> None:
    worker = in_passing(threading.current_thread)
    assert worker is not threading.current_thread()
    assert not worker.is_alive()


def test_what_goes_wrong_in_passing_comes_out() -> None:
    def fails() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        in_passing(fails)


def test_ctrl_c_does_not_wait_for_what_is_done_in_passing() -> None:
    main, released = threading.main_thread().ident, threading.Event()
    assert main == threading.get_ident()

    def work() -> None:
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        released.wait()

    with pytest.raises(KeyboardInterrupt):
        in_passing(work)
    released.set()
