"""How often does the gate raise a false alarm, and how often does it find +15 %?

`python experiments/gate_error_rates.py` draws per-repeat p99s (log-normal), lets the gate's own judgement decide on
them, and draws both rates against the number of repeats, with the N that the tool asks for. Then it goes the way of
a user: 8 repeats, and as long as the answer is UNKNOWN as many more as the gate asks for, up to four times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from roseinfer.bench.figure_style import BLACK, BLUE, GREEN, GREY, ORANGE, STYLE, VERMILLION, save
from roseinfer.bench.judgement import Verdict, failed, judge_ratio
from roseinfer.bench.ratios import ENOUGH_STANDARD_ERROR, fewest_repeats
from roseinfer.bench.sides import comparison_of
from roseinfer.bench.thresholds import DEFAULT_RULES

SPREADS: Final = {0.03: GREEN, 0.05: BLUE, 0.10: ORANGE, 0.20: VERMILLION}
REPEATS: Final = (4, 5, 6, 7, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80)
RATIOS: Final = (1.00, 1.15)
RULE: Final = DEFAULT_RULES[0]
LEVEL: Final = 1 - 0.05 / len(DEFAULT_RULES)  # one cell
MACHINE: Final = 0.30  # spread of what both sides of a block share
TRIALS: Final = 2000
FIRST: Final = 8
ROUNDS: Final = 4
MOST: Final = 200  # repeats that a user adds at once
FOLDER: Final = Path(__file__).parent / "figures"


class Draw(NamedTuple):
    a: NDArray[np.float64]
    b: NDArray[np.float64]


def drawn(rng: np.random.Generator, repeats: int, spread: float, ratio: float, paired: bool) -> Draw:
    """Per-repeat p99s of A, and of B that is `ratio` times as slow."""
    a, b = rng.normal(0, spread, (2, repeats))
    machine = rng.normal(0, MACHINE, repeats) if paired else 0.0
    return Draw(np.exp(a + machine), ratio * np.exp(b + machine))


def judged(sample: Draw, paired: bool) -> tuple[Verdict, int | None]:
    """The gate's verdict, and how many repeats it asks for on top."""
    comparison = comparison_of(sample.b, sample.a, paired=paired, level=LEVEL, n=(1000, 1000))
    found = judge_ratio(failed("cell", RULE.metric, RULE.demand, ""), comparison, RULE, LEVEL)
    return found.verdict, found.collect


def curves() -> Iterator[dict[str, object]]:
    for paired in (False, True):
        for spread in SPREADS:
            for repeats in REPEATS:
                for ratio in RATIOS:
                    rng = np.random.default_rng([paired, round(1000 * spread), repeats, round(100 * ratio)])
                    found = [
                        judged(drawn(rng, repeats, spread, ratio, paired), paired)[0] for _ in range(TRIALS)
                    ]
                    yield {
                        "paired": paired,
                        "spread": spread,
                        "repeats": repeats,
                        "ratio": ratio,
                        **{str(verdict): found.count(verdict) / TRIALS for verdict in Verdict},
                    }


def as_a_user() -> Iterator[dict[str, object]]:
    """What is judged at FIRST repeats and, while it is UNKNOWN, after adding as many as the gate then asks for."""
    for paired in (False, True):
        for spread in SPREADS:
            for ratio in RATIOS:
                rng = np.random.default_rng([7, paired, round(1000 * spread), round(100 * ratio)])
                found, collected = [], []
                for _ in range(TRIALS):
                    sample = drawn(rng, FIRST, spread, ratio, paired)
                    verdict, collect = judged(sample, paired)
                    for _ in range(ROUNDS):
                        if verdict is not Verdict.UNKNOWN or collect is None or collect > MOST:
                            break
                        more = drawn(rng, collect, spread, ratio, paired)
                        sample = Draw(*(np.concatenate(parts) for parts in zip(sample, more, strict=True)))
                        verdict, collect = judged(sample, paired)
                    found.append(verdict)
                    collected.append(len(sample.a))
                yield {
                    "paired": paired,
                    "spread": spread,
                    "ratio": ratio,
                    "median_repeats": int(np.median(collected)),
                    "p90_repeats": int(np.quantile(collected, 0.9)),
                    **{str(verdict): found.count(verdict) / TRIALS for verdict in Verdict},
                }


def asked(spread: float, paired: bool) -> int:
    """N for a spread that is known exactly."""
    return max(fewest_repeats(LEVEL, paired), math.ceil(2 * spread**2 / ENOUGH_STANDARD_ERROR**2))


@mpl.rc_context(STYLE)
def draw(rates: pd.DataFrame) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9.5, 4.2), sharey=True, layout="constrained")
    for axes, paired in zip(panels, (False, True), strict=True):
        axes.set_title("independent repeats (rank-sum)" if not paired else "blocks of A and B (signed-rank)")
        for spread, colour in SPREADS.items():
            some = rates[(rates["paired"] == paired) & (rates["spread"] == spread)]
            for ratio, style in zip(RATIOS, (":", "-"), strict=True):
                line = some[some["ratio"] == ratio]
                axes.plot(line["repeats"], 100 * line["FAIL"], style, color=colour, marker=".", markersize=4)
            n = asked(spread, paired)
            power = some[some["ratio"] == RATIOS[1]]
            axes.plot(n, np.interp(n, power["repeats"], 100 * power["FAIL"]), "D", color=colour, markersize=7)
        for rate in (5, 90):
            axes.axhline(rate, color=GREY, linewidth=0.8, linestyle="--")
        axes.set_xscale("log")
        axes.set_xticks([4, 6, 8, 10, 15, 20, 30, 40, 60, 80], labels="4 6 8 10 15 20 30 40 60 80".split())
        axes.minorticks_off()
        axes.set_xlabel("repeats of each side")
    panels[0].set_ylabel("judged FAIL (%)")
    marks = [
        Line2D([], [], color=colour, label=f"spread {100 * spread:g} %") for spread, colour in SPREADS.items()
    ]
    marks += [
        Line2D([], [], color=BLACK, linestyle="-", label="B is 15 % slower"),
        Line2D([], [], color=BLACK, linestyle=":", label="B is A"),
        Line2D([], [], color=BLACK, linestyle="", marker="D", label="N that the gate asks for"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=7)
    facts = (
        f"{RULE.metric} {RULE.demand}; level {100 * LEVEL:g} %; {TRIALS} trials a point; spread: standard deviation of"
        f" the log of a repeat's p99; blocks share another {100 * MACHINE:g} %"
    )
    figure.suptitle(f"How often the gate raises a false alarm, and finds +15 %\n{facts}", fontsize=8)
    save(figure, FOLDER, "gate_error_rates")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    rates = pd.DataFrame(curves())
    rates.to_csv(FOLDER / "gate_error_rates.csv", index=False)
    draw(rates)
    users = pd.DataFrame(as_a_user())
    users.to_csv(FOLDER / "gate_error_rates_as_a_user.csv", index=False)
    print(users.to_string(index=False))
    same = rates[rates["ratio"] == RATIOS[0]]
    print(f"largest share of false alarms: {100 * same['FAIL'].max():.2f} %")


if __name__ == "__main__":
    main()
