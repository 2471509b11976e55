"""Does the gate stay quiet when nothing changed? A against A on the real engine, over and over.

`python experiments/gate_aa.py FOLDER --trials 20 --pause-s 600 -- --max-inflight 4 --burst-size 8` runs `ab` of this
code against itself, each trial a new set of processes, with pauses between them so that they meet the machine at
different times. What is in FOLDER is kept and counted: it goes on where it was stopped. A FAIL is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

_ENTRY = "import sys; from roseinfer.bench.cli import main; sys.argv[0] = 'roseinfer-bench'; main()"


def trial(folder: Path, number: int, blocks: int, flags: list[str]) -> dict[str, object]:
    """One verdict, with the time at which it was found; on disk when this returns."""
    report = folder / f"trial_{number:03d}.json"
    seed = 1000 * number
    words = [
        "ab",
        "--blocks",
        str(blocks),
        "--seed",
        str(seed),
        "-o",
        str(folder),
        "--json",
        "--quiet",
        *flags,
    ]
    done = subprocess.run(
        [sys.executable, "-c", _ENTRY, *words], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in (0, 1, 3, 4, 5):
        raise SystemExit(f"trial {number} ended with code {done.returncode}")
    found: dict[str, object] = {**json.loads(done.stdout), "finished_unix_s": time.time(), "flags": flags}
    aside = report.with_suffix(".aside")
    aside.write_text(json.dumps(found, indent=1))
    aside.replace(report)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--pause-s", type=float, default=0.0)
    words = sys.argv[1:]
    own = words.index("--") if "--" in words else len(words)
    options, flags = parser.parse_args(words[:own]), words[own + 1 :]
    options.folder.mkdir(parents=True, exist_ok=True)
    verdicts: Counter[str] = Counter()
    rules: Counter[tuple[str, str]] = Counter()
    for number in range(options.trials):
        report = options.folder / f"trial_{number:03d}.json"
        if report.exists():
            found = json.loads(report.read_text())
        else:
            found = trial(options.folder, number, options.blocks, flags)
            if number + 1 < options.trials:
                time.sleep(options.pause_s)
        verdicts[str(found["verdict"])] += 1
        rules.update((rule["metric"], rule["verdict"]) for rule in found["rules"])
        print(f"trial {number + 1}/{options.trials}: {found['verdict']}", flush=True)
    judged = verdicts["PASS"] + verdicts["FAIL"] + verdicts["UNKNOWN"]
    print(f"verdicts: {dict(verdicts)}; false alarms: {verdicts['FAIL']} of {judged} judged")
    for (metric, verdict), count in sorted(rules.items()):
        print(f"  {metric}: {verdict} {count}")


if __name__ == "__main__":
    main()
