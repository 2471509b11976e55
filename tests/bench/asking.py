"""What the fixture `ask` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


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
