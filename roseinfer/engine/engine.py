"""InferenceEngine: a loaded model, ready to make executors and tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from roseinfer.engine.decode_attention import in_place_works
from roseinfer.engine.device import device_name, dtype_name, resolve_device, resolve_dtype, settle_kernels
from roseinfer.engine.executor import TorchExecutor
from roseinfer.engine.gpt2 import GPT2
from roseinfer.engine.graphs import DecodeGraphs
from roseinfer.engine.kv import KVPool
from roseinfer.engine.linear import LARGEST_HALF, packs
from roseinfer.engine.llama import Llama
from roseinfer.engine.loading import LoadedModel, load_model
from roseinfer.engine.model import Model
from roseinfer.engine.prefill_attention import takes_blocks
from roseinfer.engine.probe import probe
from roseinfer.engine.staging import Staged
from roseinfer.engine.transformers_path import TransformersModel
from roseinfer.engine.varlen import flash_for
from roseinfer.errors import InputError, ModelError
from roseinfer.executor import KV_BLOCK_TOKENS, Clock
from roseinfer.model_source import check_model_source
from roseinfer.tokenization import FastTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CPU_BATCHED_TOKENS = 512
_CUDA_BATCHED_TOKENS = 8192
_MOST_WARMED = 64
"""Batch sizes above this are left cold: each costs tens of ms at start, and what it saves is small beside a step."""

_NEEDS_CUDA = "needs a GPU: device is cpu"

_CPU_KV_BYTES = 2 * 2**30
_CUDA_KV_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What was loaded and how it is computed; plain values, stored with every run."""

    model: str  # as its user named it
    architecture: str
    weights: str  # "real" or "random (seed N)"
    parameters: int
    context_length: int  # the model's own, in tokens
    max_model_len: int  # what is served of it
    device: str
    device_name: str
    dtype: str  # computed in; "float16": what the weights of linear layers are kept in, and float32 is computed in
    num_threads: int  # of one operator, on CPU
    linear_kernels: str  # "packed (oneDNN)", "float16 weights (FBGEMM)" or "plain"
    implementation: str  # "native" or "transformers"
    matrix_parameters: int  # of the linear layers, the head left out: 2 of these are the work of a token
    weight_bytes: int  # read by a step of one token: linear layers and head
    kv_bytes_per_token: int
    kv_layout: str  # "contiguous" or "paged"
    attention: str  # "SDPA", and what replaces it on this CPU; on CUDA a paged layout may have "FA2" or "FA3"
    cuda_graph: bool  # decodes are replayed


