"""Commands of the command line that are made out of a class of flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

import typer

from roseinfer.bench.options import RunOptions

Options = TypeVar("Options", bound=RunOptions)


def with_flags(
    kind: type[Options],
) -> Callable[[Callable[[Options, Collection[str]], None]], Callable[..., None]]:
    """Makes a command out of a function of (options, names of the fields that the user set)."""

    def decorate(function: Callable[[Options, Collection[str]], None]) -> Callable[..., None]:
        def command(ctx: typer.Context, **values: Any) -> None:
            given = {
                name
                for name in values
                if (source := ctx.get_parameter_source(name)) and source.name != "DEFAULT"
            }
            function(kind(**values), given)

        hints = get_type_hints(kind, include_extras=True)
        parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            for field in fields(kind)
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {"ctx": typer.Context, **hints}
        command.__doc__ = function.__doc__
        return command

    return decorate
