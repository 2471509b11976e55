"""How long a step of the simulated engine takes: a few seconds a unit of work, read from a small JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from roseinfer.errors import InputError
from roseinfer.executor import StepPlan

_LONGEST_S: Final = 3600.0
"""More for a unit of work is a slip of the pen; step ends stay finite, whatever the work."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds that a step takes: `constant_s`, and so much more per unit of its work.

    The units are the columns of steps.parquet: prefill_tokens, prefill_attention_pairs, decode_requests and
    context_tokens. `name` is what reports call it.
    """

    name: str
    constant_s: float
    prefill_token_s: float
    attention_pair_s: float
    decode_request_s: float
    context_token_s: float

    @classmethod
    def read(cls, path: Path) -> CostModel:
        """The model in a JSON file of exactly these fields.

        Raises InputError("--cost-model", ...) for a file that cannot be read or is no such JSON, and for numbers
        that are negative, not finite, over an hour, or all zero.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise _wrong(path, error.strerror or str(error)) from error
        except (ValueError, RecursionError) as error:  # no JSON, no UTF-8
            raise _wrong(path, f"not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise _wrong(path, "is no JSON object")
        names = [field.name for field in fields(cls)]
        if missing := [name for name in names if name not in values]:
            raise _wrong(path, f"lacks {', '.join(missing)}")
        if unknown := values.keys() - set(names):
            raise _wrong(path, f"holds unknown keys: {', '.join(sorted(unknown))}")
        if (
            not isinstance(values["name"], str)
            or not values["name"].strip()
            or not values["name"].isprintable()
        ):
            raise _wrong(path, f"name {values['name']!r} must be a line of text")
        seconds = [_seconds(path, name, values[name]) for name in names[1:]]
        if not any(seconds):
            raise _wrong(path, "says that every step takes no time at all")
        return cls(values["name"], *seconds)

    def step_seconds(self, plan: StepPlan) -> float:
        """How long the step takes. Nothing but sums and products in a fixed order: equal on every machine."""
        prefill_tokens = attention_pairs = decode_requests = context_tokens = 0
        for request, start, n_tokens, _ in plan.spans:
            if start >= request.prompt_len:
                decode_requests += 1
                context_tokens += start + 1
            else:
                prefill_tokens += n_tokens
                attention_pairs += n_tokens * start + n_tokens * (n_tokens + 1) // 2
        return (
            self.constant_s
            + self.prefill_token_s * prefill_tokens
            + self.attention_pair_s * attention_pairs
            + self.decode_request_s * decode_requests
            + self.context_token_s * context_tokens
        )

    def describe(self) -> dict[str, Any]:
        """The fields, as run.json holds them."""
        return asdict(self)


def _seconds(path: Path, name: str, value: object) -> float:
    # NaN and Infinity are valid to Python's reader; an int may be too long for a float.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _LONGEST_S:
        raise _wrong(path, f"{name} {_short(value)} must be a number from 0 to {_LONGEST_S:g} seconds")
    return float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _wrong(path: Path, why: str) -> InputError:
    return InputError("--cost-model", str(path), why)