class InferenceEngine:
    """Implements `roseinfer.executor.Engine` with torch and transformers. Make one with `from_pretrained`."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        name: str,
        max_model_len: int | None = None,
        native: bool = True,
        half_weights: bool = False,
        paged_attn: bool | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        """Takes over `loaded`. `native` False keeps a model that has a native form on transformers' modules.

        half_weights: linear layers of a float32 model on a CPU keep float16 weights, and compute in float32.
        paged_attn, cuda_graph: see `from_pretrained`.
        Raises ModelError for a model that this engine would not compute faithfully.
        """
        model = loaded.model
        config = model.config.get_text_config()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        dtype = next(model.parameters()).dtype
        if half_weights:
            _check_halves(model, name)
        context_length = getattr(config, "max_position_embeddings", None)
        if context_length is None:
            raise ModelError("model", name, "its config names no max_position_embeddings")
        self._max_model_len = _checked_len(max_model_len, context_length)
        self._vocab_size = int(model.get_input_embeddings().num_embeddings)
        layers = probe(model, name, self._max_model_len)
        matrices, head = _matrix_parameters(model)
        self._model, implementation = _implementation(model, self._max_model_len, native, half_weights)
        self._device = model.device
        settle_kernels(model.device)
        self._paged_attn = model.device.type == "cuda" if paged_attn is None else paged_attn
        self._tokenizer = loaded.tokenizer
        self.chat_template = loaded.chat_template
        self._eos_token_ids = loaded.eos_token_ids
        self._flash = None
        if self._paged_attn:
            self._flash = flash_for(
                model.device, dtype, [(layer.key_dim, layer.value_dim) for layer in layers]
            )
        self._reads_in_place = model.device.type == "cpu" and in_place_works(dtype)
        why_not = self._why_no_graphs(implementation)
        if cuda_graph and why_not is not None:
            raise InputError("cuda_graph", cuda_graph, why_not)
        self._uses_graphs = why_not is None and cuda_graph is not False
        self._graphs: DecodeGraphs | None = None  # of the KV tensors last given out
        self._kv = KVPool(layers, model.device, dtype, spare_blocks=int(self._uses_graphs))
        self._warmed = 0  # batch sizes up to this
        self._kv_bytes = _CPU_KV_BYTES
        if model.device.type == "cuda":  # settled now: later on, earlier KV tensors count as memory in use
            self._kv_bytes = int(_CUDA_KV_SHARE * torch.cuda.mem_get_info(model.device)[0])
        self.description = EngineDescription(
            model=name,
            architecture=type(model).__name__,
            weights=loaded.weights,
            parameters=parameters,
            context_length=context_length,
            max_model_len=self._max_model_len,
            device=model.device.type,
            device_name=device_name(model.device),
            dtype=dtype_name(torch.float16 if half_weights else dtype),
            num_threads=torch.get_num_threads(),
            linear_kernels=_linear_kernels(model.device, dtype, half_weights),
            implementation=implementation,
            matrix_parameters=matrices,
            weight_bytes=(matrices + head) * (2 if half_weights else dtype.itemsize),
            kv_bytes_per_token=self._kv.bytes_per_token,
            kv_layout="paged" if self._paged_attn else "contiguous",
            attention=self._flash or _sdpa(model.device, dtype, self._reads_in_place),
            cuda_graph=self._uses_graphs,
        )

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        num_threads: int | None = None,
        native: bool = True,
        paged_attn: bool | None = None,
        cuda_graph: bool | None = None,
    ) -> InferenceEngine:
        """Loads `builtin:gpt2`, a Hugging Face folder, a .gguf file or a hub id.

        device: auto, cpu or cuda. dtype: fp32, bf16, or fp16 for the weights of linear layers on a CPU, computed in
        fp32; auto: see `resolve_dtype`. max_model_len: tokens a request may span, None for the model's
        context. num_threads: of torch in this process, None leaves them. native: see `__init__`. paged_attn: the KV
        cache is read block by block, and requests share what they have in common; else each has its own, in one piece
        where there is room. None chooses: paged on CUDA alone. cuda_graph: decodes are captured once for each of a few
        batch sizes, and replayed. None does so where it can be done: on CUDA, paged, for native models.
        Raises InputError for values that cannot work, ModelError for a model that cannot.
        """
        source = check_model_source(model)
        if num_threads is not None:
            if num_threads < 1:
                raise InputError("num_threads", num_threads, "must be at least 1")
            torch.set_num_threads(num_threads)
        on = resolve_device(device)
        if cuda_graph and on.type != "cuda":
            raise InputError("cuda_graph", cuda_graph, _NEEDS_CUDA)
        resolved = resolve_dtype(dtype, on)
        half = resolved == torch.float16
        loaded = load_model(source, on, torch.float32 if half else resolved)
        return cls(
            loaded,
            name=model,
            max_model_len=max_model_len,
            native=native,
            half_weights=half,
            paged_attn=paged_attn,
            cuda_graph=cuda_graph,
        )

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    @property
    def paged_attn(self) -> bool:
        return self._paged_attn

    @property
    def launches_async(self) -> bool:
        is_beside: bool = self._device.type == "cuda"
        return is_beside

    def default_num_batched_tokens(self, max_batch_size: int) -> int:
        """Large enough for products at full speed, small enough that decodes do not wait long behind a prefill."""
        base = _CUDA_BATCHED_TOKENS if self._device.type == "cuda" else _CPU_BATCHED_TOKENS
        return max(base, 2 * max_batch_size)

    def default_kv_cache_tokens(self, max_batch_size: int) -> int:
        """A full batch of full contexts, or what a fair share of memory holds; a whole number of blocks."""
        tokens = min(max_batch_size * self._max_model_len, self._kv_bytes // self._kv.bytes_per_token)
        blocks = -(-max(tokens, self._max_model_len) // KV_BLOCK_TOKENS)
        return blocks * KV_BLOCK_TOKENS

    def make_tokenizer(self) -> FastTokenizer:
        return self._tokenizer.clone()

    def make_executor(self, *, num_kv_blocks: int, max_batch_size: int, clock: Clock) -> TorchExecutor:
        """An executor of its own KV. Drop the last one before making the next: then its memory is used again.

        A decode of every batch size up to 64 was computed once when this returns, or captured of those that graphs
        have, so that no request pays for being the first. Steps with a prefill are left cold: they have any number of
        tokens.
        """
        if not self._kv.has(num_kv_blocks):
            self._graphs = None  # they hold the old tensors, and their memory is wanted
        kv = self._kv.tensors(num_kv_blocks)
        if self._uses_graphs:  # CUDA only
            if self._graphs is None:
                self._graphs = DecodeGraphs(
                    self._model,
                    kv,
                    Staged(self._device),
                    max_model_len=self._max_model_len,
                    flash=self._flash,
                )
            self._graphs.warm_up(max_batch_size)
        executor = TorchExecutor(
            self._model,
            kv,
            clock,
            paged_attn=self._paged_attn,
            flash=self._flash,
            reads_in_place=self._reads_in_place,
            graphs=self._graphs,
        )
        self._kv.lend(executor)
        if not self._uses_graphs:
            warmed = min(max_batch_size, _MOST_WARMED)
            executor.warm_up(range(self._warmed + 1, warmed + 1))
            self._warmed = max(self._warmed, warmed)
        return executor

    def _why_no_graphs(self, implementation: str) -> str | None:
        if self._device.type != "cuda":
            return _NEEDS_CUDA
        if not self._paged_attn:
            return "needs the paged layout (paged_attn): it reads every batch in the same way"
        if implementation != "native":
            return f"needs a model with a native form: what {implementation} computes may wait for the host"
        return None


def _implementation(
    model: PreTrainedModel, max_model_len: int, native: bool, half: bool
) -> tuple[Model, str]:
    if native and GPT2.computes(model):
        return GPT2(model, half=half), "native"
    if native and Llama.computes(model):
        return Llama(model, max_model_len, half=half), "native"
    return TransformersModel(model, half=half), "transformers"


def _check_halves(model: PreTrainedModel, name: str) -> None:
    """Raises InputError where weights cannot be kept in float16 at all, ModelError for one that does not fit."""
    if model.device.type != "cpu" or model.dtype != torch.float32:
        raise InputError(
            "half_weights", True, f"is for float32 on a CPU, not {model.dtype} on {model.device}"
        )
    for module in model.modules():
        if type(module) in (nn.Linear, Conv1D):
            largest = float(module.get_parameter("weight").detach().abs().max())
            if not largest <= LARGEST_HALF:  # NaN too
                why = f"has a weight of {largest:g}, which float16 cannot hold: choose another dtype"
                raise ModelError("model", name, why)


def _sdpa(device: torch.device, dtype: torch.dtype, reads_in_place: bool) -> str:
    """torch's attention, and what is used in its place where something is faster."""
    names = ["SDPA"]
    if takes_blocks(device, dtype):
        names.append("prefills in blocks")
    if reads_in_place:
        names.append("decodes in place (numba)")
    return ", ".join(names)


def _linear_kernels(device: torch.device, dtype: torch.dtype, half: bool) -> str:
    if half:
        return "float16 weights (FBGEMM)"
    return "packed (oneDNN)" if packs(device, dtype) else "plain"


def _matrix_parameters(model: PreTrainedModel) -> tuple[int, int]:
    """Of the linear layers, and of the head."""
    head = model.get_output_embeddings()
    layers = [
        module for module in model.modules() if type(module) in (nn.Linear, Conv1D) and module is not head
    ]
    return sum(layer.get_parameter("weight").numel() for layer in layers), head.weight.numel()


def _checked_len(max_model_len: int | None, context_length: int) -> int:
    if max_model_len is None:
        return context_length
    if not 2 <= max_model_len <= context_length:
        raise InputError(
            "max_model_len", max_model_len, f"must lie between 2 and the context, {context_length}"
        )
    return max_model_len
