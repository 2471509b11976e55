"""From a model's name to weights, tokenizer and end-of-sequence ids."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from roseinfer.chat_template import ChatTemplate
from roseinfer.engine.builtin import BUILTIN_SEED, build_builtin
from roseinfer.errors import ModelError
from roseinfer.model_source import ModelSource, SourceKind, check_folder
from roseinfer.tokenization import FastTokenizer, builtin_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HUB_TIMEOUT_S = 5.0
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model", "vocab.txt", "merges.txt"]
_HUB_OTHER_FILES = ["*/*", "consolidated*"]  # other formats of the same weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode on its device, and what belongs to it. `weights` says "real" or how they were drawn."""

    model: PreTrainedModel
    tokenizer: FastTokenizer
    eos_token_ids: frozenset[int]
    weights: str
    chat_template: ChatTemplate | None = None


def load_model(source: ModelSource, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Loads what `source` names. Raises ModelError, in one line, where that fails. Runs no code from the model."""
    if source.kind is SourceKind.BUILTIN:
        model = build_builtin().to(device=device, dtype=dtype)
        return LoadedModel(model, builtin_tokenizer(), _eos_ids(model), f"random (seed {BUILTIN_SEED})")
    with no_progress_bars():
        return _load_folder(_model_folder(source), source.name, device, dtype)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers draws bars on stderr by itself, also where nobody looks at a terminal."""
    were_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            transformers_logging.enable_progress_bar()


def _load_folder(folder: Path, name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=copy.deepcopy(config),
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        fast = FastTokenizer(tokenizer.backend_tokenizer).clone()
    except (
        Exception
    ) as error:  # transformers raises whatever its parts raise; a bad model is the user's matter
        raise ModelError("model", name, f"cannot be loaded: {_first_line(error)}") from error
    # transformers would go on with random values in their place.
    if missing := sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"]):
        raise ModelError(
            "model", name, f"{len(missing)} weights are missing or misshapen, {missing[0]} among them"
        )
    eos_ids, chat = _eos_ids(model, tokenizer.eos_token_id), _chat_template(tokenizer)
    return LoadedModel(model.to(device).eval(), fast, eos_ids, "real", chat)


def _chat_template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | None:
    try:
        source = tokenizer.get_chat_template()  # of several for several purposes the default
    except ValueError:
        return None
    return ChatTemplate(source, tokenizer.special_tokens_map)


def _model_folder(source: ModelSource) -> Path:
    """A local folder with config, safetensors and tokenizer."""
    if source.kind is SourceKind.HUB:
        return _download(source.name)
    assert source.path is not None
    if source.kind is SourceKind.GGUF:
        from roseinfer.engine.gguf import converted_folder

        return converted_folder(source.path, source.name)
    return source.path


def _download(hub_id: str) -> Path:
    """The hub's files in the hub's own cache; what is there already is used when the hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                hub_id,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_OTHER_FILES,
                etag_timeout=_HUB_TIMEOUT_S,
            )
        )
    except GatedRepoError:
        raise ModelError("model", hub_id, "the hub wants you to ask its owner for access first") from None
    except RepositoryNotFoundError:
        raise ModelError("model", hub_id, "no such file or folder, and no such model on the hub") from None
    except Exception as error:  # its HTTP client's, its own, the disk's
        why = f"no such file or folder, and the hub cannot be reached ({type(error).__name__})"
        raise ModelError("model", hub_id, why) from error
    check_folder(hub_id, folder)
    return folder


def _eos_ids(model: PreTrainedModel, tokenizer_eos: int | None = None) -> frozenset[int]:
    """All ids that end a stream: the generation config's and the model's, else the tokenizer's."""
    ids: set[int] = set()
    for config in (model.generation_config, model.config.get_text_config()):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            ids.update(eos if isinstance(eos, Iterable) else [eos])
    if not ids and tokenizer_eos is not None:
        ids.add(tokenizer_eos)
    return frozenset(ids)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
