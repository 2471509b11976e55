"""Our sweep against a server that is not ours: what does vLLM's own limit do to the TTFT of a burst?

vLLM's --max-num-queued-reqs bounds waiting + running requests, as our limit does, and over it vLLM refuses with 503.
It is read once, at start, so that each limit has a server of its own. The model is the built-in one, written out as a
Hugging Face folder. The first call makes vLLM's environment in .peers/. Further flags are those of `roseinfer-bench
sweep`, and override what is asked for here:

    python experiments/foreign_server.py [--repeats 5] [--max-inflight 0,8,16] [--output-dir results/reference]
"""

from __future__ import annotations

import multiprocessing
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Final

from peer_env import PEER_VARIABLES, free_port, peer_python
from roseinfer.bench.cli import main as bench

SWEEP: Final = {
    "experiment-name": "foreign_server",
    "max-inflight": "0,8,16",
    "burst-size": "32",
    "prompt-len": "64",
    "max-new-tokens": "16",
    "repeats": "3",
    "warmup-runs": "1",  # vLLM compiles as it goes
    "tokenizer": "builtin",
}
VARIABLES: Final = PEER_VARIABLES | {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""1 GiB holds 14,000 tokens of GPT-2 in float32, four times what a burst needs."""

FLAGS: Final = (
    "--host 127.0.0.1 --port {port} --served-model-name gpt2 --dtype float32 --max-model-len 512"
    " --no-enable-prefix-caching [[--max-num-queued-reqs {max_inflight}]]"
)


def main() -> None:
    python = peer_python()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "gpt2"
        export = multiprocessing.get_context("spawn").Process(target=_export, args=(folder,))
        export.start()  # torch and the model end with it
        export.join()
        if export.exitcode:
            raise SystemExit("the model could not be written")
        flags = SWEEP | {
            "target": f"http://127.0.0.1:{free_port()}/v1",
            "target-cmd": f"{shlex.join(_server(python))} --model {shlex.quote(str(folder))} {FLAGS}",
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        sys.argv[1:] = ["sweep", *words, *sys.argv[1:]]
        bench()


def _export(folder: Path) -> None:
    from roseinfer.engine.builtin import export_builtin

    export_builtin(folder)


def _server(python: Path) -> list[str]:
    """`env`, so that the record shows what was set."""
    variables = [f"{name}={value}" for name, value in VARIABLES.items()]
    module = "vllm.entrypoints.openai.api_server"
    return ["env", *variables, str(python), "-W", "ignore", "-m", module]


if __name__ == "__main__":
    main()
