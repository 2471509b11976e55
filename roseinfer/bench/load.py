"""The load: when requests are sent and how long they are, as far as all cells of an experiment share it.

Requests arrive as bursts, at a rate, as a trace has them, or in a closed loop: a number of users, each of whom
sends the next request when the last one has ended.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from roseinfer.bench.flag_values import (
    MOST_REQUESTS,
    Lengths,
    check_positive,
    parse_lengths,
    rates,
    whole_numbers,
    wrong,
)
from roseinfer.bench.load_options import ARRIVALS, DEFAULT_BURST_SIZE
from roseinfer.bench.options import RunOptions, is_url
from roseinfer.bench.priorities import (
    NO_DEADLINES,
    PriorityMix,
    TtftDeadlines,
    parse_deadlines,
    parse_mix,
)
from roseinfer.bench.retries import LEAST_BUDGET, RETRIES, RetryPolicy

CLOSED: Final = "closed"
"""What the records call the arrivals of a closed loop; the other names are `load_options.ARRIVALS`."""

CLOSED_LOOP_MOST: Final = 65_536
"""Requests that a closed loop with --duration and no --num-requests sends at most."""

CLOSED_LOOP_REFUSED_PAUSE_S: Final = 0.05
"""From a refusal to the next request of that user: without a pause a client would measure how fast it is refused."""

SERVER_TIMEOUT_S: Final = 600.0
"""Where --timeout does not say it. An engine in this process ends what it takes; of a server nobody knows."""

FIXED: Final = Lengths()

AT_A_RATE: Final = ("constant", "poisson", "gamma")

_POSITIVE: Final = (
    "duration",
    "burst_interval",
    "burstiness",
    "ramp",
    "timeout",
    "per_try_timeout",
    "time_scale",
    "length_scale",
)
_OF_ARRIVALS: Final = (
    "burst_size",
    "burst_interval",
    "request_rate",
    "load",
    "burstiness",
    "submit_interval_ms",
)
_OF_TRACES: Final = ("time_scale", "length_scale", "keep_ticks")
_OF_LENGTHS: Final = (
    "prompt",
    "prompt_repeats",
    "prompt_len",
    "prompt_len_dist",
    "prefix_len",
    "max_new_tokens",
    "output_len_dist",
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Flags of the load that were checked. None: not asked for.

    `arrival` is None for a replayed workload, whose rows say it, unless it is a closed loop. With a rate and a
    burst interval bursts come on top of the rate's arrivals. `max_concurrency` is a cap on a schedule, or the
    users of a closed loop.
    """

    arrival: str | None
    num_requests: int | None = None
    duration_s: float | None = None
    burst_interval_s: float | None = None
    burstiness: float | None = None
    ramp_s: float | None = None
    max_concurrency: int | None = None
    timeout_s: float | None = None
    retries: RetryPolicy = RetryPolicy()  # noqa: RUF009 (it cannot change)
    trace: Path | None = None
    time_scale: float = 1.0
    length_scale: float = 1.0
    keep_ticks: bool = False
    prompt_lengths: Lengths = FIXED
    output_lengths: Lengths = FIXED
    prefix_tokens: int = 0
    priority_mix: PriorityMix | None = None
    ttft_deadlines: TtftDeadlines = NO_DEADLINES
    workload: Path | None = None

    @property
    def is_closed(self) -> bool:
        return self.arrival == CLOSED

    @property
    def ends_by_time_alone(self) -> bool:
        """How many requests a closed loop sends follows from nothing but its duration."""
        return self.is_closed and self.duration_s is not None and self.num_requests is None

    @property
    def user_starts_s(self) -> tuple[float, ...]:
        """When each user of a closed loop starts: max(1, floor(users * t / ramp)) of them are there at time t."""
        assert self.max_concurrency is not None
        users, ramp_s = self.max_concurrency, self.ramp_s or 0.0
        return (0.0, *(k * ramp_s / users for k in range(2, users + 1)))


