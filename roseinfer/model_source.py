"""Where a model comes from, told by its name alone: checked before torch is imported or anything loads."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from roseinfer.errors import ModelError

BUILTIN_PREFIX = "builtin:"
BUILTIN_MODELS = ("builtin:gpt2",)
BUILTIN_CONTEXT_TOKENS = 1024

_HUB_ID = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_HUB_ID_LENGTH = 96
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_GGUF_MAGIC = b"GGUF"


class SourceKind(StrEnum):
    BUILTIN = "builtin"
    FOLDER = "folder"
    GGUF = "gguf"
    HUB = "hub"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`path` is the folder or the .gguf file, None for a built-in model and a hub id."""

    name: str
    kind: SourceKind
    path: Path | None = None


def check_model_source(model: str) -> ModelSource:
    """Says what `model` names. Reads a few bytes of local files and asks no network.

    Raises ModelError where it cannot work: an unknown built-in, a folder without config or safetensors, a file
    that is no GGUF, a path that is not there, a name that no hub would take.
    """
    if model.startswith(BUILTIN_PREFIX):
        if model not in BUILTIN_MODELS:
            raise ModelError("model", model, f"unknown built-in model, there is {', '.join(BUILTIN_MODELS)}")
        return ModelSource(model, SourceKind.BUILTIN)
    path = local_path(model)
    try:
        is_folder, is_file = bool(model) and path.is_dir(), path.is_file()
    except OSError as error:  # a name too long for any file
        raise ModelError("model", model, f"no file or folder can be called so: {error.strerror}") from None
    if is_folder:
        check_folder(model, path)
        return ModelSource(model, SourceKind.FOLDER, path)
    if is_file:
        _check_gguf(model, path)
        return ModelSource(model, SourceKind.GGUF, path)
    if not _HUB_ID.fullmatch(model) or path.suffix in (".gguf", ".git") or len(model) > _HUB_ID_LENGTH:
        raise ModelError("model", model, "no such file or folder, and not a hub id (owner/name)")
    return ModelSource(model, SourceKind.HUB)


def local_path(model: str) -> Path:
    """Where `model` is, if it is a file or a folder."""
    try:
        return Path(model).expanduser()
    except RuntimeError:  # the home of somebody who is not known here
        return Path(model)


def check_folder(model: str, folder: Path) -> None:
    """Raises ModelError unless `folder` holds config.json and safetensors weights. `model` is named in the error."""
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError("model", model, "the folder has no config.json")
    try:
        if not isinstance(json.loads(config.read_text(encoding="utf-8")), dict):
            raise ValueError
    except ValueError:
        raise ModelError("model", model, "config.json is not a JSON object") from None
    if any(folder.glob("*.safetensors")):
        return
    if any(file for pattern in _PICKLES for file in folder.glob(pattern)):
        raise ModelError(
            "model", model, "its weights are pickles, which may run code: only safetensors are read"
        )
    raise ModelError("model", model, "the folder has no weights (*.safetensors)")


def _check_gguf(model: str, path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelError("model", model, f"cannot be read: {error.strerror}") from None
    if magic != _GGUF_MAGIC:
        raise ModelError("model", model, "not a GGUF file; other single files are not read")


def known_context(source: ModelSource) -> int | None:
    """Tokens that the model's context holds, as far as can be told without loading it."""
    if source.kind is SourceKind.BUILTIN:
        return BUILTIN_CONTEXT_TOKENS
    if source.kind is SourceKind.FOLDER:
        assert source.path is not None
        config = json.loads((source.path / "config.json").read_bytes())
        tokens = config.get("max_position_embeddings", config.get("n_positions"))
        return tokens if isinstance(tokens, int) else None
    return None
