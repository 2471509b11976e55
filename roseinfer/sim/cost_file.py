"""The JSON file of a cost model: reading it, checking its values, and writing it whole."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from roseinfer.errors import InputError
from roseinfer.whole_files import written

LONGEST_S: Final = 3600.0
"""More for a unit of work is a slip of the pen; step ends stay finite, whatever the work."""


class CostFile(NamedTuple):
    """The file at `path`, to complain about: every error is InputError("--cost-model", ...)."""

    path: Path

    def read(self, schema_version: int) -> dict[str, Any]:
        """The object in the file, of that schema version."""
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
        except OSError as error:
            raise self.wrong(error.strerror or str(error)) from error
        except (ValueError, RecursionError) as error:  # no JSON, no UTF-8
            raise self.wrong(f"not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise self.wrong("is no JSON object")
        version = values.get("schema_version")
        if version != schema_version or isinstance(version, bool):
            raise self.wrong(f"schema version {_short(version)}; this roseinfer reads {schema_version}")
        return values

    def write(self, values: Mapping[str, object]) -> None:
        """Saves `values`, all or nothing. Raises OSError where the disk does not take them."""
        text = json.dumps(values, indent=1, allow_nan=False) + "\n"
        with written(self.path) as file:
            file.write(text.encode())

    def group(
        self, name: str, values: object, known: Collection[str], *, optional: Collection[str] = ()
    ) -> dict[str, Any]:
        """`values`, if they are an object of exactly the keys `known`, where `optional` ones may lack."""
        if not isinstance(values, dict):
            raise self.wrong(f"{name} {_short(values)} must be an object")
        prefix = f"{name}." if name else ""
        if missing := [prefix + key for key in known if key not in values and key not in optional]:
            raise self.wrong(f"lacks {', '.join(missing)}")
        if unknown := sorted(values.keys() - set(known)):
            raise self.wrong(f"holds unknown keys: {_short_text(', '.join(prefix + key for key in unknown))}")
        return values

    def text(self, name: str, value: object) -> str:
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise self.wrong(f"{name} {_short(value)} must be a line of text")
        return value

    def seconds(self, name: str, value: object) -> float:
        return self.number(name, value, LONGEST_S, " seconds")

    def number(self, name: str, value: object, most: float, unit: str = "") -> float:
        # NaN and Infinity are valid to Python's reader; an int may be too long for a float.
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
            raise self.wrong(f"{name} {_short(value)} must be a number from 0 to {most:g}{unit}")
        return float(value)

    def items(self, name: str, values: object) -> list[tuple[str, Any]]:
        """The items of a list, each with a name to complain about."""
        if not isinstance(values, list):
            raise self.wrong(f"{name} {_short(values)} must be a list")
        return [(f"{name}[{place}]", value) for place, value in enumerate(values)]

    def wrong(self, why: str) -> InputError:
        return InputError("--cost-model", str(self.path), why)


def _short(value: object) -> str:
    return _short_text(repr(value))


def _short_text(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
