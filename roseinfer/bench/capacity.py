"""How much load a server takes within its SLOs, or which limits keep them at a given load: bracket, then bisect.

Every value that is tried is measured, and its percentile's interval says PASS, FAIL or UNKNOWN. What is found is
an interval: between the last value that is seen to hold and the first that is seen to fail lies the truth, and
values whose interval straddles the SLO make it wider, since nothing is guessed.

A search may start from what another proposes: probes from a simulation, a measurement at length from probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from roseinfer.bench.bracket import Axis, Edge, edge_of, find_edge
from roseinfer.bench.judgement import Verdict
from roseinfer.bench.probe import LONGER, Probe, Prober

SPAN: Final = 64.0
"""Rates are tried from this much below to this much above where the search begins."""

NO_LIMIT: Final = math.inf
"""On the axis of limits."""

MORE_REPEATS: Final = "More --repeats would make the intervals narrower."


@dataclass
class RateSearch:
    """The largest request rate within the SLOs and the bound on what is not served.

    Whenever it is interrupted, `edge` and `sentences` tell what is known so far.
    """

    prober: Prober
    tolerance: float
    proposal: RateSearch | None = None  # the same search on a simulator, or in short, which is over
    probes: dict[float, Probe] = field(default_factory=dict)
    one: Probe | None = None
    busy: Probe | None = None

    @property
    def every(self) -> list[Probe]:
        """All probes, rates in their order."""
        first = [probe for probe in (self.one, self.busy) if probe is not None]
        return [*first, *(self.probes[rate] for rate in sorted(self.probes))]

    @property
    def edge(self) -> Edge:
        return edge_of({rate: probe.verdict for rate, probe in self.probes.items()}, better=-1)

    @property
    def is_impossible(self) -> bool:
        """Not even requests that meet nobody keep the SLOs."""
        return self.one is not None and self.one.verdict is Verdict.FAIL

    @property
    def is_decided(self) -> bool:
        return self.is_impossible or self.edge != (None, None)

    @property
    def is_answered(self) -> bool:
        """There is something to confirm."""
        return self.is_impossible or self.edge.holds is not None

    def run(self) -> None:
        """Where a proposal is right, what is next to it is measured and nothing else. Raises what measuring raises."""
        proposed = Edge(None, None) if self.proposal is None else self.proposal.edge
        if proposed.holds is not None:
            self._search(proposed.holds, _ratio(proposed))
            if self.edge.holds is not None:
                return
        self.one = self.prober.one_at_a_time()
        if self.is_impossible or self.probes:
            return
        self.busy = self.prober.kept_busy()
        if self.busy.throughput > 0:
            self._search(float(f"{self.busy.throughput:.3g}"), 2.0)

    def _search(self, start: float, ratio: float) -> None:
        find_edge(
            self._verdict_at,
            Axis(start / SPAN, start * SPAN, self.tolerance, is_whole=False),
            start,
            better=-1,
            ratio=ratio,
        )

    def _verdict_at(self, rate: float) -> Verdict:
        if rate not in self.probes:
            self.probes[rate] = self.prober.at_rate(rate)
        return self.probes[rate].verdict

    def sentences(self, goal: str) -> list[str]:
        """The answer in plain words, and what a reader should know about it."""
        holds, fails = self.edge
        if self.is_impossible:
            assert self.one is not None
            why = f"even of one request at a time {self.one.describe()}"
            return [f"{goal} cannot be met at any rate: {why}.", *self._confirmation()]
        if holds is None and fails is None:
            return [f"Not decided: no rate was seen to keep {goal}, and none to break it. {MORE_REPEATS}"]
        lines = []
        if holds is None:
            lowest = min(self.probes)
            lines.append(
                f"No rate that was tried is sure to keep {goal}, down to {lowest:g} requests/s:"
                f" {self.probes[lowest].describe()}."
            )
        elif fails is None:
            most = f"{goal} holds up to the largest rate that was tried, {holds:g} requests/s"
            lines.append(f"{most}, over {self.probes[holds].size}: {self.probes[holds].describe()}.")
        else:
            lines += [
                f"The largest rate that keeps {goal} lies between {holds:g} and {fails:g} requests/s.",
                f"At {holds:g} it holds, over {self.probes[holds].size}: {self.probes[holds].describe()}.",
                f"At {fails:g} it fails: {self.probes[fails].describe()}.",
            ]
            if fails > holds * (1 + self.tolerance):
                lines.append(f"Between the two it cannot be told. {MORE_REPEATS}")
        return lines + self._confirmation() + self._notes(holds, fails)

    def _confirmation(self) -> list[str]:
        before = self.proposal
        if before is None or not self.prober.is_long:
            return []
        is_same = (before.is_impossible, before.edge) == (self.is_impossible, self.edge)
        said = "that it cannot be met" if before.is_impossible else f"{_span(before.edge)} requests/s"
        return [_at_length(None if is_same else said)]

    def _notes(self, holds: float | None, fails: float | None) -> list[str]:
        notes = []
        # Where a proposal is right, it is the only one that kept a server busy.
        busy = self.busy if self.proposal is None else self.busy or self.proposal.busy
        if busy is not None:
            most, server = busy.throughput, "simulated server" if busy.is_simulated else "server"
            notes.append(f"Kept busy, the {server} completes {most:.3g} requests/s.")
            if holds is not None and holds > most:
                notes.append(
                    f"{holds:g} is more than that: the queue grows for as long as such a load lasts, and a probe is"
                    " too short to show it. More --num-requests would."
                )
        if holds is not None and not self.probes[holds].is_steady:
            notes.append(f"No steady state was found at {holds:g}: more --num-requests may lower the answer.")
        if fails is not None:
            notes += [
                f"Yet {rate:g} requests/s held: the measurements contradict each other."
                for rate, probe in sorted(self.probes.items())
                if rate > fails and probe.verdict is Verdict.PASS
            ]
        return notes


@dataclass
class LimitSearch:
    """The limits that keep the SLOs and the bound on what is not served, at a given load.

    With the limit the percentiles grow and refusals shrink: `smallest` is where these are few enough, `largest` where
    an SLO is missed. Whenever it is interrupted, both tell what is known so far.
    """

    prober: Prober
    tolerance: float
    proposal: LimitSearch | None = None
    probes: dict[float, Probe] = field(default_factory=dict)
    one: Probe | None = None

    @property
    def every(self) -> list[Probe]:
        """All probes, limits in their order."""
        first = [] if self.one is None else [self.one]
        return [*first, *(self.probes[limit] for limit in sorted(self.probes))]

    @property
    def smallest(self) -> Edge:
        return edge_of({limit: probe.served_verdict for limit, probe in self.probes.items()}, better=1)

    @property
    def largest(self) -> Edge:
        """Of the limits with few enough refusals."""
        enough = {limit: probe for limit, probe in self.probes.items() if _serves_enough(probe)}
        return edge_of({limit: probe.slo_verdict for limit, probe in enough.items()}, better=-1)

    @property
    def is_decided(self) -> bool:
        return self.smallest.fails == NO_LIMIT or self.largest != (None, None)

    @property
    def is_answered(self) -> bool:
        """As that of `RateSearch`."""
        return self.smallest.fails == NO_LIMIT or self.largest.holds is not None

    def run(self) -> None:
        """As `RateSearch.run`."""
        unlimited = self._at(NO_LIMIT)
        if not _serves_enough(unlimited):
            return
        # A limit of what was in flight without one refuses nobody.
        top = float(max(1, unlimited.peak_inflight or max(unlimited.offered)))
        proposed = Edge(None, None) if self.proposal is None else self.proposal.smallest
        self._find(attrgetter("served_verdict"), (1.0, top), 1, proposed)
        enough = self.smallest.holds
        assert enough is not None  # no limit is, at least
        if self.probes[enough].slo_verdict is not Verdict.FAIL:
            proposed = Edge(None, None) if self.proposal is None else self.proposal.largest
            self._find(attrgetter("slo_verdict"), (min(enough, top), top), -1, proposed)
        elif self.prober.options.request_rate is not None:
            self.one = self.prober.one_at_a_time()

    def _find(
        self,
        verdict_of: Callable[[Probe], Verdict],
        limits: tuple[float, float],
        better: int,
        proposed: Edge,
    ) -> None:
        low, top = limits
        start = next((end for end in proposed if end is not None), self.prober.options.max_batch_size)
        find_edge(
            lambda x: verdict_of(self._at(NO_LIMIT if x == top else x)),
            Axis(low, top, self.tolerance, is_whole=True),
            min(top, max(low, start)),
            better=better,
            ratio=_ratio(proposed),
        )

    def _at(self, limit: float) -> Probe:
        if limit not in self.probes:
            self.probes[limit] = self.prober.at_limit(None if limit == NO_LIMIT else int(limit))
        return self.probes[limit]

    def sentences(self, goal: str) -> list[str]:
        """As those of `RateSearch`."""
        smallest, largest = self.smallest, self.largest
        if not self.is_decided:
            return [f"Not decided: no limit was seen to keep {goal}, and none to break it. {MORE_REPEATS}"]
        if smallest.fails == NO_LIMIT:
            why = f"even with no limit {self._figures(NO_LIMIT)}"
            return [f"{goal} cannot be met at any limit: {why}.", *self._confirmation()]
        assert smallest.holds is not None
        enough, most = smallest.holds, largest.holds
        if most is None:
            sure = "keeps" if self.probes[enough].slo_verdict is Verdict.FAIL else "is sure to keep"
            lines = [
                f"None of the limits {sure} {goal}: where few enough are refused, the others take too long."
            ]
        elif most == enough:
            lines = [f"{goal} is kept with {_limit(most)}, and with nothing else that was tried."]
        elif most == NO_LIMIT:
            lines = [f"{goal} is kept with no limit, and from a limit of {enough:g} on."]
        else:
            lines = [f"{goal} is kept with limits from {enough:g} to {most:g}."]
        size = self.probes[enough].size
        lines.append(f"With {_limit(enough)} few enough are refused, over {size}: {self._figures(enough)}.")
        if smallest.fails is not None:
            lines.append(f"With {_limit(smallest.fails)} too many are: {self._figures(smallest.fails)}.")
        if most is not None and most != enough:
            lines.append(f"With {_limit(most)} the others are still in time: {self._figures(most)}.")
        if most is not None and largest.fails is not None:
            lines.append(f"With {_limit(largest.fails)} they are not: {self._figures(largest.fails)}.")
        if self.one is not None:
            lines.append(f"One request at a time: {self.one.describe()}.")
        return lines + self._confirmation()

    def _confirmation(self) -> list[str]:
        before = self.proposal
        if before is None or not self.prober.is_long:
            return []
        is_same = (before.smallest, before.largest) == (self.smallest, self.largest)
        kept = Edge(before.smallest.holds, before.largest.holds)
        return [_at_length(None if is_same else f"limits from {_span(kept)}")]

    def _figures(self, limit: float) -> str:
        return self.probes[limit].describe()


def _serves_enough(probe: Probe) -> bool:
    return probe.served_verdict is Verdict.PASS


def _ratio(edge: Edge) -> float:
    """From one end to the other, for a first stride."""
    holds, fails = edge
    if holds is None or fails is None or math.inf in edge:
        return 2.0
    return max(fails / holds, holds / fails)


def _at_length(said: str | None) -> str:
    """How an answer was confirmed, or, where it is another one, what the probes `said`."""
    how = f"over {LONGER} times as much of the load as a probe has, in other requests"
    if said is None:
        return f"Confirmed {how}."
    return f"Measured {how}; the shorter probes said {said}."


def _span(edge: Edge) -> str:
    low, high = (
        "not known" if end is None else "no limit" if end == NO_LIMIT else f"{end:g}" for end in edge
    )
    return f"{low} to {high}"


def _limit(limit: float) -> str:
    return "no limit" if limit == NO_LIMIT else f"a limit of {limit:g}"
