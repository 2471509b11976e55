from __future__ import annotations

import pytest

from roseinfer.chat_template import ChatTemplate, plain_chat
from roseinfer.errors import InputError

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_gets_messages_and_special_tokens() -> None:
    assert (
        ChatTemplate(TEMPLATE, {"bos_token": "^"}).render(MESSAGES) == "^<system>be brief<user>hi<assistant>"
    )


def test_what_the_tokenizer_puts_in_front_is_not_there_twice() -> None:
    template = ChatTemplate(TEMPLATE, {"bos_token": "^"}, "^")
    assert template.render(MESSAGES) == "<system>be brief<user>hi<assistant>"


def test_without_a_template_each_message_is_a_line() -> None:
    assert plain_chat(MESSAGES) == "system: be brief\nuser: hi\nassistant:"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[7].content }}", "UndefinedError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_what_a_template_does_not_take_is_an_error_of_the_messages(source: str, why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.name == "messages"
