"""The search: on made-up servers whose right answer is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from roseinfer.bench.bracket import Axis, Edge, edge_of, find_edge
from roseinfer.bench.capacity import NO_LIMIT, LimitSearch, RateSearch
from roseinfer.bench.flag_values import LARGEST
from roseinfer.bench.judgement import Verdict
from roseinfer.bench.options import SweepOptions
from roseinfer.bench.probe import Probe, seed_of
from roseinfer.bench.shares import paired_gap, share_interval
from roseinfer.bench.stats import Interval
from tests.bench.made_servers import Server, queue, refusals, told, waits

PASS, FAIL, UNKNOWN = Verdict.PASS, Verdict.FAIL, Verdict.UNKNOWN

RATES = Axis(1.0, 1000.0, 0.05, is_whole=False)
WHOLE = Axis(1.0, 1000.0, 0.05, is_whole=True)


# --- the edge


@pytest.mark.parametrize("start", [1.0, 30.0, 43.0, 1000.0])
def test_the_edge_is_found_from_anywhere(start: float) -> None:
    edge = find_edge(lambda x: PASS if x <= 42.5 else FAIL, RATES, start, better=-1)

    assert edge.holds is not None
    assert edge.fails is not None
    assert edge.holds <= 42.5 < edge.fails <= 1.05 * edge.holds


def test_whole_numbers_are_told_apart_where_the_tolerance_asks_for_it() -> None:
    assert find_edge(lambda x: PASS if x >= 7 else FAIL, WHOLE, 32.0, better=1) == Edge(7.0, 6.0)


def test_what_cannot_be_told_makes_the_answer_wider_and_both_its_ends_are_sought() -> None:
    def verdict(x: float) -> Verdict:
        return PASS if x <= 40 else FAIL if x >= 60 else UNKNOWN

    holds, fails = find_edge(verdict, RATES, 10.0, better=-1)

    assert holds is not None
    assert fails is not None
    assert 40 / 1.05 <= holds <= 40
    assert 60 <= fails <= 60 * 1.05


@pytest.mark.parametrize(
    ("verdict", "edge"), [(PASS, Edge(1000.0, None)), (FAIL, Edge(None, 1.0)), (UNKNOWN, Edge(None, None))]
)
def test_an_edge_outside_of_the_axis_is_not_made_up(verdict: Verdict, edge: Edge) -> None:
    assert find_edge(lambda _: verdict, RATES, 30.0, better=-1) == edge


def test_a_pass_beyond_a_fail_is_not_believed() -> None:
    assert edge_of({10.0: PASS, 30.0: FAIL, 50.0: PASS}, better=-1) == Edge(10.0, 30.0)
    assert edge_of({10.0: PASS, 30.0: FAIL, 50.0: PASS}, better=1) == Edge(50.0, 30.0)


def test_nothing_is_tried_twice_and_little_is_tried() -> None:
    tried: list[float] = []

    def verdict(x: float) -> Verdict:
        tried.append(x)
        return PASS if x <= 42.5 else FAIL

    find_edge(verdict, RATES, 30.0, better=-1)

    assert len(tried) == len(set(tried)) <= 7


# --- rates


def test_the_largest_rate_lies_between_the_two_ends() -> None:
    search = RateSearch(Server(queue), 0.05)
    search.run()

    holds, fails = search.edge
    assert holds is not None
    assert fails is not None
    assert holds <= 16 <= fails <= holds * 1.06
    assert f"The largest rate that keeps the goal lies between {holds:g} and {fails:g} requests/s." in told(
        search
    )
    assert f"At {holds:g} it holds, over 8 x 200 requests: p99 ttft" in told(search)
    assert "Kept busy, the server completes 20 requests/s." in told(search)


def test_a_wide_interval_is_not_decided_by_its_middle() -> None:
    search = RateSearch(Server(queue, spread=0.2), 0.05)
    search.run()

    holds, fails = search.edge
    assert holds is not None
    assert fails is not None
    assert queue(holds, NO_LIMIT) * 1.2 <= 250 < queue(fails, NO_LIMIT) * 0.8
    assert "Between the two it cannot be told. More --repeats" in told(search)


def test_an_slo_below_the_service_time_is_impossible_at_any_rate_and_no_rate_is_tried() -> None:
    server = Server(queue, slo="p99_ttft:40")
    search = RateSearch(server, 0.05)
    search.run()

    assert server.tried == ["one user"]
    assert search.is_decided
    assert told(search).startswith(
        "the goal cannot be met at any rate: even of one request at a time p99 ttft 50.0 ms"
    )


def test_what_always_holds_holds_up_to_the_largest_rate_and_a_short_probe_is_named_as_such() -> None:
    search = RateSearch(Server(lambda rate, limit: 50.0), 0.05)
    search.run()

    assert search.edge.fails is None
    assert (
        "the goal holds up to the largest rate that was tried, 1280 requests/s, over 8 x 200 requests: p99"
        in told(search)
    )
    assert "1280 is more than that: the queue grows" in told(search)


def test_what_is_never_seen_to_hold_is_said_so() -> None:
    search = RateSearch(Server(lambda rate, limit: 240.0 if rate == 0 else 300.0), 0.05)
    search.run()

    assert search.edge.holds is None
    assert "No rate that was tried is sure to keep the goal" in told(search)


def test_refusals_bound_the_rate_too() -> None:
    search = RateSearch(
        Server(lambda rate, limit: 50.0, lambda rate, limit: max(0.0, 1 - 8 / (rate or 1))), 0.05
    )
    search.run()

    assert search.edge.holds is not None
    assert search.edge.holds <= 8 / 0.95 <= search.edge.holds * 1.06


def test_a_right_proposal_takes_a_handful_of_probes() -> None:
    proposal = RateSearch(Server(queue), 0.05)
    proposal.run()
    server = Server(queue)
    search = RateSearch(server, 0.05, proposal)
    search.run()

    holds, fails = search.edge
    assert holds is not None
    assert fails is not None
    assert holds <= 16 <= fails <= holds * 1.06
    assert [name.partition(" ")[0] for name in server.tried] == ["rate"] * 2


def test_after_a_right_proposal_too_a_rate_beyond_what_the_server_completes_is_warned_of() -> None:
    proposal = RateSearch(Server(lambda rate, limit: 50.0, is_simulated=True), 0.05)
    proposal.run()
    search = RateSearch(Server(lambda rate, limit: 50.0), 0.05, proposal)
    search.run()

    assert search.busy is None
    assert "Kept busy, the simulated server completes 20 requests/s." in told(search)
    assert "81920 is more than that: the queue grows" in told(search)


@pytest.mark.parametrize("slower", [0.2, 0.85, 1.3, 5.0])
def test_a_wrong_proposal_is_found_out(slower: float) -> None:
    proposal = RateSearch(Server(queue), 0.05)
    proposal.run()
    search = RateSearch(Server(lambda rate, limit: queue(rate * slower, limit)), 0.05, proposal)
    search.run()

    holds, fails = search.edge
    assert holds is not None
    assert fails is not None
    assert holds <= 16 / slower <= fails <= holds * 1.06


def test_a_proposal_that_says_impossible_is_confirmed_by_one_measurement() -> None:
    proposal = RateSearch(Server(queue, slo="p99_ttft:40"), 0.05)
    proposal.run()
    server = Server(queue, slo="p99_ttft:40")
    search = RateSearch(server, 0.05, proposal)
    search.run()

    assert server.tried == ["one user"]
    assert search.is_impossible


def test_interrupted_it_tells_what_it_knows() -> None:
    class Interrupted(Server):
        def at_rate(self, rate: float) -> Probe:
            if len(self.tried) == 5:
                raise KeyboardInterrupt
            return super().at_rate(rate)

    search = RateSearch(Interrupted(queue), 0.05)
    with pytest.raises(KeyboardInterrupt):
        search.run()

    holds, fails = search.edge
    assert holds is not None
    assert fails is not None
    assert holds < 16 < fails
    assert "lies between" in told(search)


# --- limits


def test_at_a_given_load_too_it_says_over_how_many_requests() -> None:
    search = LimitSearch(Server(waits, refusals), 0.01)
    search.run()

    assert "With a limit of 19 few enough are refused, over 8 x 200 requests: p99 ttft" in told(search)


def test_the_limits_lie_between_too_many_refusals_and_too_long_a_wait() -> None:
    search = LimitSearch(Server(waits, refusals), 0.01)
    search.run()

    assert search.smallest == Edge(19.0, 18.0)
    assert search.largest == Edge(24.0, 26.0)  # 25 straddles
    assert told(search).startswith("the goal is kept with limits from 19 to 24.")


def test_each_bound_alone_can_empty_the_range() -> None:  # case H4
    search = LimitSearch(Server(waits, refusals, slo="p99_ttft:150"), 0.01)
    search.run()

    assert search.largest.holds is None
    assert search.is_decided
    assert "None of the limits keeps the goal" in told(search)
    assert "With a limit of 18 too many are" in told(search)
    assert "One request at a time: p99 ttft 10.0 ms" in told(search)


def test_no_limit_is_a_limit() -> None:
    search = LimitSearch(Server(waits, refusals, slo="p99_ttft:5000"), 0.01)
    search.run()

    assert search.largest == Edge(NO_LIMIT, None)
    assert told(search).startswith("the goal is kept with no limit, and from a limit of 19 on.")


def test_what_is_lost_without_a_limit_no_limit_brings_back() -> None:
    server = Server(waits, lambda rate, limit: 0.2)
    search = LimitSearch(server, 0.01)
    search.run()

    assert server.tried == ["inflight none"]
    assert told(search).startswith("the goal cannot be met at any limit: even with no limit")


def test_a_server_that_does_not_say_its_peak_is_searched_up_to_what_was_offered() -> None:
    search = LimitSearch(Server(waits, refusals, peak=None), 0.01)
    search.run()

    assert search.smallest == Edge(19.0, 18.0)


def test_proposed_limits_are_measured_with_their_neighbours_only() -> None:
    proposal = LimitSearch(Server(waits, refusals), 0.01)
    proposal.run()
    server = Server(waits, refusals)
    search = LimitSearch(server, 0.01, proposal)
    search.run()

    assert (search.smallest, search.largest) == (proposal.smallest, proposal.largest)
    assert len(server.tried) <= 6


# --- one probe


def probe(lo: float, hi: float, *, lost: float = 0.0, invalid: str | None = None) -> Probe:
    made = Server(queue).at_rate(1.0)
    judgement = replace(made.judgements[0], interval_ms=Interval(lo, (lo + hi) / 2, hi))
    return replace(made, judgements=(judgement,), not_served=Interval(lost, lost, lost), invalid=invalid)


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (probe(200, 250), PASS),
        (probe(200, 251), UNKNOWN),
        (probe(251, 300), FAIL),
        (probe(-math.inf, math.inf), UNKNOWN),
        (probe(200, 240, lost=0.06), FAIL),
        (probe(200, 251, lost=0.06), FAIL),
        (probe(200, 240, invalid="late"), UNKNOWN),
        (probe(300, 340, invalid="late"), UNKNOWN),
    ],
)
def test_a_probe_holds_or_fails_with_its_whole_interval(made: Probe, verdict: Verdict) -> None:
    assert made.verdict is verdict


def test_repeats_of_several_sizes_are_told_by_their_sum() -> None:  # as those of a --duration are
    assert replace(probe(200, 240), offered=(190, 210, 200)).size == "600 requests in 3 repeats"


def test_two_slos_must_both_hold() -> None:  # case H4
    good, bad = probe(200, 240), probe(260, 300)

    assert replace(good, judgements=(*good.judgements, *bad.judgements)).verdict is FAIL


def test_a_share_has_an_interval_over_repeats() -> None:
    lo, share, hi = share_interval([0, 10, 20, 10], [100] * 4, seed=0)

    assert share == 0.1
    assert 0 <= lo < 0.1 < hi <= 0.2
    assert share_interval([10, 10], [100, 100], seed=0) == (0.1, 0.1, 0.1)
    assert share_interval([10], [100], seed=0) == (-math.inf, 0.1, math.inf)


def test_a_gap_is_taken_pair_by_pair() -> None:
    a = [
        (10, 100),
        (50, 100),
        (90, 100),
        (20, 100),
        (60, 100),
        (30, 100),
    ]  # repeats differ far more than the two do
    b = [(count - 2, offered) for count, offered in a]

    assert paired_gap(a, b) == pytest.approx((0.02, 0.02, 0.02))
    assert paired_gap(a[1:], b[1:]) == pytest.approx((-math.inf, 0.02, math.inf))


# ---- prompts of probes


def test_probes_of_a_server_have_prompts_of_their_own() -> None:  # cases I5, I7
    options = SweepOptions(target="http://127.0.0.1:8000/v1", seed=7)
    names = ["rate_1", "rate_2", "inflight_4", "one_user"]
    assert len({seed_of(name, options) for name in names} | {7}) == 5
    assert all(0 <= seed_of(name, options) <= LARGEST for name in names)


def test_probes_of_an_engine_have_the_same_requests() -> None:  # each starts with a cold cache
    assert seed_of("rate_1", SweepOptions(seed=7)) == 7
