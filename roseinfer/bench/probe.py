"""One probe of a capacity search: a load at a limit, kept as a run of its own, and judged."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pandas as pd

from roseinfer.bench.experiment import Experiment
from roseinfer.bench.flag_values import LARGEST, admissions
from roseinfer.bench.judgement import Verdict
from roseinfer.bench.measurement import Bench, summary_of
from roseinfer.bench.options import SweepOptions, is_url
from roseinfer.bench.recommend import Judgement, Recommendation, parse_slo, recommend
from roseinfer.bench.session import Session
from roseinfer.bench.shares import share_interval
from roseinfer.bench.stats import Interval, smallest_sample
from roseinfer.bench.summary import pooled
from roseinfer.errors import InputError

BUSY_USERS: Final = 256
"""Of the closed loop that keeps a server without a limit busy."""

LONGER: Final = 4
"""Times that what confirms an answer is as long as a probe."""

WORDS: Final = {Verdict.PASS: "holds", Verdict.FAIL: "fails", Verdict.UNKNOWN: "cannot be told"}

_WITHOUT_A_RATE: Final[dict[str, Any]] = dict.fromkeys(
    ("request_rate", "load", "arrival", "burstiness", "ramp")
)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one load at one limit did. `not_served` is the share of the offered that were refused or lost.

    Lost are those that timed out, failed or never ended: the percentiles speak of the others only. `throughput` is of
    completed requests per second, NaN where there is none, `peak_inflight` None where a server does not say.
    """

    name: str
    is_simulated: bool
    judgements: tuple[Judgement, ...]
    not_served: Interval
    max_not_served: float
    offered: tuple[int, ...]  # in each repeat
    completed: int
    throughput: float
    peak_inflight: int | None
    is_steady: bool
    invalid: str | None
    folder: Path
    is_long: bool = False
    decides: bool = True  # its verdict says something of the answer

    @property
    def slo_verdict(self) -> Verdict:
        """PASS where the interval of every percentile keeps its SLO, FAIL where one misses it with all of it."""
        return Verdict.UNKNOWN if self.invalid else _worst(j.verdict for j in self.judgements)

    @property
    def served_verdict(self) -> Verdict:
        """The same of what was refused or lost, and its bound."""
        lo, _, hi = self.not_served
        if self.invalid is None and hi <= self.max_not_served:
            return Verdict.PASS
        return Verdict.FAIL if self.invalid is None and lo > self.max_not_served else Verdict.UNKNOWN

    @property
    def verdict(self) -> Verdict:
        return _worst((self.slo_verdict, self.served_verdict))

    @property
    def size(self) -> str:
        """How many requests it offered, in words."""
        n = len(self.offered)
        if len(set(self.offered)) == 1:
            return f"{n} x {self.offered[0]} requests"
        return f"{sum(self.offered)} requests in {n} repeats"

    def describe(self) -> str:
        """The figures in words."""
        lo, share, hi = self.not_served
        bounds = "" if lo == share == hi else f" ({100 * lo:.1f} to {100 * hi:.1f} %)"
        figures = [judgement.describe() for judgement in self.judgements]
        invalid = "" if self.invalid is None else f"; INVALID: {self.invalid}"
        return f"{', '.join(figures)}, {100 * share:.1f} % not served{bounds}{invalid}"


def _worst(verdicts: Iterable[Verdict]) -> Verdict:
    found = set(verdicts)
    return next((verdict for verdict in (Verdict.FAIL, Verdict.UNKNOWN) if verdict in found), Verdict.PASS)


def seed_of(name: str, options: SweepOptions) -> int:
    """Of a server each probe asks its own prompts: it has met those of the others, and may keep them in a cache."""
    if not is_url(options.target):
        return options.seed
    return (options.seed + zlib.crc32(name.encode())) % (LARGEST + 1)


def longer(options: SweepOptions, *, is_spaced: bool) -> SweepOptions | None:
    """LONGER times as much of the load, of requests that no probe has seen; None: a --workload has no others.

    A load that is not `is_spaced`, such as one burst or a trace, is what it is: it is repeated more often.
    """
    if options.workload is not None:
        return None
    changes: dict[str, Any] = {"seed": options.seed ^ 1}
    if is_spaced and options.duration is not None:
        changes["duration"] = LONGER * options.duration
    if is_spaced and options.num_requests is not None:
        changes["num_requests"] = LONGER * options.num_requests
    if len(changes) == 1:
        changes["repeats"] = LONGER * options.repeats
    return replace(options, **changes)


