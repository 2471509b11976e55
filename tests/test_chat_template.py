from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from roseinfer.chat_template import ChatTemplate, plain_chat
from roseinfer.errors import InputError
from roseinfer.tokenization import FastTokenizer

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_gets_messages_and_special_tokens() -> None:
    assert (
        ChatTemplate(TEMPLATE, {"bos_token": "^"}).render(MESSAGES) == "^<system>be brief<user>hi<assistant>"
    )


def test_what_a_tokenizer_puts_in_front_is_the_template_s_to_write() -> None:
    tokenizer = Tokenizer(WordLevel({"^": 0, "a": 1}, "a"))
    tokenizer.post_processor = TemplateProcessing(single="^ $A", pair="^ $A $B", special_tokens=[("^", 0)])
    assert FastTokenizer(tokenizer).encode("a") == [0, 1]
    assert FastTokenizer(tokenizer).encode(ChatTemplate("a", {}).render(MESSAGES)) == [1]


def test_json_is_not_that_of_a_page() -> None:
    said = ChatTemplate("{{ messages[0].content | tojson }}", {}).render(
        [{"role": "user", "content": "<é'&"}]
    )
    assert said == '"<é\'&"'


def test_marks_for_training_change_nothing() -> None:
    assert ChatTemplate("a{% generation %}b{% endgeneration %}c", {}).render(MESSAGES) == "abc"


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
