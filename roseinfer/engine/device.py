"""What to compute on, and in which dtype."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from roseinfer.engine.linear import halving_works
from roseinfer.errors import InputError

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def resolve_device(device: str) -> torch.device:
    """ "auto" is cuda where there is a GPU. Raises InputError for anything that is not here."""
    if device not in ("auto", "cpu", "cuda"):
        raise InputError("device", device, "must be auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device", device, "torch sees no GPU here")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def settle_kernels(device: torch.device) -> None:
    """Switches cuDNN's attention off in this process where the device is a GPU; elsewhere it does nothing.

    SDPA would prefer it on Hopper. It plans anew for every shape and in every thread, tens of ms each, and contexts
    grow with every step.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """fp16 is for the weights of linear layers on a CPU, which then computes in fp32.

    "auto" is bf16 where the device computes it fast, else fp16 where a CPU has products for it, else fp32.
    """
    if dtype == "auto":
        if _bf16_is_fast(device):
            return torch.bfloat16
        return torch.float16 if device.type == "cpu" and halving_works() else torch.float32
    if dtype not in _DTYPES:
        raise InputError("dtype", dtype, f"must be auto, {', '.join(_DTYPES)}")
    if device.type == "cuda" and _DTYPES[dtype] == torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise InputError("dtype", dtype, "this GPU does not compute it")
    if _DTYPES[dtype] == torch.float16 and device.type == "cuda":
        raise InputError("dtype", dtype, "is for weights on a CPU; a GPU takes bfloat16 or float32")
    if _DTYPES[dtype] == torch.float16 and not halving_works():
        raise InputError("dtype", dtype, "this torch has no products of float16 weights for this CPU")
    return _DTYPES[dtype]


def _bf16_is_fast(device: torch.device) -> bool:
    """A CPU without matrix or AVX-512 instructions for bf16 emulates it, an order of magnitude slower than fp32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Private, like all of torch's questions about the CPU; absent ones count as no.
    questions = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, question, bool)() for question in questions)


def device_name(device: torch.device) -> str:
    """The product, for example "NVIDIA H200" or "AMD EPYC 7763 64-Core Processor"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32", "bfloat16": as torch prints it, without the package."""
    return str(dtype).removeprefix("torch.")
