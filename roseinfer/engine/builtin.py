"""`builtin:gpt2`: the architecture of GPT-2 124M with seeded random weights, the same on every machine."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.random import SFC64, Generator, SeedSequence
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from roseinfer.tokenization import (
    BUILTIN_BYTE_IDS,
    BUILTIN_EOS_ID,
    BUILTIN_EOS_TOKEN,
    BUILTIN_VOCAB_SIZE,
    builtin_tokenizer,
)

BUILTIN_SEED = 0
_STD = 0.02


def build_builtin(n_layer: int = 12) -> GPT2LMHeadModel:
    """The model in float32 on CPU; `n_layer` only so that tests can be quick.

    Greedy never picks a byte token or EOS: their rows of the embedding, which is the head as well, are zero.
    """
    config = GPT2Config(
        vocab_size=BUILTIN_VOCAB_SIZE,
        n_layer=n_layer,
        # The same formula as GPT-2's gelu_new, in one fused operator instead of eight.
        activation_function="gelu_pytorch_tanh",
        bos_token_id=BUILTIN_EOS_ID,
        eos_token_id=BUILTIN_EOS_ID,
    )
    with torch.device("meta"):  # torch's own initialisation would cost seconds, and is thrown away
        model = GPT2LMHeadModel(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    names = sorted(dict(model.named_parameters()))
    with ThreadPoolExecutor(torch.get_num_threads()) as pool, torch.no_grad():
        done = [
            pool.submit(_initialise, name, model.get_parameter(name), stream, n_layer)
            for name, stream in zip(names, SeedSequence(BUILTIN_SEED).spawn(len(names)), strict=True)
        ]
    for future in done:
        future.result()
    embedding = model.get_input_embeddings().weight.detach()
    embedding[[*BUILTIN_BYTE_IDS, BUILTIN_EOS_ID]] = 0.0
    return model.eval()


def _initialise(name: str, parameter: torch.Tensor, stream: SeedSequence, n_layer: int) -> None:
    """GPT-2's initialisation of one parameter. numpy's generators give the same numbers everywhere."""
    values = parameter.detach().numpy()
    if name.endswith("bias"):
        values.fill(0.0)
    elif ".ln_" in name:
        values.fill(1.0)
    else:
        Generator(SFC64(stream)).standard_normal(out=values, dtype=np.float32)
        values *= _STD / math.sqrt(2 * n_layer) if name.endswith("c_proj.weight") else _STD


def export_builtin(folder: Path, n_layer: int = 12) -> None:
    """Writes the built-in model and its tokenizer as a Hugging Face folder, for other servers to load."""
    build_builtin(n_layer).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=builtin_tokenizer().tokenizer,
        bos_token=BUILTIN_EOS_TOKEN,
        eos_token=BUILTIN_EOS_TOKEN,
    )
    tokenizer.save_pretrained(folder)
