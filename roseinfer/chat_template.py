"""Messages of a chat to the text of one prompt."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from roseinfer.errors import InputError

Message = Mapping[str, str]


class ChatTemplate:
    """A model's own template, in Jinja, which cannot reach out of its sandbox. Read when it is first used.

    special_tokens: `bos_token` and so on, as the template calls them.
    encoded_prefix: text that the tokenizer puts in front of every prompt by itself; templates that write it as well
        do not get it twice.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], encoded_prefix: str = "") -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._encoded_prefix = encoded_prefix

    def render(self, messages: Sequence[Message]) -> str:
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
        return text.removeprefix(self._encoded_prefix)

    @cached_property
    def _template(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals.update(raise_exception=_refuse, strftime_now=time.strftime)
        return environment.from_string(self._source)


def plain_chat(messages: Sequence[Message]) -> str:
    """For models without a template: a line `role: content` for each message, then `assistant:`."""
    return "".join(f"{one['role']}: {one['content']}\n" for one in messages) + "assistant:"


def _refuse(why: Any) -> NoReturn:
    raise InputError("messages", None, f"the model's chat template says: {why}")
