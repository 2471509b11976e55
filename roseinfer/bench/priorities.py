"""Classes of requests as flags say them: how often each comes, and when the first token of each has to be there."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from roseinfer.admission_spec import read_duration
from roseinfer.errors import InputError

MIX: Final = "--priority-mix"
DEADLINE: Final = "--ttft-deadline"

MOST_CLASSES: Final = 16
_NAME: Final = re.compile(r"[a-z0-9_-]+")
_SUM_TOLERANCE: Final = 1e-6


class PriorityMix(NamedTuple):
    """Classes from the highest (priority 0) to the lowest, and the share of the requests that each has."""

    names: tuple[str, ...]
    shares: tuple[float, ...]


def parse_mix(text: str) -> PriorityMix:
    """`high:0.1,low:0.9`. Raises InputError unless names differ and shares above 0 sum to 1."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, share = _named(MIX, text, part, "high:0.1,low:0.9")
        if name in shares:
            raise InputError(MIX, text, f"names {name} twice")
        try:
            shares[name] = float(share)
        except ValueError:
            shares[name] = math.nan
        if not 0 < shares[name] <= 1:
            raise InputError(MIX, text, f"{share!r} is no share above 0 and up to 1")
    if len(shares) > MOST_CLASSES:
        raise InputError(MIX, text, f"has {len(shares)} classes, the most are {MOST_CLASSES}")
    total = math.fsum(shares.values())
    if abs(total - 1) > _SUM_TOLERANCE:
        raise InputError(MIX, text, f"its shares sum to {total:.9g}, and must sum to 1")
    return PriorityMix(tuple(shares), tuple(shares.values()))


class TtftDeadlines(NamedTuple):
    """Seconds from sending in which a first token has to be there: `every_s` of all requests, or of some classes."""

    every_s: float | None
    by_class: Mapping[str, float]

    def check(self, text: str, classes: Sequence[str]) -> None:
        """Raises InputError, with `text` as it was typed, for a class that no request has."""
        for name in self.by_class:
            if name not in classes:
                known = f"the classes are {', '.join(classes)}" if classes else f"needs {MIX}"
                raise InputError(DEADLINE, text, f"no request is of class {name}: {known}")

    def of(self, classes: Sequence[str]) -> tuple[float | None, ...]:
        """That of each class, None for one that has none; without classes that of all."""
        if not classes:
            return (self.every_s,)
        return tuple(self.by_class.get(name, self.every_s) for name in classes)


NO_DEADLINES: Final = TtftDeadlines(None, {})


def parse_deadlines(text: str) -> TtftDeadlines:
    """`2s` for all, or `high:250ms,low:5s`. Raises InputError for what is neither."""
    if ":" not in text:
        return TtftDeadlines(_seconds(text, text), {})
    by_class: dict[str, float] = {}
    for part in text.split(","):
        name, duration = _named(DEADLINE, text, part, "2s or high:250ms,low:5s")
        if name in by_class:
            raise InputError(DEADLINE, text, f"names {name} twice")
        by_class[name] = _seconds(text, duration)
    return TtftDeadlines(None, by_class)


def is_class_name(name: str) -> bool:
    """It can be told from what stands around it, wherever a class is named."""
    return _NAME.fullmatch(name) is not None


def _named(flag: str, text: str, part: str, example: str) -> tuple[str, str]:
    name, colon, value = part.strip().partition(":")
    if not colon or not is_class_name(name):
        raise InputError(flag, text, f"{part.strip()!r} is not as in {example} (names of a-z, 0-9, _ and -)")
    return name, value


def _seconds(text: str, duration: str) -> float:
    seconds = read_duration(duration)
    if seconds is None:
        raise InputError(DEADLINE, text, f"{duration!r} is no duration such as 250ms or 2s")
    return seconds
