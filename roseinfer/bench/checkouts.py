"""The code of the package as it is in a folder, or was in a revision."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import roseinfer
from roseinfer.errors import InputError


@dataclass(frozen=True)
class Checkout:
    """`folder` holds the package's folder, `name` tells readers what it is. `commit` is None outside of git."""

    folder: Path
    name: str
    commit: str | None


def own_folder() -> Path:
    """Where the code that runs here has its package."""
    return Path(roseinfer.__file__).resolve().parents[1]


def checkout(argument: str, text: str, place: Path) -> Checkout:
    """A copy below `place` of what `text` names: a folder with the package in it, or a revision known to git here.

    Whatever is edited meanwhile stays out of the copy, and the repository is left as it is. Raises InputError
    naming `argument`.
    """
    folder = Path(text)
    if text and folder.is_dir():
        if not (folder / "roseinfer" / "__init__.py").exists():
            raise InputError(argument, text, "holds no package of the name roseinfer")
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(folder / "roseinfer", place / "roseinfer", ignore=ignored)
        described = _git("-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
        return Checkout(place, folder.resolve().name, described or None)
    top = _git("rev-parse", "--show-toplevel")
    commit = top and _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{text}^{{commit}}")
    if not commit:
        raise InputError(argument, text, "neither a folder nor a revision that git knows here")
    archive = _git_output("-C", top, "archive", "--format=tar", commit, "--", "roseinfer")
    if not archive:
        raise InputError(argument, text, "this revision holds no package of the name roseinfer")
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(place, filter="data")
    return Checkout(place, text, commit)


def _git(*words: str) -> str:
    """One line that git answers; "" where it refuses."""
    return _git_output(*words).decode().strip()


def _git_output(*words: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *words], stdin=subprocess.DEVNULL, capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return b""
    return done.stdout
