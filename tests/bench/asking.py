"""What the fixture `ask` gives, and the same for fixtures that many tests share."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line that a user gets to read."""
        (line,) = self.err.splitlines()
        assert line.startswith("roseinfer-bench: ")
        return line.removeprefix("roseinfer-bench: ")


Ask = Callable[..., Answer]


def ask_in(folder: Path, *words: str) -> Answer:
    """`roseinfer-bench` with these words, in this folder."""
    from roseinfer.bench.cli import main

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["roseinfer-bench", *words])
        with pytest.raises(SystemExit) as exit_:
            main()
    return Answer(int(exit_.value.code or 0), out.getvalue(), err.getvalue())
