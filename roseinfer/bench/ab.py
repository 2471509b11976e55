"""A against B on one machine: two checkouts of the package, or two configurations, in blocks A B, B A, A B ...

A machine that drifts, or is slow for a minute, hits both sides of a block alike, so that the sides are compared block
by block. Each side of a block is a process of its own, which measures every cell once; block k uses seed + k on
both sides, so both get the same requests. What a process measured becomes repeat k of its side's run at once: two
runs, `<run id>-a` and `<run id>-b`, that every other command can read.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pandas as pd

from roseinfer.bench.checkouts import Checkout
from roseinfer.bench.environment import public_command, source_sha256
from roseinfer.bench.measurement import conclude
from roseinfer.bench.store import RunFolder, check_name, check_writable
from roseinfer.errors import InputError, RunError

_ENTRY: Final = """
import sys
from roseinfer.bench import cli, session
sys.argv[0] = "roseinfer-bench"
session.Session.draw = lambda *_: None  # figures of a single repeat are not worth their time
cli.main()
"""
_OURS: Final = frozenset(
    "--repeats --repeat-runs --resume --dry-run --seed --run-id --experiment-name --output-dir -o --json".split()
)
_CARRIED_OUT: Final = (0, 4, 5)
"""Exit codes of a sweep; what it measured may be invalid, or nothing: the check says so."""


@dataclass(frozen=True)
class Variant:
    """One side: its code, and the flags that only it gets."""

    name: str  # "a" or "b"
    checkout: Checkout
    flags: Sequence[str] = ()


@dataclass
class BlockedRuns:
    """The two runs of one `ab`. `seed` is that of the first block; `say` is told what starts."""

    variants: tuple[Variant, Variant]
    flags: Sequence[str]  # of `sweep`, for both sides
    blocks: int
    seed: int
    output_dir: Path
    name: str
    run_id: str
    say: Callable[[str], None]
    runs: dict[str, RunFolder] = field(default_factory=dict, init=False)
    _workloads: dict[str, list[pd.DataFrame]] = field(default_factory=dict, init=False)

    def check(self) -> list[str]:
        """The cells. Raises InputError for what would keep a side from running, or the sides from being compared."""
        for flag, value, least in (("--blocks", self.blocks, 1), ("--seed", self.seed, 0)):
            if value < least:
                raise InputError(flag, value, f"must be a whole number >= {least}")
        for word in [*self.flags, *self.variants[0].flags, *self.variants[1].flags]:
            if word.partition("=")[0] in _OURS:
                raise InputError(word, None, "belongs to ab itself, which repeats by --blocks")
        check_name("--experiment-name", self.name)
        for variant in self.variants:
            check_name("--run-id", self._run_id(variant))
            if (self.output_dir / self.name / self._run_id(variant)).exists():
                raise InputError("--run-id", self.run_id, f"{self.name} has a run of this id")
        check_writable(self.output_dir, self.name)
        plans = []
        for variant in self.variants:
            self._check_path(variant)
            plan = json.loads(_python(variant, _ENTRY, *self._words(variant, 0), "--dry-run", "--json"))
            plans.append([str(line).partition(":")[0] for line in plan])
        if plans[0] != plans[1]:
            cells = f"a has {', '.join(plans[0])}, b has {', '.join(plans[1])}"
            why = f"the sides need the same cells, so no swept flag can differ (sweep both values instead): {cells}"
            raise InputError("flags of sweep", None, why)
        return plans[0]

    def measure(self) -> tuple[RunFolder, RunFolder]:
        """All blocks. Interrupted at any moment, it loses at most the side of a block that was running."""
        place = self.output_dir / self.name
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".ab-", dir=place) as aside:
            for block in range(self.blocks):
                for variant in self.variants[:: -1 if block % 2 else 1]:
                    self.say(f"block {block + 1}/{self.blocks}, side {variant.name}")
                    self._measure(variant, block, Path(aside))
        for variant in self.variants:
            conclude(self.runs[variant.name], self._workloads[variant.name])
        return self.runs["a"], self.runs["b"]

    def so_far(self) -> str:
        """What a user needs to know whose comparison ended early."""
        done = [{repeat for _, repeat in run.finished_cells()} for run in self.runs.values()]
        whole = set.intersection(*done) if len(done) == 2 else set()
        if not whole:
            return "no block was finished"
        a, b = (shlex.quote(str(self.runs[variant.name].path)) for variant in self.variants)
        return (
            f"{len(whole)} of {self.blocks} blocks are on disk."
            f" To judge them: roseinfer-bench check {b} --baseline {a}"
        )

    def _run_id(self, variant: Variant) -> str:
        return f"{self.run_id}-{variant.name}"

    def _words(self, variant: Variant, block: int) -> list[str]:
        ours = ["--repeats", "1", "--seed", str(self.seed + block), "--quiet"]
        return ["sweep", *self.flags, *variant.flags, *ours]

    @staticmethod
    def _check_path(variant: Variant) -> None:
        """An installed package must not hide the one that this side is about."""
        found = Path(_python(variant, "import roseinfer; print(roseinfer.__file__)").strip())
        if not found.resolve().is_relative_to(variant.checkout.folder.resolve()):
            raise InputError(
                f"--{variant.name}", variant.checkout.name, "Python takes the package from elsewhere"
            )

    def _measure(self, variant: Variant, block: int, aside: Path) -> None:
        place = ["--output-dir", str(aside), "--experiment-name", variant.name, "--run-id", str(block)]
        _python(variant, _ENTRY, *self._words(variant, block), *place, ok=_CARRIED_OUT)
        measured = RunFolder.open(aside / variant.name / str(block))
        code = source_sha256(variant.checkout.folder / "roseinfer")
        if measured.manifest["environment"]["source_sha256"] != code:
            raise RunError(f"side {variant.name} did not run the code of {variant.checkout.name}")
        if variant.name not in self.runs:
            manifest = self._manifest(variant, measured.manifest)
            self.runs[variant.name] = RunFolder.create(
                self.output_dir, self.name, self._run_id(variant), manifest
            )
        requests, steps = measured.read_requests(), measured.read_steps()
        for (cell, repeat), facts in measured.read_facts().items():
            rows, cell_steps = (
                frame[(frame["cell_id"] == cell) & (frame["repeat"] == repeat)] for frame in (requests, steps)
            )
            self.runs[variant.name].write_cell(cell, block, rows, cell_steps, facts)
        workload = pd.read_parquet(measured.path / "workload.parquet").assign(repeat=block)
        self._workloads.setdefault(variant.name, []).append(workload)

    def _manifest(self, variant: Variant, measured: Mapping[str, Any]) -> dict[str, Any]:
        """That of the first block, of which `order`, of one block, says nothing about the others."""
        return {
            **{key: value for key, value in measured.items() if key != "order"},
            "command": public_command(sys.argv),
            "configuration": {**measured["configuration"], "repeats": self.blocks},
            "blocks": self.run_id,
            "code": {"name": variant.checkout.name, "commit": variant.checkout.commit},
        }


def _python(variant: Variant, code: str, *words: str, ok: Sequence[int] = (0,)) -> str:
    """Standard output of `code`, which finds this side's package before any installed one."""
    path = os.pathsep.join(
        filter(None, [str(variant.checkout.folder.resolve()), os.environ.get("PYTHONPATH")])
    )
    # -P: else the folder that one happens to be in would come before.
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *words],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode in ok:
        return done.stdout
    if done.returncode == 130:
        raise KeyboardInterrupt
    said = (done.stderr.strip().splitlines() or ["nothing said"])[-1].removeprefix("roseinfer-bench: ")
    if done.returncode == 2:
        raise InputError("flags of sweep", None, f"side {variant.name} refuses them: {said}")
    raise RunError(f"side {variant.name} ended with code {done.returncode}: {said}")
