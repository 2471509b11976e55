"""A .gguf file, converted once into a Hugging Face folder in the user's cache; later loads take the folder."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from roseinfer.errors import ModelError

_log = logging.getLogger(__name__)

_CONVERTER_VERSION = 1
"""Part of the cache's key, with the version of transformers: a corrected converter must not find old folders."""


def converted_folder(file: Path, name: str) -> Path:
    """The folder that holds `file` as float32 safetensors with its tokenizer; made now if it is not there.

    The first conversion takes tens of seconds and four bytes of disk per parameter. `name` is the model as its
    user named it. Raises ModelError where the file cannot be converted or the folder cannot be written.
    """
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    folder = _cache_root() / f"{digest[:32]}-{_CONVERTER_VERSION}-{transformers.__version__}"
    if folder.is_dir():
        return folder
    _log.warning("converting %s once, for all later loads; this takes up to a minute", file.name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    except OSError as error:
        raise ModelError("model", name, f"no place for its converted form: {error}") from None
    try:
        _convert(file, aside, name)
        aside.chmod(0o755)
        try:
            aside.rename(folder)  # at once or not at all
        except OSError:
            if not folder.is_dir():  # else another process was quicker, with the same content
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "roseinfer" / "gguf"


def _convert(file: Path, folder: Path, name: str) -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise ModelError("model", name, "to convert a .gguf file transformers needs the package accelerate")
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            trust_remote_code=False,
            **_dequantize(),
        )
    except Exception as error:  # whatever its parts raise: a bad file is the user's matter
        raise ModelError("model", name, f"cannot be converted ({type(error).__name__}: {error})") from error
    # Without this, transformers would note the quantisation that is no longer there, and refuse to save it.
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError as error:
        raise ModelError("model", name, f"its converted form cannot be written: {error}") from None


def _dequantize() -> dict[str, Any]:
    """Newer versions of transformers keep the weights in their blocks unless told otherwise."""
    if not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}
