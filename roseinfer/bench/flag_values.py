"""Values of flags as their user typed them: comma lists, and numbers within bounds. What is wrong names its flag."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from roseinfer.admission_spec import AdmissionSpec, parse_admission
from roseinfer.bench.options import NO_LIMIT, RunOptions, flag
from roseinfer.errors import InputError

LARGEST: Final = 2**31 - 1
MOST_REQUESTS: Final = 10_000_000
"""Per cell and repeat: more is a slip of the pen, and would fill the memory before anybody saw it."""

LARGEST_NUMBER: Final = 1e9
_FAR_OUT: Final = 5
"""Standard deviations of the logarithm."""


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


def admissions(o: RunOptions, given: Collection[str]) -> list[AdmissionSpec]:
    """The limits that --admission or --max-inflight asks for, in that order. Raises InputError for both together."""
    if o.admission is None:
        counts = whole_numbers("max_inflight", o.max_inflight, least=0, hint=f" ({NO_LIMIT})")
        return [AdmissionSpec(count or None) for count in counts]
    if "max_inflight" in given:
        why = f"contradicts --max-inflight {o.max_inflight}, which is short for inflight:N"
        raise wrong("admission", o, why)
    limits = [parse_admission(text, "--admission") for text in o.admission.split(",")]
    for number, limit in enumerate(limits):
        if limit in limits[:number]:
            raise wrong("admission", o, f"names {limit} twice")
    return limits


def rates(field: str, text: str, what: str = "requests per second") -> list[float]:
    """A comma list of `what`, e.g. "0.3,1,2.5", that stay apart in the six digits of a cell's name."""
    found: dict[str, float] = {}
    for item in text.split(","):
        try:
            rate = float(item)
        except ValueError:
            rate = math.nan
        if not 0 < rate <= LARGEST_NUMBER:
            raise InputError(flag(field), text, f"{item.strip()!r} is no number of {what} > 0")
        if f"{rate:g}" in found:
            raise InputError(flag(field), text, f"names {rate:g} twice (six digits count)")
        found[f"{rate:g}"] = rate
    return list(found.values())


def check_positive(field: str, options: RunOptions) -> None:
    """Raises InputError for a number that is neither None nor finite and above 0."""
    value = getattr(options, field)
    if value is not None and not 0 < value <= LARGEST_NUMBER:
        raise wrong(field, options, "must be a number > 0")


class Lengths(NamedTuple):
    """ "fixed", "uniform" (`spread` is the share of the length on both sides) or "lognormal" (sigma of the log)."""

    kind: str = "fixed"
    spread: float = 0.0

    def bounds(self, tokens: int) -> tuple[int, int]:
        """The shortest and the longest that a length of `tokens` may become; of lognormal ones, almost surely."""
        if self.kind == "lognormal":
            factors = math.exp(-_FAR_OUT * self.spread), math.exp(_FAR_OUT * self.spread)
        else:
            factors = 1 - self.spread, 1 + self.spread
        low, high = (max(round(tokens * factor), 1) for factor in factors)
        return low, high


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


def check_spread(field: str, options: RunOptions, lengths: Lengths, typical: Sequence[int | None]) -> None:
    """Raises InputError where lengths that are to vary around one of these round to the same whole number."""
    for tokens in typical:
        if tokens is not None and lengths.kind != "fixed":
            low, high = lengths.bounds(tokens)
            if low == high:
                raise wrong(field, options, f"changes no length of {tokens} tokens")
