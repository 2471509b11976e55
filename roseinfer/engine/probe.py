"""Finds out, with one tiny step at load, whether our attention computes what a model asks of its attention.

What it does not honour is refused, never ignored: transformers leaves masks, and with them windows and chunks, to
the attention function, and hands all else to it as keyword arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AttentionInterface

from roseinfer.engine.attention import ATTENTION_NAME, STEP_ARGUMENT
from roseinfer.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_NAME = "roseinfer_probe"
_IRRELEVANT = {STEP_ARGUMENT, "scaling", "position_ids", "use_cache"}
"""Keyword arguments that `attend` honours or that change nothing once positions are applied."""

_HARMLESS = [("dropout", 0.0), ("is_causal", True), ("output_attentions", False)]

_STATIC_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


class LayerShape(NamedTuple):
    """What one layer keeps per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class _Call(NamedTuple):
    """One call of the attention function."""

    module: torch.nn.Module
    shape: LayerShape
    kwargs: dict[str, Any]


def probe(model: PreTrainedModel, name: str, max_model_len: int) -> list[LayerShape]:
    """Switches `model` to our attention and returns the shape of each layer's cache.

    `name` is the model as its user named it. Raises ModelError where a request of up to `max_model_len` tokens
    would not be computed as the model's authors meant.
    """
    config = model.config.get_text_config()
    try:
        _check_config(config, max_model_len)
        calls = _record(model)
        _check_layers(calls, config.num_hidden_layers)
        for call in calls:
            _check_call(call, max_model_len)
    except _UnsupportedError as unsupported:
        raise ModelError("model", name, f"{unsupported}; this engine would compute it wrongly") from None
    return [call.shape for call in calls]


class _UnsupportedError(Exception):
    """Carries what is not honoured."""


def _record(model: PreTrainedModel) -> list[_Call]:
    calls: list[_Call] = []
    model.set_attn_implementation(_PROBE_NAME)
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    try:
        with torch.inference_mode():
            model(
                input_ids=ids,
                position_ids=positions,
                logits_to_keep=positions[0, -1:],
                use_cache=False,
                **{STEP_ARGUMENT: calls},
            )
    except _UnsupportedError:
        raise
    except Exception as error:
        raise _UnsupportedError(
            f"its forward does not take a packed step ({type(error).__name__}: {error})"
        ) from error
    model.set_attn_implementation(ATTENTION_NAME)
    return calls


def _recording_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    calls: list[_Call] | None = kwargs.get(STEP_ARGUMENT)
    if calls is None:
        raise _UnsupportedError("it does not pass keyword arguments on to its attention")
    shape = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
    calls.append(_Call(module, shape, kwargs | {"attention_mask": attention_mask}))
    _, heads, n_tokens, _ = query.shape
    return query.new_zeros(1, n_tokens, heads, value.shape[-1]), None


def _check_layers(calls: list[_Call], num_layers: int) -> None:
    """Every layer must have called the attention function exactly once, in order."""
    if not calls:
        raise _UnsupportedError("it does not use transformers' AttentionInterface")
    layers = [getattr(call.module, "layer_idx", None) for call in calls]
    if layers != list(range(num_layers)):
        raise _UnsupportedError(
            f"of its {num_layers} layers, these have attention of the known kind: {layers}"
        )


def _check_call(call: _Call, max_model_len: int) -> None:
    for key, value in call.kwargs.items():
        if value is None or key in _IRRELEVANT or (not torch.is_tensor(value) and (key, value) in _HARMLESS):
            continue
        if key == "sliding_window" and value >= max_model_len:
            continue
        shown = f"={value}" if isinstance(value, int | float | str) else ""
        raise _UnsupportedError(f"its attention asks for {key}{shown}{_hint(key, value)}")
    if not getattr(call.module, "is_causal", True):
        raise _UnsupportedError("its attention is not causal")


def _check_config(config: Any, max_model_len: int) -> None:
    """What transformers would have put into the mask, or into the rotary embedding, never shows in a call."""
    for layer_type in set(getattr(config, "layer_types", None) or ()):
        window = getattr(config, _WINDOWS[layer_type], None) if layer_type in _WINDOWS else 0
        if layer_type != "full_attention" and (window is None or window < max_model_len):
            raise _UnsupportedError(f"it has layers of type {layer_type}{_hint('sliding_window', window)}")
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < max_model_len:
        raise _UnsupportedError(f"it has attention_chunk_size={chunk}{_hint('attention_chunk_size', chunk)}")
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", "default")
        original = rope.get("original_max_position_embeddings")
        if kind in _BATCH_DEPENDENT_ROPE and (original is None or max_model_len > original):
            raise _UnsupportedError(
                f"its {kind} rope scaling depends on the longest request of a step"
                f"{_hint('original_max_position_embeddings', original)}"
            )
        if kind not in _STATIC_ROPE | _BATCH_DEPENDENT_ROPE:
            raise _UnsupportedError(f"its rope scaling is of the unknown type {kind}")


_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """One dictionary for the model, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or ([parameters] if parameters else [])


def _hint(key: str, value: object) -> str:
    """How to serve the model nevertheless, where a shorter context is enough."""
    if key in {"sliding_window", "attention_chunk_size", "original_max_position_embeddings"} and value:
        return f" (max_model_len of at most {value} would do)"
    return ""


AttentionInterface.register(_PROBE_NAME, _recording_attention)
