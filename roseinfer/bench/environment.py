"""What a run was measured on, in words that may be published: no host, no user, no absolute path.

Also the pauses of Python's garbage collector, which a tail latency may be made of.
"""

from __future__ import annotations

import gc
import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self
from urllib.parse import urlsplit

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_VERSIONS_OF: Final = ("roseinfer", "torch", "transformers", "numpy", "numba", "pyarrow")
_THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_WAIT_POLICY",
    "GOMP_CPU_AFFINITY",
    "GOMP_SPINCOUNT",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "NUMBA_THREADING_LAYER",
    "OPENBLAS_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
)
REMOTE: Final = "remote"
"""Stands for the name of any other machine."""

_GIT_TIMEOUT_S: Final = 2.0
_SECRET_NAME: Final = r"(?:key|token|secret|password|passwd|credentials?)"
_VALUE: Final = r"""(?:'[^']*(?:'|\Z)|"(?:\\.|[^"])*(?:"|\Z)|(?!]](?:\s|\Z))(?:\\.|[^\s"']))+"""
"""A word of a shell; a quote that nobody closed goes to the end, and ]] ends what --target-cmd may leave out."""

_SECRETS: Final = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        rf"((?:(?-i:\b\w*(?:TOKEN|KEY|SECRET|PASSWORD))|(?:\b|[-_])(?:api)?{_SECRET_NAME})=){_VALUE}",
        rf"((?<![\w-])--?(?:[\w-]*[-_])?(?:api)?{_SECRET_NAME}\s+)(?!--|\[\[){_VALUE}(?:\s+(?!-|\[\[){_VALUE})*",
        (
            r"""(\b(?:authorization|[\w-]{0,64}(?:api[-_]?key|secret|password|[-_]token))["']?\s*:[\s\["']*)"""
            r"""[^"'\s][^"']*?(?=["']|\s--?\w|\Z)"""
        ),
        r"""(\bbearer\s+)[^\s"'*]+""",
    )
)
"""NAME=value, options with all their values up to the next option, headers and fields of JSON, and what is left."""
_URL_OR_PATH: Final = re.compile(r"""https?://\S+|(?<![\w.~/])(?:~\w*|\.\.?)?/[^\s"']+""")


def describe_environment() -> dict[str, object]:
    """The machine, its load and the software, as JSON; None for what is not known here.

    `gpus` is None until torch is loaded (it is not loaded for this), then the list of names. `git` is None
    unless the package runs from its own checkout. `source_sha256` is taken over the package's Python files:
    it tells two versions of the code apart also where there is no git, or where edits are not committed.
    """
    return {
        "cpu_model": _cpu_model(),
        "cores_logical": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "gpus": _gpus(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "versions": {name: _version(name) for name in _VERSIONS_OF},
        "git": _git(_PACKAGE.parent),
        "source_sha256": _source_sha256(),
        "thread_env": {name: _public(os.environ[name]) for name in _THREAD_VARIABLES if name in os.environ},
    }


def public_command(argv: Iterable[str]) -> str:
    """The command line for a shell: paths cut to their last part, and neither hosts, but this one, nor passwords.

    `org/name` is kept: on this command line it is a model on the hub, and as a path it tells nothing.
    """
    words, public = list(argv), list[str]()
    for before, word in zip(["", *words], words, strict=False):
        if before == "--ray" and word != "local":
            public.append(REMOTE)
        elif word.startswith("--ray=") and word != "--ray=local":
            public.append(f"--ray={REMOTE}")
        elif before == "--target-cmd":
            public.append(public_words(word))
        elif word.startswith("--target-cmd="):
            public.append(f"--target-cmd={public_words(word.removeprefix('--target-cmd='))}")
        else:
            public.append(_public(word))
    return shlex.join(public)


def public_text(text: str) -> str:
    """`text`, an exception's say, with paths cut to their last part."""
    return _public_part(text)


def public_words(command: str) -> str:
    """A command line that is one word of ours, as `public_command` has ours; its own words have no spaces in them."""
    return " ".join(map(_public, _without_secrets(command).split()))


def is_loopback(host: str) -> bool:
    """`host` is this machine by any of its own names, none of which tells who measured."""
    return host in ("localhost", "::1") or host.startswith("127.")


def public_url(url: str) -> str:
    """`url` without credentials and query; of a host other than this one it says "remote", and no port."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:  # no URL after all
        return f"http://{REMOTE}"
    if not is_loopback(host):
        return f"{parts.scheme}://{REMOTE}{parts.path}"
    where = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{where}{'' if port is None else f':{port}'}{parts.path}"


class GcPause(NamedTuple):
    """One collection; `start_s` is a reading of the clock given to GcPauses."""

    start_s: float
    duration_s: float
    generation: int


GC_THRESHOLD: Final = 50_000
"""New objects between collections while measuring. Python's own figure lets one fall into every burst: 100 us."""


class GcPauses:
    """In its `with` the collector does not see what lived before and seldom runs; `pauses` grows by every collection.

    gc.freeze is one switch for the whole process: on the way out everything is thawed, whoever froze it.
    Only young objects are collected first: going through all that torch brings along takes a quarter of a second.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.pauses: list[GcPause] = []
        self._clock = clock
        self._start_s: float | None = None
        self._thresholds = gc.get_threshold()

    def __enter__(self) -> Self:
        gc.collect(1)
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD, *self._thresholds[1:])
        gc.callbacks.append(self._on_collection)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.callbacks.remove(self._on_collection)
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        now_s = self._clock()
        if phase == "start":
            self._start_s = now_s
        elif self._start_s is not None:  # None: it began before the `with`, on another thread
            self.pauses.append(GcPause(self._start_s, now_s - self._start_s, info["generation"]))
            self._start_s = None


def _public(word: str) -> str:
    word = _without_secrets(word)
    option, value = re.fullmatch(r"((?:--?[\w-]+|\w+)=)?(.*)", word, re.DOTALL).groups(default="")  # type: ignore[union-attr]
    return option + ",".join(map(_public_part, value.split(",")))


def _without_secrets(text: str) -> str:
    for secret in _SECRETS:
        text = secret.sub(r"\1***", text)
    return text


def _public_part(part: str) -> str:
    # A path as a whole may hold spaces; within a text (a prompt) it ends at the first.
    is_long = part.count("/") > 1 and "://" not in part and not re.search(r"\s", part)
    if is_long or part.startswith(("/", "~", "./", "../")):
        return Path(part).name or part
    return _URL_OR_PATH.sub(lambda found: _public_match(found[0]), part)


def _public_match(found: str) -> str:
    return public_url(found) if found.startswith("http") else Path(found).name


def _cpu_model() -> str:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""
    named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _gpus() -> list[str] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _git(checkout: Path) -> dict[str, object] | None:
    if not (checkout / ".git").exists():  # else git would find the repository that a venv happens to lie in
        return None
    # In a git hook GIT_DIR names the user's repository, which need not be this one.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(checkout), *words]
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
        return done.stdout.decode().strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": git("status", "--porcelain") != ""}
    except (OSError, subprocess.SubprocessError):
        return None


def source_sha256(package: Path) -> str:
    """Over the names and contents of the Python files of a package's folder."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _source_sha256() -> str:
    return source_sha256(_PACKAGE)
