"""Files that are there whole or not at all: each is made aside, under a hidden name, and renamed once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def made_aside(path: Path) -> Iterator[Path]:
    """The hidden name under which to make `path`; renamed at the end, or removed if that is not reached."""
    aside = path.with_name(f".{path.name}.aside")
    try:
        yield aside
        aside.replace(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):
            aside.unlink()
        raise


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """The file of `made_aside`, to write to, which is on disk before it is renamed."""
    with made_aside(path) as aside, aside.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
