"""Servers for a capacity search whose right answer is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from roseinfer.bench.capacity import NO_LIMIT, LimitSearch, RateSearch
from roseinfer.bench.options import SweepOptions
from roseinfer.bench.probe import Probe, Prober
from roseinfer.bench.recommend import Judgement, parse_slo
from roseinfer.bench.stats import Interval


class Server(Prober):
    """A p99 TTFT and a share that is not served, as functions of rate and limit. `given` is a rate of its own."""

    def __init__(
        self,
        p99_ms: Callable[[float, float], float],
        lost: Callable[[float, float], float] = lambda rate, limit: 0.0,
        *,
        slo: str = "p99_ttft:250",
        given: float = 10.0,
        spread: float = 0.01,
        busy: float = 20.0,
        peak: int | None = 100,
        is_simulated: bool = False,
        is_long: bool = False,
    ) -> None:
        self.options = SweepOptions(request_rate=str(given))
        self.is_simulated = is_simulated
        self.is_long = is_long
        self.tried: list[str] = []
        self._slo = parse_slo(slo)
        self._p99_ms, self._lost, self._rate = p99_ms, lost, given
        self._spread, self._busy, self._peak = spread, busy, peak

    def at_rate(self, rate: float) -> Probe:
        return self._made(f"rate {rate:g}", self._p99_ms(rate, NO_LIMIT), self._lost(rate, NO_LIMIT))

    def at_limit(self, limit: int | None) -> Probe:
        at = NO_LIMIT if limit is None else float(limit)
        return self._made(
            f"inflight {limit or 'none'}", self._p99_ms(self._rate, at), self._lost(self._rate, at)
        )

    def one_at_a_time(self) -> Probe:
        return self._made("one user", self._p99_ms(0.0, 1.0), 0.0)

    def kept_busy(self) -> Probe:
        return self._made("kept busy", self._p99_ms(self._busy, NO_LIMIT), 0.0)

    def _made(self, name: str, p99_ms: float, lost: float) -> Probe:
        self.tried.append(name)
        around = Interval(p99_ms * (1 - self._spread), p99_ms, p99_ms * (1 + self._spread))
        return Probe(
            name=name,
            is_simulated=self.is_simulated,
            is_long=self.is_long,
            judgements=(Judgement(self._slo, around, 1600, None),),
            not_served=Interval(lost, lost, lost),
            max_not_served=0.05,
            offered=(200,) * 8,
            completed=1600,
            throughput=self._busy,
            peak_inflight=self._peak,
            is_steady=True,
            invalid=None,
            folder=Path("runs") / name,
        )


def queue(rate: float, limit: float) -> float:
    """A queue that explodes at 20 requests/s and takes 50 ms alone: 250 ms at 16."""
    return 50 / (1 - rate / 20) if rate < 20 else 1e6


def told(search: RateSearch | LimitSearch) -> str:
    return " ".join(search.sentences("the goal"))


def waits(rate: float, limit: float) -> float:
    return 10.0 * min(limit, 100)


def refusals(rate: float, limit: float) -> float:
    return max(0.0, (20 - limit) / 20)
