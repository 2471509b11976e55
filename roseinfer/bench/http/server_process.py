"""The server that --target-cmd starts: its command for a limit, its start, its readiness, its end."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.environment import is_loopback, public_text, public_words
from roseinfer.bench.http.address import Address
from roseinfer.bench.http.asking import UnreachableError, ask
from roseinfer.bench.http.parent import tied
from roseinfer.bench.http_options import ADMISSION_WORD, LIMIT_WORD
from roseinfer.errors import InputError, RunError

READY_S: Final = 900.0
"""Patience with a server that loads a model."""

POLL_S: Final = 0.1
STOP_S: Final = 20.0
"""From SIGTERM to SIGKILL."""

LAST_LINES: Final = 20
MOST_OUTPUT_BYTES: Final = 64 * 1024
_PORT: Final = "{port}"
_LIMIT_WORDS: Final = (LIMIT_WORD, ADMISSION_WORD)
_NEEDS_A_KEY: Final = (401, 403)
_OPTIONAL: Final = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)


def command_for(command: str, limit: AdmissionSpec, port: int) -> tuple[str, ...]:
    """The words that start the server with this limit: what is in [[ ]] is left out where there is none."""
    text = _OPTIONAL.sub("" if limit == AdmissionSpec() else r"\1", command)
    values = {LIMIT_WORD: str(limit.inflight), ADMISSION_WORD: str(limit), _PORT: str(port)}
    words = shlex.split(text)
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    return tuple(words)


def check_command(command: str, limits: Sequence[AdmissionSpec]) -> None:
    """Raises InputError where the command of --target-cmd cannot set one of these limits, or is none."""
    try:
        words, _ = (command_for(command, limit, 0) for limit in (AdmissionSpec(), AdmissionSpec(1)))
    except ValueError as error:
        raise InputError(
            "--target-cmd", public_words(command), f"cannot be split into words: {error}"
        ) from None
    if not words:
        raise InputError("--target-cmd", command, "names no program")
    if any(not limit.is_count_alone for limit in limits):
        if ADMISSION_WORD not in command or LIMIT_WORD in command:
            why = f"needs {ADMISSION_WORD} in --target-cmd, and no {LIMIT_WORD}, or the server never hears of it"
            raise InputError("--admission", ",".join(map(str, limits)), why)
    elif any(limit != AdmissionSpec() for limit in limits) and not any(
        word in command for word in _LIMIT_WORDS
    ):
        shown = ",".join(str(limit.inflight or 0) for limit in limits)
        raise InputError(
            "--max-inflight", shown, f"needs {LIMIT_WORD} in --target-cmd, or the server never hears of it"
        )
    always = _OPTIONAL.sub("", command)
    for word in _LIMIT_WORDS:
        if AdmissionSpec() in limits and word in always:
            why = f"sets a limit where --max-inflight 0 asks for none: put [[ ]] around the flag of {word}"
            raise InputError("--target-cmd", public_words(command), why)


def check_place(address: Address) -> None:
    """Raises InputError where the server would not run at `address`: what is started here runs here."""
    if is_loopback(address.host):
        return
    try:
        found = socket.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)
        for family, _, _, _, where in found:
            with socket.socket(family) as probe:
                probe.bind(where)  # only one of this machine's own can be bound
        return
    except (OSError, UnicodeError):
        why = (
            "is another machine, or none: --target-cmd starts a server on this one (http://127.0.0.1:PORT/v1)"
        )
        raise InputError("--target", address.public, why) from None


class ServerProcess:
    """A server that was started here, in a process group of its own, and is ready once this is made.

    It ends with the thread that made this, however that ends. Raises RunError where it does not start, where
    something else answers at its address, or where it asks for another key.
    """

    def __init__(self, command: Sequence[str], address: Address, api_key: str | None = None) -> None:
        self.command = tuple(command)
        self._address = address
        self._api_key = api_key
        if _listens(address):
            raise RunError(
                f"something listens at {address.host} port {address.port} before --target-cmd was started there: it"
                " would be measured in its place"
            )
        # A file, so that a talkative server never waits for a reader; it has no name, and goes with the process.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (`stop` closes it)
        try:
            if shutil.which(self.command[0]) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._process = subprocess.Popen(
                tied(self.command),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._output.close()
            why = f"{self.command[0]}: {error.strerror}"
            raise RunError(f"--target-cmd could not be started: {public_text(why)}") from error
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def check_alive(self, patience_s: float = 0.0) -> None:
        """Raises RunError with its last words if it has ended, or ends within `patience_s`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        if (code := self._process.poll()) is not None:
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise RunError(f"the server of --target-cmd ended {how}{self._last_words()}")

    def stop(self) -> None:
        """SIGTERM to all that it started, and SIGKILL to what is still there after a while, or at an interrupt."""
        self._signal(signal.SIGTERM)
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._output.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _wait_until_ready(self) -> None:
        until_s = time.monotonic() + READY_S
        while not self._is_ready():
            self.check_alive()
            if time.monotonic() > until_s:
                raise RunError(
                    f"the server of --target-cmd was not ready after {READY_S:g} s{self._last_words()}"
                )
            time.sleep(POLL_S)
        self.check_alive()  # else it was another that answered

    def _is_ready(self) -> bool:
        """It says so at /health, where it has one, and lists its models."""
        try:
            health = ask(self._address, f"{self._address.root}/health", self._api_key).status
            if health not in (200, 404, *_NEEDS_A_KEY):
                return False
            status = ask(self._address, f"{self._address.base}/models", self._api_key).status
        except UnreachableError:
            return False
        if status in _NEEDS_A_KEY:  # no waiting mends that
            told = "add --api-key-env" if self._api_key is None else "it is not the key of --api-key-env"
            raise RunError(f"the server of --target-cmd asks for a key (status {status}): {told}")
        return status == 200

    def _last_words(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), MOST_OUTPUT_BYTES, max(0, size - MOST_OUTPUT_BYTES))
        lines = [line.strip() for line in tail.decode("utf-8", "replace").splitlines() if line.strip()]
        said = " | ".join(public_words(line) for line in lines[-LAST_LINES:])
        return f"; it said last: {said}" if said else "; it said nothing"


def _listens(address: Address) -> bool:
    try:
        with socket.create_connection((address.host, address.port), timeout=2.0):
            return True
    except OSError:
        return False
