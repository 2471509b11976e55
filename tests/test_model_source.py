from __future__ import annotations

from pathlib import Path

import pytest

from roseinfer.errors import ModelError
from roseinfer.model_source import SourceKind, check_model_source


def folder_with(tmp_path: Path, **files: str) -> str:
    for name, text in files.items():
        (tmp_path / name.replace("__", ".")).write_text(text)
    return str(tmp_path)


def refused(model: str) -> str:
    with pytest.raises(ModelError) as caught:
        check_model_source(model)
    message = str(caught.value)
    assert "\n" not in message
    assert repr(model) in message
    return message


def test_builtin() -> None:
    assert check_model_source("builtin:gpt2").kind is SourceKind.BUILTIN


def test_folder(tmp_path: Path) -> None:
    source = check_model_source(folder_with(tmp_path, config__json="{}", model__safetensors=""))
    assert (source.kind, source.path) == (SourceKind.FOLDER, tmp_path)


def test_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    source = check_model_source(str(file))
    assert (source.kind, source.path) == (SourceKind.GGUF, file)


@pytest.mark.parametrize("model", ["gpt2", "owner/name", "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M"])
def test_hub_id(model: str) -> None:
    assert check_model_source(model).kind is SourceKind.HUB


@pytest.mark.parametrize("model", ["foo--bar", "a..b", "owner/name.git", "n" * 97, "n" * 300])
def test_a_name_that_no_hub_would_take(model: str) -> None:
    assert model in refused(model)


def test_unknown_builtin_names_those_there_are() -> None:
    assert "builtin:gpt2" in refused("builtin:gpt5")


def test_folder_without_config(tmp_path: Path) -> None:
    assert "config.json" in refused(folder_with(tmp_path, model__safetensors=""))


@pytest.mark.parametrize("config", ["{", "[]", ""])
def test_folder_with_a_broken_config(tmp_path: Path, config: str) -> None:
    assert "config.json" in refused(folder_with(tmp_path, config__json=config, model__safetensors=""))


def test_folder_without_weights(tmp_path: Path) -> None:
    assert "no weights" in refused(folder_with(tmp_path, config__json="{}"))


@pytest.mark.parametrize("name", ["pytorch_model__bin", "model__pt"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str) -> None:
    assert "pickles" in refused(folder_with(tmp_path, config__json="{}", **{name: ""}))


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_text("text")
    assert "not a GGUF" in refused(str(file))


@pytest.mark.parametrize(
    "model", ["", "/no/such/folder", "./missing", "a/b/c", "missing.gguf", "own er/name", "-x"]
)
def test_what_is_no_name_at_all(model: str) -> None:
    assert "no such file" in refused(model)