class Prober:
    """Measures the loads that it is asked for; a run that is on disk already is read, or gone on with.

    Runs are called `run_id` and what they probe: the same command with the same --run-id goes on.
    """

    def __init__(
        self,
        options: SweepOptions,
        given: Collection[str],
        *,
        run_id: str,
        max_not_served: float,
        say: Callable[[str], None],
        bench_of: Callable[[Experiment], Bench],
        is_long: bool = False,
    ) -> None:
        """`options` are those of a sweep of one cell, with a name; `given` names the fields that the user set.

        Several that measure may share the engine of one `bench_of`. `is_long`: `options` are those of `longer`.
        """
        self.options = options
        self.is_simulated = options.target == "sim"
        self.is_long = is_long
        self._bench_of = bench_of
        self._given = frozenset(given)
        self._run_id = run_id
        self._max_not_served = max_not_served
        self._say = say
        self.slos = [parse_slo(text) for text in options.slo or ()]

    def check(self, changes: Mapping[str, Any]) -> Experiment:
        """What a probe with these flags is. Raises InputError where it cannot be, and for percentiles beyond it."""
        experiment = self._experiment(changes)
        offered = experiment.offered(experiment.cells[0])
        for slo in self.slos:
            needed = smallest_sample(slo.percentile)
            n = needed if offered is None else offered * self.options.repeats
            if n < needed:
                why = f"too few: {n} in {self.options.repeats} repeats, a p{slo.percentile:g} takes {needed}"
                raise InputError("--num-requests", offered, why)
        return experiment

    def _experiment(self, changes: Mapping[str, Any]) -> Experiment:
        unset = {field for field, value in changes.items() if value is None}
        given = (self._given | changes.keys()) - unset
        return Experiment.from_options(replace(self.options, **changes), given)

    def at_rate(self, rate: float) -> Probe:
        """Raises InputError where the percentile cannot be told from so few requests, as all probes but `kept_busy`."""
        return self._sized(self._probe(f"rate_{rate:g}", request_rate=f"{rate:g}"))

    def at_limit(self, limit: int | None) -> Probe:
        return self._sized(self._probe(f"inflight_{limit or 'none'}", max_inflight=str(limit or 0)))

    def one_at_a_time(self) -> Probe:
        """A closed loop of one user: what requests take that meet nobody."""
        return self._sized(self._probe("one_user", **_WITHOUT_A_RATE, max_concurrency=1))

    def kept_busy(self) -> Probe:
        """A closed loop of as many users as there are slots: what the server completes at most."""
        users = [admissions(self.options, self._given)[0].inflight or BUSY_USERS]
        users += [n for n in (self.options.num_requests, self.options.max_concurrency) if n is not None]
        return self._probe("kept_busy", decides=False, **_WITHOUT_A_RATE, max_concurrency=min(users))

    def _probe(self, name: str, *, decides: bool = True, **changes: Any) -> Probe:
        changes["seed"] = seed_of(name, self.options)
        experiment = self._experiment({**changes, "run_id": f"{self._run_id}-{name}"})
        options = experiment.options
        path = options.output_dir / str(options.experiment_name) / str(options.run_id)
        try:
            session = Session(
                experiment,
                default_name="capacity",
                resume=path if path.exists() else None,
                bench_of=self._bench_of,
            )
        except InputError as error:
            name_of = "--run-id" if error.name == "--resume" else error.name
            raise InputError(name_of, error.value, error.why) from error
        if session.folder is None or not session.folder.is_done:
            summary = session.measure()
            (found,) = session.recommendations
        else:
            summary = summary_of(session.folder)
            (found,) = recommend(session.folder.read_requests(), summary, self.slos, seed=options.seed)
        assert session.folder is not None
        probe = self._judged(name.replace("_", " "), found, summary, session.folder.path)
        probe = replace(probe, decides=decides)
        verdict = f": {WORDS[probe.verdict]}" if decides else ""
        self._say(f"{probe.name}: {probe.describe()}{verdict}")
        return probe

    def _judged(self, name: str, found: Recommendation, summary: pd.DataFrame, path: Path) -> Probe:
        repeats, total = summary[summary["repeat"].notna()], pooled(summary).iloc[0]
        offered = repeats["offered"].to_numpy()
        lost = offered - repeats["completed"].to_numpy()
        return Probe(
            name=f"{'simulated ' if self.is_simulated else ''}{name}{', at length' if self.is_long else ''}",
            is_simulated=self.is_simulated,
            is_long=self.is_long,
            judgements=found.evidence[0].judgements,
            not_served=share_interval(lost, offered, seed=self.options.seed),
            max_not_served=self._max_not_served,
            offered=tuple(offered.astype(int).tolist()),
            completed=int(total["completed"]),
            throughput=float(total["request_throughput"]),
            peak_inflight=None if pd.isna(total["peak_inflight"]) else int(total["peak_inflight"]),
            is_steady=bool(pd.isna(total["steady"]) or total["steady"]),
            invalid=None if total["valid"] else str(total["invalid_reasons"]),
            folder=path,
        )

    def _sized(self, probe: Probe) -> Probe:
        if probe.invalid is not None or probe.served_verdict is Verdict.FAIL:
            return probe
        for judgement in probe.judgements:
            slo, n, needed = judgement.slo, judgement.n, smallest_sample(judgement.slo.percentile)
            if n == 0:
                raise InputError(
                    "--slo", str(slo), f"no request completed at {probe.name} has a {slo.metric}"
                )
            if n < needed:
                count = self.options.num_requests
                why = f"too few: {n} completed requests count at {probe.name}, a p{slo.percentile:g} takes {needed}"
                raise InputError("--num-requests", count, why)
        return probe
