"""Values of flags as their user typed them: comma lists, and numbers within bounds. What is wrong names its flag."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from roseinfer.bench.options import RunOptions, flag
from roseinfer.errors import InputError

LARGEST: Final = 2**31 - 1
MOST_REQUESTS: Final = 10_000_000
"""Per cell and repeat: more is a slip of the pen, and would fill the memory before anybody saw it."""

_LARGEST_NUMBER: Final = 1e9


def wrong(field: str, options: RunOptions, why: str) -> InputError:
    value = getattr(options, field)
    plain = isinstance(value, str | int | float | list | None)
    return InputError(flag(field), value if plain else str(value), why)


def whole_numbers(field: str, text: str, *, least: int, most: int = LARGEST, hint: str = "") -> list[int]:
    """A comma list without repetition, e.g. "0,16,64"."""
    numbers: list[int] = []
    for item in text.split(","):
        try:
            number = int(item)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            why = f"{item.strip()!r} is no whole number from {least} to {most}{hint}"
            raise InputError(flag(field), text, why)
        if number in numbers:
            raise InputError(flag(field), text, f"names {number} twice")
        numbers.append(number)
    return numbers


def rates(field: str, text: str) -> list[float]:
    """A comma list of requests per second, e.g. "0.3,1,2.5", that stay apart in the six digits of a cell's name."""
    found: dict[str, float] = {}
    for item in text.split(","):
        try:
            rate = float(item)
        except ValueError:
            rate = math.nan
        if not 0 < rate <= _LARGEST_NUMBER:
            raise InputError(flag(field), text, f"{item.strip()!r} is no number of requests per second > 0")
        if f"{rate:g}" in found:
            raise InputError(flag(field), text, f"names {rate:g} twice (six digits count)")
        found[f"{rate:g}"] = rate
    return list(found.values())


def check_positive(field: str, options: RunOptions) -> None:
    """Raises InputError for a number that is neither None nor finite and above 0."""
    value = getattr(options, field)
    if value is not None and not 0 < value <= _LARGEST_NUMBER:
        raise wrong(field, options, "must be a number > 0")


class Lengths(NamedTuple):
    """ "fixed", "uniform" (`spread` is the share of the length on both sides) or "lognormal" (sigma of the log)."""

    kind: str = "fixed"
    spread: float = 0.0


def parse_lengths(name: str, text: str) -> Lengths:
    """`fixed`, `uniform:R` with 0 < R <= 1, or `lognormal:S` with 0 < S <= 5; else InputError of the flag `name`."""
    kind, colon, number = text.partition(":")
    if text == "fixed":
        return Lengths()
    try:
        spread = float(number)
    except ValueError:
        spread = math.nan
    most = {"uniform": 1.0, "lognormal": 5.0}.get(kind)
    if most is None or not colon:
        raise InputError(name, text, "must be fixed, uniform:R or lognormal:S")
    if not 0 < spread <= most:
        raise InputError(name, text, f"{number!r} is no number above 0 and up to {most:g}")
    return Lengths(kind, spread)