def load_of(o: RunOptions, given: Collection[str], *, replays_closed_loop: bool = False) -> Load:
    """The load of the flags, checked one by one and against each other. `given` names the fields that the user set.

    Raises InputError naming flag and value: no flag is accepted that nothing would read.
    """
    asked = {
        field for field in given if getattr(o, field) not in (None, False)
    }  # 0 is none, for those that may be 0
    for field in _POSITIVE:
        check_positive(field, o)
    if not 0 <= o.submit_interval_ms < 1e9:
        raise wrong("submit_interval_ms", o, "must be a number >= 0")
    if o.num_requests is not None and o.num_requests > MOST_REQUESTS:
        raise wrong("num_requests", o, f"is more than {MOST_REQUESTS}")
    arrival = _arrival(o, asked, replays_closed_loop)
    _check_end(o, arrival)
    if o.ramp is not None and arrival not in (*AT_A_RATE, CLOSED):
        raise wrong("ramp", o, "needs --request-rate, or the closed loop of --max-concurrency")
    if o.ramp is not None and arrival == CLOSED and o.max_concurrency == 1:
        raise wrong(
            "ramp", o, "has nobody to wait for with --max-concurrency 1: the first user is there at once"
        )
    if o.ramp is not None and o.duration is not None and o.ramp >= o.duration:
        raise wrong("ramp", o, f"must be shorter than --duration {o.duration:g}")
    timeout_s = SERVER_TIMEOUT_S if o.timeout is None and is_url(o.target) else o.timeout
    return Load(
        arrival=arrival,
        num_requests=o.num_requests,
        duration_s=o.duration,
        burst_interval_s=o.burst_interval,
        burstiness=o.burstiness,
        ramp_s=o.ramp,
        max_concurrency=o.max_concurrency,
        timeout_s=timeout_s,
        retries=_retries(o, timeout_s),
        trace=o.trace,
        time_scale=o.time_scale,
        length_scale=o.length_scale,
        keep_ticks=o.keep_ticks,
        prompt_lengths=parse_lengths("--prompt-len-dist", o.prompt_len_dist),
        output_lengths=parse_lengths("--output-len-dist", o.output_len_dist),
        prefix_tokens=o.prefix_len,
        priority_mix=None if o.priority_mix is None else parse_mix(o.priority_mix),
        ttft_deadlines=_deadlines(o),
        workload=o.workload,
    )


def _deadlines(o: RunOptions) -> TtftDeadlines:
    if o.ttft_deadline is None:
        return NO_DEADLINES
    if is_url(o.target):
        why = "a server's API takes no deadline: start it with --admission queue-timeout:2s, or use --timeout"
        raise wrong("ttft_deadline", o, why)
    return parse_deadlines(o.ttft_deadline)


def bursts_of(o: RunOptions, load: Load) -> list[int] | list[None]:
    """The burst sizes of the cells; None where no requests arrive at once."""
    if o.burst_size is None:
        return [o.num_requests or DEFAULT_BURST_SIZE] if load.arrival == "burst" else [None]
    bursts = whole_numbers("burst_size", o.burst_size, least=1, most=MOST_REQUESTS)
    if load.arrival == "burst" and o.num_requests is not None:
        if load.burst_interval_s is None and bursts != [o.num_requests]:
            why = f"differs from --burst-size {o.burst_size}: more than one burst needs --burst-interval"
            raise wrong("num_requests", o, why)
        if any(o.num_requests % burst for burst in bursts):
            raise wrong("num_requests", o, f"is no multiple of --burst-size {o.burst_size}")
    return bursts


def rates_of(o: RunOptions, load: Load) -> list[float] | list[None]:
    """The request rates of the cells, per second; of --load its shares, which `load_share` makes rates of.

    None where there is no rate.
    """
    if load.arrival not in AT_A_RATE:
        return [None]
    if o.load is not None:
        return list(rates("load", o.load, "parts of the capacity"))
    if o.request_rate is None:
        return [1e3 / o.submit_interval_ms]
    return list(rates("request_rate", o.request_rate))


def rate_field(o: RunOptions) -> str | None:
    """The field that sets the request rate, if one does."""
    return next((field for field in ("request_rate", "load") if getattr(o, field) is not None), None)


def check_shape(o: RunOptions, load: Load, burst_size: int | None, rate: float | None) -> None:
    """Raises InputError where cells of this burst size and rate would send too much, or never what a flag asks for."""
    interval_s, n = load.burst_interval_s, load.num_requests
    in_bursts = burst_size / interval_s if burst_size and interval_s else 0.0
    per_s = (rate or 0.0) + in_bursts
    if not per_s:
        return
    span_s = math.inf if load.duration_s is None else load.duration_s
    if n is not None:
        span_s = min(span_s, n / (rate or in_bursts))
    if per_s * span_s > MOST_REQUESTS:
        field = "burst_interval" if rate is None else rate_field(o) or "submit_interval_ms"
        raise wrong(field, o, f"makes more than {MOST_REQUESTS} requests in {span_s:g} s")
    if interval_s is not None and span_s <= interval_s:
        raise wrong(
            "burst_interval", o, f"has no {'second ' if rate is None else ''}burst within the {span_s:g} s"
        )
    if rate and load.ramp_s and n is not None and rate * load.ramp_s / 2 >= n:
        raise wrong("ramp", o, f"has all of --num-requests {n} before the rate of {rate:g} is reached")


