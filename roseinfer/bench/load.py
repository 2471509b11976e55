"""The load: when requests are sent and how long they are, as far as all cells of an experiment share it.

Requests arrive as bursts, at a rate, as a trace has them, or in a closed loop: a number of users, each of whom
sends the next request when the last one has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

CLOSED: Final = "closed"
"""What the records call the arrivals of a closed loop; the other names are `options.ARRIVALS`."""

CLOSED_LOOP_MOST: Final = 65_536
"""Requests that a closed loop with --duration and no --num-requests sends at most."""


class Lengths(NamedTuple):
    """How lengths vary around a cell's: "fixed", "uniform" (`spread` is its share) or "lognormal" (sigma of the log)."""

    kind: str = "fixed"
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """Flags of the load that were checked. None: not asked for.

    `arrival` is None for a replayed workload, whose rows say it. With a rate and a burst interval bursts come on
    top of the rate's arrivals. `max_concurrency` is a cap on a schedule, or the users of a closed loop.
    """

    arrival: str | None
    num_requests: int | None = None
    duration_s: float | None = None
    burst_interval_s: float | None = None
    burstiness: float | None = None
    ramp_s: float | None = None
    max_concurrency: int | None = None
    timeout_s: float | None = None
    trace: Path | None = None
    time_scale: float = 1.0
    length_scale: float = 1.0
    keep_ticks: bool = False
    prompt_lengths: Lengths = Lengths()
    output_lengths: Lengths = Lengths()
    prefix_tokens: int = 0
    workload: Path | None = None

    @property
    def is_closed(self) -> bool:
        return self.arrival == CLOSED
