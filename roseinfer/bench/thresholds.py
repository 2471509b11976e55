"""The rules of a gate: what a metric may be, in a TOML file of `[[rule]]` tables.

    [[rule]]
    metric = "p99_ttft_ms"
    max_ratio = 1.10               # against the baseline; or: max = 250, absolute
    cells = { max_inflight = 64 }  # only these; 0 or "none" is no limit; admission = "tokens:4096" is another kind
    observe = true                 # printed, and never decides

Metrics are the columns of `summary.SUMMARY_SCHEMA`. Where less is better a rule has `max_ratio` or `max`, where
more is better `min_ratio` or `min`.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from roseinfer.admission_spec import parse_admission
from roseinfer.bench.records import FACTORS
from roseinfer.bench.summary import SUMMARY_SCHEMA
from roseinfer.errors import InputError

_LATENCY: Final = re.compile(r"(p50|p95|p99|max|mean)_\w+_ms")
_HIGHER_IS_BETTER: Final = (
    "output_throughput request_throughput request_goodput good_share good completed admitted".split()
)
_LOWER_IS_BETTER: Final = (
    "reject_rate error_rate rejected error timeout cancelled incomplete recovery_s".split()
)

HIGHER_IS_BETTER: Final = {
    name: name in _HIGHER_IS_BETTER
    for name in SUMMARY_SCHEMA.names
    if name in _HIGHER_IS_BETTER or name in _LOWER_IS_BETTER or _LATENCY.fullmatch(name)
}
"""The metrics that a rule can have, and which way is up. Other columns of a summary are neither better nor worse."""

_BOUNDS: Final = {"max_ratio": False, "max": False, "min_ratio": True, "min": True}
"""Key of a bound: whether it is one for metrics of which more is better."""
_FACTORS: Final = ("max_inflight", *FACTORS)
_KEYS: Final = ("metric", *_BOUNDS, "cells", "observe")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A bound on one metric of the cells whose factors are as `cells` says (None: no limit, no bursts ...)."""

    metric: str
    bound: float
    is_ratio: bool  # of the run to the baseline
    cells: Mapping[str, float | str | None] = field(default_factory=dict)
    observe: bool = False

    @property
    def higher_is_better(self) -> bool:
        return HIGHER_IS_BETTER[self.metric]

    @property
    def demand(self) -> str:
        """What must be, e.g. "at most x1.1" or "at least 250"."""
        return f"at {'least' if self.higher_is_better else 'most'} {'x' if self.is_ratio else ''}{self.bound:.4g}"

    def applies_to(self, factors: Mapping[str, float | str | None]) -> bool:
        return all(factors[factor] == value for factor, value in self.cells.items())


DEFAULT_RULES: Final = (
    Rule(metric="p99_ttft_ms", bound=1.10, is_ratio=True),
    Rule(metric="output_throughput", bound=1 / 1.10, is_ratio=True),
)


def read_thresholds(path: Path) -> list[Rule]:
    """The rules of a file. Raises InputError naming the file, the rule by its number, and what is wrong with it."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError("--thresholds", str(path), error.strerror or str(error)) from error
    except ValueError as error:  # bad TOML, or no UTF-8
        raise InputError("--thresholds", str(path), f"not valid TOML: {error}") from error
    tables = content.pop("rule", [])
    if content:
        raise InputError(f"{path.name}: {next(iter(content))}", None, "only [[rule]] tables can stand here")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise InputError("--thresholds", str(path), "holds no [[rule]]")
    rules = [_rule(f"{path.name}: rule {number}", table) for number, table in enumerate(tables, 1)]
    if all(rule.observe for rule in rules):
        raise InputError("--thresholds", str(path), "every rule only observes: nothing would be judged")
    return rules


def _rule(name: str, table: Mapping[str, Any]) -> Rule:
    for key in table:
        if key not in _KEYS:
            raise InputError(f"{name}: {key}", table[key], f"no such key{_near(key, _KEYS)}")
    metric = str(table.get("metric"))
    if metric not in HIGHER_IS_BETTER:
        why = f"no such metric{_near(metric, HIGHER_IS_BETTER)}"
        if metric in SUMMARY_SCHEMA.names:
            why = "says neither better nor worse, or is the bound of an interval" + _near(
                metric, HIGHER_IS_BETTER
            )
        raise InputError(f"{name}: metric", metric, why)
    bounds = [key for key in _BOUNDS if key in table]
    if len(bounds) != 1:
        raise InputError(
            f"{name}: {metric}", " and ".join(bounds) or None, f"needs one of {', '.join(_BOUNDS)}"
        )
    (key,) = bounds
    bound, is_ratio = table[key], key.endswith("_ratio")
    if _BOUNDS[key] != HIGHER_IS_BETTER[metric]:
        right = ("min" if HIGHER_IS_BETTER[metric] else "max") + key[3:]
        more = "more" if HIGHER_IS_BETTER[metric] else "less"
        raise InputError(f"{name}: {key}", bound, f"of {metric} {more} is better: use {right}")
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not (0 <= bound < math.inf):
        raise InputError(f"{name}: {key}", bound, "must be a number >= 0")
    if is_ratio and not (0 < bound <= 1 if HIGHER_IS_BETTER[metric] else bound >= 1):
        raise InputError(
            f"{name}: {key}",
            bound,
            "must lie in (0, 1]" if HIGHER_IS_BETTER[metric] else "must be at least 1",
        )
    observe = table.get("observe", False)
    if not isinstance(observe, bool):
        raise InputError(f"{name}: observe", observe, "must be true or false")
    cells = _cells(f"{name}: cells", table.get("cells", {}))
    return Rule(metric=metric, bound=float(bound), is_ratio=is_ratio, cells=cells, observe=observe)


def _cells(name: str, table: object) -> dict[str, float | str | None]:
    if not isinstance(table, dict):
        raise InputError(name, table, "must be a table, such as { max_inflight = 64 }")
    cells: dict[str, float | str | None] = {}
    for factor, value in table.items():
        if factor not in _FACTORS:
            raise InputError(f"{name}.{factor}", value, f"no such factor{_near(factor, _FACTORS)}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if factor == "admission" and isinstance(value, str):
            cells["admission"] = str(parse_admission(value, f"{name}.admission"))
        elif factor == "admission" or not (is_number or value == "none"):
            form = "must look like inflight:64" if factor == "admission" else 'must be a number or "none"'
            raise InputError(f"{name}.{factor}", value, form)
        elif factor == "max_inflight":
            cells["admission"] = "none" if value in ("none", 0) else f"inflight:{int(value)}"
        else:
            cells[factor] = None if value == "none" else float(value)
    if len(cells) < len(table):
        raise InputError(
            name, table, 'names a limit twice: max_inflight = 64 is short for admission = "inflight:64"'
        )
    return cells


def _near(word: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, list(known), n=3)
    return (
        f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(sorted(known)[:12])} ..."
    )
