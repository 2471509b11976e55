from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest

import recommendation_quality
from roseinfer.bench.recommend import Recommendation, Slo, parse_slo, recommend
from roseinfer.bench.summary import limit_label, summarise
from roseinfer.bench.wasted_work import wasted_share
from roseinfer.errors import InputError
from tests.bench.load_shapes import served
from tests.bench.rows import facts_by_cell, measured

BURST = 40
REPEATS = 10  # so that a limit of 10 carries a p99


@cache
def cell(limit: int | None, prompt_len: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows and summary of bursts whose i-th admitted request has TTFT 10.1 + 10 (i + 1) ms, 1 % more a repeat."""
    requests = pd.concat(
        [
            measured(
                burst_size=BURST,
                limit=limit,
                repeat=r,
                prompt_len=prompt_len,
                service_s=0.010 * (1 + 0.01 * r) * prompt_len / 32,
            )
            for r in range(REPEATS)
        ],
        ignore_index=True,
    )
    return requests, summarise(requests, facts_by_cell(requests))


def answers(
    limits: Sequence[int | None], *slos: str, prompt_lens: Sequence[int] = (32,)
) -> list[Recommendation]:
    cells = [cell(limit, prompt_len) for prompt_len in prompt_lens for limit in limits]
    requests, summary = (pd.concat(frames, ignore_index=True) for frames in zip(*cells, strict=True))
    return recommend(requests, summary, [parse_slo(slo) for slo in slos], seed=0)


def answer(limits: Sequence[int | None], *slos: str) -> Recommendation:
    (only,) = answers(limits, *slos)
    return only


def answer_to(requests: pd.DataFrame, slo: str) -> Recommendation:
    (only,) = recommend(requests, summarise(requests, facts_by_cell(requests)), [parse_slo(slo)], seed=0)
    return only


def chosen_limit(recommendation: Recommendation) -> str:
    return "none" if recommendation.chosen is None else limit_label(recommendation.chosen.limit)


# --- what the user writes


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("p99_ttft:250", Slo(99.0, "ttft", 250.0)),
        ("p99.9_queue_wait:0.5", Slo(99.9, "queue_wait", 0.5)),
        ("p50_e2el:3000", Slo(50.0, "e2el", 3000.0)),
    ],
)
def test_slo_is_parsed_and_printed_as_written(text: str, slo: Slo) -> None:
    assert parse_slo(text) == slo
    assert str(slo) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must look like"),
        ("ttft:250", "must look like"),
        ("p99_ttft", "must look like"),
        ("p99_ttft:fast", "must look like"),
        ("p99_ttft:-1", "must look like"),
        ("p99_speed:250", "unknown metric 'speed', known are ttft, .*queue_wait, .*tpot, e2el"),
        ("p100_ttft:250", "percentile"),
        ("p0_ttft:250", "percentile"),
        ("p99_ttft:0", "above 0"),
    ],
)
def test_a_bad_slo_is_refused_in_one_line(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why) as refused:
        parse_slo(text)
    assert "\n" not in str(refused.value)


def test_no_slo_is_refused() -> None:
    with pytest.raises(InputError, match="--slo"):
        answers([10])


# --- the rule


def test_the_limit_that_serves_most_within_the_slo_is_chosen() -> None:
    # p99 at limit 20 is near 228 ms and at 40 near 445 ms.
    found = answer([None, 10, 20], "p99_ttft:250")
    assert chosen_limit(found) == "20"


def test_no_limit_is_chosen_where_it_holds() -> None:
    assert chosen_limit(answer([None, 10, 20], "p99_ttft:1000")) == "no limit"


def test_the_share_divides_by_offered() -> None:  # case D4
    found = answer([10], "p99_ttft:250").chosen
    assert found is not None
    assert (found.served, found.offered, found.served_share) == (100, 400, 0.25)
    assert found.reject_rate == 0.75


def test_requests_beyond_the_bound_are_not_served_within_it() -> None:
    found = answer([None], "p50_ttft:250").chosen
    assert found is not None
    late_ms = [10.1 + 10 * (1 + 0.01 * r) * (i + 1) for r in range(REPEATS) for i in range(BURST)]
    assert found.served == sum(ttft_ms <= 250 for ttft_ms in late_ms)


def test_ties_go_to_the_larger_limit() -> None:
    assert chosen_limit(answer([40, 50, 45], "p99_ttft:1000")) == "50"


def test_no_limit_is_the_largest_limit() -> None:
    assert chosen_limit(answer([None, 40, 50], "p99_ttft:1000")) == "no limit"


@pytest.mark.parametrize("slos", [("p99_ttft:250", "p99_e2el:1000"), ("p99_ttft:1000", "p99_e2el:250")])
def test_each_slo_alone_can_fail_a_limit(slos: tuple[str, str]) -> None:  # case H4
    found = answer([20, 40], *slos)
    assert chosen_limit(found) == "20"
    assert chosen_limit(answer([20, 40], "p99_ttft:1000", "p99_e2el:1000")) == "40"
    assert [judgement.why_not is None for judgement in found.evidence[1].judgements].count(False) == 1


def test_a_limit_whose_interval_reaches_the_slo_still_qualifies_and_says_so() -> None:
    (judgement,) = answer([20], "p99_ttft:1000").evidence[0].judgements
    lo, _, hi = judgement.interval_ms
    found = answer([20], f"p99_ttft:{(lo + hi) / 2:.4f}")
    assert chosen_limit(found) == "20"
    assert "more repeats would tell" in found.sentence()


def test_a_limit_whose_interval_lies_above_the_slo_does_not_qualify() -> None:
    (judgement,) = answer([20], "p99_ttft:1000").evidence[0].judgements
    found = answer([20], f"p99_ttft:{judgement.interval_ms.lo - 0.001:.4f}")
    assert chosen_limit(found) == "none"


def test_one_answer_for_each_combination_of_the_other_factors() -> None:
    found = answers([None, 10, 20], "p99_ttft:250", prompt_lens=(64, 32))
    assert [(one.factors, chosen_limit(one)) for one in found] == [
        ({"prompt_len": 32}, "20"),
        ({"prompt_len": 64}, "10"),
    ]
    assert found[0].sentence().startswith("At prompt len 32: recommended")


# --- what cannot be judged


def test_too_few_requests_are_not_judged() -> None:  # case F3, F6
    found = answer([9], "p99_ttft:1000")
    assert chosen_limit(found) == "none"
    assert found.evidence[0].why_not == (
        "p99_ttft:1000 cannot be judged: too few completed requests (90, needs 100)",
    )
    assert "max (n=90) ttft" in found.sentence()


def test_a_limit_that_could_not_be_judged_is_named_beside_the_recommended_one() -> None:
    found = answer([9, None], "p99_ttft:1000")
    assert chosen_limit(found) == "no limit"
    assert found.sentence().endswith(
        " Not judged: 9 (p99_ttft:1000 cannot be judged: too few completed requests (90, needs 100))."
    )


def test_a_lower_percentile_needs_fewer_requests() -> None:
    assert chosen_limit(answer([9], "p95_ttft:1000")) == "9"


def test_one_repeat_is_not_judged() -> None:  # case F9
    requests = measured(burst_size=128, limit=None)
    found = answer_to(requests, "p99_ttft:10000")
    assert chosen_limit(found) == "none"
    assert "repeat at least twice" in found.sentence()


def test_a_metric_that_no_request_has_is_not_judged() -> None:  # case F7
    requests = pd.concat([measured(repeat=r, burst_size=100, output_tokens=1) for r in range(2)])
    found = answer_to(requests, "p99_tpot:1000")
    assert chosen_limit(found) == "none"
    assert math.isnan(found.evidence[0].judgements[0].interval_ms.point)
    assert "n/a (nothing completed has one)" in found.sentence()


def test_an_invalid_measurement_is_not_judged() -> None:
    requests, _ = cell(20, 32)
    facts = facts_by_cell(requests)
    facts = {key: replace(known, peak_inflight=21) for key, known in facts.items()}
    (found,) = recommend(requests, summarise(requests, facts), [parse_slo("p99_ttft:1000")], seed=0)
    assert chosen_limit(found) == "none"
    assert "invalid: repeat 0: 21 requests were in flight" in found.sentence()


# --- words


def test_the_sentence_names_the_limit_and_its_numbers() -> None:
    found = answer([None, 10], "p99_ttft:250")
    (judgement,) = found.evidence[0].judgements
    lo, point, hi = judgement.interval_ms
    assert found.sentence() == (
        f"recommended for p99_ttft:250: 10. p99 ttft {point:.1f} ms (95 % interval {lo:.1f} to {hi:.1f}, n=100),"
        " 25.0 % of the 400 offered requests served within the goal, 75.0 % refused."
    )


def test_when_none_qualifies_the_sentence_tells_of_the_smallest_limit() -> None:
    found = answer([None, 20, 10], "p99_ttft:50")
    point = found.evidence[0].judgements[0].interval_ms.point
    assert [limit_label(one.limit) for one in found.evidence] == ["10", "20", "no limit"]
    assert "none of the limits tried can be recommended for p99_ttft:50." in found.sentence()
    assert f"At the smallest (10): p99 ttft {point:.1f} ms" in found.sentence()


def test_intervals_are_those_of_the_summary() -> None:
    requests, summary = cell(20, 32)
    (found,) = recommend(requests, summary, [parse_slo("p99_ttft:250")], seed=0)
    pooled = summary.iloc[-1]
    expected = (pooled["p99_ttft_ms_lo"], pooled["p99_ttft_ms"], pooled["p99_ttft_ms_hi"])
    assert found.evidence[0].judgements[0].interval_ms == pytest.approx(expected)


# --- open loops


def open_loop(rate: float, limit: int | None) -> pd.DataFrame:
    """Four repeats with 40 slow requests at the start, then 10 ms."""
    repeats = []
    for repeat in range(4):
        rows = served(np.arange(200) / rate, arrival="poisson", request_rate=rate, limit=limit, repeat=repeat)
        first_s = rows["scheduled_s"] + np.where(rows["request_index"] < 40, 1.0, 0.01)
        received = {"received_first_s": first_s, "received_last_s": first_s + 0.1, "ended_s": first_s + 0.1}
        repeats.append(rows.assign(**received))
    return pd.concat(repeats, ignore_index=True)


def test_rates_are_factors() -> None:
    rows = pd.concat([open_loop(rate, None) for rate in (2.5, 0.3)], ignore_index=True)
    found = recommend(rows, summarise(rows, facts_by_cell(rows)), [parse_slo("p99_ttft:250")], seed=0)
    assert [one.factors for one in found] == [{"request_rate": 0.3}, {"request_rate": 2.5}]  # case H1
    assert found[1].sentence().startswith("At request rate 2.5: recommended")


def test_warm_up_is_judged_by_no_slo_but_its_requests_were_offered() -> None:
    rows = open_loop(2.5, None)
    found = answer_to(rows, "p99_ttft:250").chosen
    assert found is not None
    assert found.judgements[0].n == 640
    assert (found.served, found.offered) == (640, 800)


# --- how sure, and what it costs


def test_a_lead_in_every_repeat_is_sure() -> None:
    found = answer([10, 20], "p99_ttft:250")
    assert found.runner_up is not None
    assert limit_label(found.runner_up.limit) == "10"
    sure = found.how_sure()
    assert sure is not None
    assert sure.startswith(
        "Sure of it: 25.0 points more of the offered requests are served within the goal than with 10"
    )
    assert "median of 10 paired repeats, 95 %: 25.0 to 25.0 points" in sure


def test_a_tie_is_said_to_be_one() -> None:
    found = answer([45, 50], "p99_ttft:1000")
    assert (
        found.how_sure() == "The runner-up, 45, serves as many in every repeat: the larger limit was taken."
    )


def test_a_lead_in_some_repeats_only_is_not_sure() -> None:
    found = answer([10, 20], "p99_ttft:250")
    first, second = found.chosen, found.runner_up
    assert first is not None
    assert second is not None
    # Now ahead by much in one repeat, behind in all others.
    repeats = {repeat: (40, 40) if repeat == 0 else (9, 40) for repeat in second.repeats}
    chosen = replace(first, repeats=repeats)
    unsure = replace(found, chosen=chosen, evidence=(second, chosen)).how_sure()
    assert unsure is not None
    assert unsure.startswith("Not sure: ")
    assert unsure.endswith("more repeats would tell.")


def test_alone_it_has_no_runner_up() -> None:
    assert answer([20, 40], "p99_ttft:250").how_sure() == "No other limit that was tried qualifies."


def test_where_nothing_is_recommended_nothing_is_sure() -> None:
    assert answer([20], "p99_ttft:50").how_sure() is None


def test_wasted_are_the_tokens_of_what_missed_the_goal() -> None:
    requests = cell(None, 32)[0].assign(prompt_tokens=32.0)
    (evidence,) = answer_to(requests, "p99_ttft:250").evidence
    assert evidence.wasted_share == pytest.approx(1 - evidence.served / evidence.offered)


def test_refused_requests_waste_nothing_and_cut_off_ones_what_they_got() -> None:
    rows = measured(burst_size=4, limit=2, output_tokens=8).assign(prompt_tokens=32.0)
    rows = rows.assign(
        outcome=["completed", "timeout", *rows["outcome"][2:]], output_tokens=[8.0, 3.0, 0.0, 0.0]
    )
    served = (rows["outcome"] == "completed").to_numpy()
    assert wasted_share(rows, served) == pytest.approx((32 + 3) / (32 + 3 + 32 + 8))


def test_cached_prompt_tokens_were_not_computed() -> None:
    rows = measured(burst_size=2, output_tokens=8).assign(prompt_tokens=32.0, cached_tokens=[30.0, math.nan])
    assert wasted_share(rows, np.array([False, True])) == pytest.approx((2 + 8) / (2 + 8 + 32 + 8))


def test_uncounted_prompts_leave_wasted_work_unknown() -> None:
    rows = measured(burst_size=2)
    assert math.isnan(wasted_share(rows, np.array([False, True])))


def test_a_coarse_sweep_recommends_what_an_exhaustive_one_does_within_a_step() -> None:
    """In a process of its own: every step of every core in this one is looked through, which takes most of the time."""
    words = ("--workloads", "3", "--seed", "0", "--repeats", "2")
    done = subprocess.run(
        [sys.executable, recommendation_quality.__file__, *words], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["3 of 3 within one step of the coarse list"], done.stderr