def _arrival(o: RunOptions, asked: Collection[str], replays_closed_loop: bool) -> str | None:
    if o.workload is not None:
        _refuse(
            o,
            asked,
            ("arrival", "num_requests", "trace", "priority_mix", *_OF_ARRIVALS, *_OF_TRACES, *_OF_LENGTHS),
            "--workload",
        )
        if not replays_closed_loop:
            return None
        if o.max_concurrency is None:
            raise wrong("workload", o, "has no times of arrival: a closed loop needs --max-concurrency")
        return CLOSED
    if o.arrival is not None and o.arrival not in ARRIVALS:
        raise wrong("arrival", o, f"must be {', '.join(ARRIVALS)}")
    if o.trace is None:
        _refuse(o, asked, _OF_TRACES, None, "needs --trace")
        if o.arrival == "trace":
            raise wrong("arrival", o, "needs --trace")
    else:
        if o.arrival not in (None, "trace"):
            raise wrong("trace", o, f"contradicts --arrival {o.arrival}")
        _refuse(o, asked, _OF_ARRIVALS, "--trace")
        if o.max_new_tokens is None:
            _refuse(
                o, asked, ("output_len_dist",), None, "needs --max-new-tokens: the lengths are the trace's"
            )
        if o.prompt_len is None:
            _refuse(o, asked, ("prompt_len_dist",), None, "needs --prompt-len: the lengths are the trace's")
        if (o.prompt_len or o.prompt) is not None and o.max_new_tokens is not None:
            _refuse(o, asked, ("length_scale",), None, "has no length of the trace to scale")
        return "trace"
    if o.load is not None:
        _refuse(o, asked, ("request_rate",), "--load")
    spaced, rate = o.submit_interval_ms > 0, rate_field(o) is not None
    if spaced:
        _refuse(o, asked, ("request_rate", "load", "burst_size", "burst_interval"), "--submit-interval-ms")
        if o.arrival not in (None, "constant"):
            raise wrong("submit_interval_ms", o, f"contradicts --arrival {o.arrival}")
    arrival = o.arrival or _usual_arrival(o)
    if arrival == "gamma":
        if o.burstiness is None:
            raise wrong("arrival", o, "needs --burstiness")
    else:
        _refuse(o, asked, ("burstiness",), f"--arrival {arrival}")
    if arrival in AT_A_RATE and not (rate or spaced):
        raise wrong("burstiness" if o.arrival is None else "arrival", o, "needs --request-rate")
    if arrival == "burst":
        _refuse(o, asked, ("request_rate", "load"), "--arrival burst")
    if o.burst_interval is not None and o.burst_size is None:
        raise wrong("burst_interval", o, "needs --burst-size")
    if rate and o.burst_size is not None and o.burst_interval is None:
        raise wrong("burst_size", o, "on top of --request-rate needs --burst-interval")
    return arrival


def _usual_arrival(o: RunOptions) -> str:
    if o.submit_interval_ms > 0:
        return "constant"
    if o.burstiness is not None:
        return "gamma"
    if rate_field(o) is not None:
        return "poisson"
    is_closed = o.max_concurrency is not None and o.burst_size is None and o.burst_interval is None
    return CLOSED if is_closed else "burst"


def _retries(o: RunOptions, timeout_s: float | None) -> RetryPolicy:
    if o.retry not in RETRIES:
        raise wrong("retry", o, f"must be {', '.join(RETRIES)}")
    for field in ("retry_budget", "per_try_timeout"):
        if o.retry == "none" and getattr(o, field) is not None:
            raise wrong(field, o, "needs --retry")
    if o.retry_budget is not None and not LEAST_BUDGET <= o.retry_budget <= 1:
        raise wrong("retry_budget", o, f"must be a number from {LEAST_BUDGET:g} to 1")
    if o.per_try_timeout is not None and timeout_s is not None and o.per_try_timeout >= timeout_s:
        raise wrong("per_try_timeout", o, f"must be shorter than --timeout {timeout_s:g}")
    return RetryPolicy(o.retry, o.retry_budget, o.per_try_timeout)


def _check_end(o: RunOptions, arrival: str | None) -> None:
    """Something must say when it is over, and nothing may say it in vain."""
    endless = o.num_requests is None and o.duration is None
    needs = "needs --num-requests or --duration"
    if arrival in AT_A_RATE and endless:
        raise wrong(rate_field(o) or "submit_interval_ms", o, needs)
    if o.burst_interval is not None and endless:
        raise wrong("burst_interval", o, needs)
    if (
        arrival == "burst"
        and o.burst_interval is None
        and o.duration is not None
        and o.max_concurrency is None
    ):
        raise wrong("duration", o, "has nothing to end: one burst is sent at once")
    if arrival == CLOSED and o.workload is None:
        if endless:
            raise wrong("max_concurrency", o, f"is a closed loop, which {needs}")
        most = CLOSED_LOOP_MOST if o.num_requests is None else o.num_requests
        if o.max_concurrency is not None and o.max_concurrency > most:
            raise wrong("max_concurrency", o, f"is never reached with {most} requests")


def _refuse(
    o: RunOptions, asked: Collection[str], fields: tuple[str, ...], by: str | None, why: str = ""
) -> None:
    for field in fields:
        if field in asked:
            raise wrong(field, o, why or f"contradicts {by}")
