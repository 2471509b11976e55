"""Messages of a chat to the text of one prompt."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from roseinfer.errors import InputError
from roseinfer.tokenization import ChatText

Message = Mapping[str, str]


class ChatTemplate:
    """A model's own template, in Jinja, which cannot reach out of its sandbox. Read when it is first used.

    special_tokens: `bos_token` and so on, as the template calls them.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message]) -> ChatText:
        """`messages` have role and content. Raises InputError for what the template does not take."""
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except InputError:
            raise
        except Exception as error:  # a template runs on what clients send
            why = f"the model's chat template does not take them ({type(error).__name__})"
            raise InputError("messages", None, why) from error
        return ChatText(text)

    @cached_property
    def _template(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json  # Jinja's own is for HTML
        environment.globals.update(raise_exception=_refuse, strftime_now=time.strftime)
        return environment.from_string(self._source)


class _Generation(Extension):
    """`{% generation %}` marks what a model has said itself, for its training: here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja has it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def plain_chat(messages: Sequence[Message]) -> str:
    """For models without a template: a line `role: content` for each message, then `assistant:`."""
    return "".join(f"{one['role']}: {one['content']}\n" for one in messages) + "assistant:"


def _refuse(why: Any) -> NoReturn:
    raise InputError("messages", None, f"the model's chat template says: {why}")
