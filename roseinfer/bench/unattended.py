"""A sweep that is started from Python: the same flags and checks as on the command line, and nothing printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_type_hints

from roseinfer.bench.environment import public_command
from roseinfer.bench.experiment import Experiment
from roseinfer.bench.options import NOT_IN_FILES, SweepOptions, field_value, flag
from roseinfer.bench.session import Session
from roseinfer.errors import InputError

_FOR_A_TERMINAL: Final = NOT_IN_FILES | {"json"}


def run_sweep(flags: Mapping[str, Any]) -> Path:
    """Measures what `flags` (fields of SweepOptions) ask for; returns the run's folder.

    Raises InputError for what the command line would refuse, RunError where measuring fails.
    """
    kinds = get_type_hints(SweepOptions)
    values: dict[str, Any] = {"quiet": True}
    for field, value in flags.items():
        if field not in kinds or field in _FOR_A_TERMINAL:
            raise InputError(field, _plain(value), "is no flag that a sweep takes from Python")
        if value is not None:
            values[field] = field_value(field, field, _plain(value), kinds[field])
    experiment = Experiment.from_options(replace(SweepOptions(), **values), values.keys())
    session = Session(experiment, default_name="sweep", command=_command(values))
    session.measure()
    assert session.folder is not None
    return session.folder.path


def _plain(value: Any) -> Any:
    """Tuples as lists; None in a list of limits is 0, as flags have it."""
    if isinstance(value, list | tuple):
        return [0 if item is None else item for item in value]
    return value


def _command(values: Mapping[str, Any]) -> str:
    """The command line that would have measured the same."""
    words = ["roseinfer-bench", "sweep"]
    for field, value in values.items():
        if value is True:
            words.append(flag(field))
        elif value is not False:
            items = value if isinstance(value, list) else [value]
            words += [word for item in items for word in (flag(field), str(item))]
    return public_command(words)
