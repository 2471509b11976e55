"""What `/metrics` tells Prometheus. One registry for each app, so that several may live in a process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from roseinfer.errors import TOKENS_NEVER_FIT
from roseinfer.manager import SchedulerManager
from roseinfer.server.generation import Generation

_WAIT_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """Counters and histograms of one app; gauges ask the manager when they are read."""

    def __init__(self, manager: SchedulerManager) -> None:
        self._registry = registry = CollectorRegistry()
        for name, help_, read in (
            (
                "in_flight",
                "Slots taken: waiting, running, or ended and not yet sent",
                lambda: manager.inflight,
            ),
            ("waiting", "Requests that are tokenising or wait for a seat", lambda: manager.waiting),
            ("running", "Requests that steps work on", lambda: manager.running),
        ):
            Gauge(f"roseinfer_requests_{name}", help_, registry=registry).set_function(read)
        for name, help_, limit in (
            ("in_flight_limit", "Slots of this process, +Inf without a limit", manager.admission.limit),
            ("tokens_limit", "Token budget of this process, +Inf without one", manager.admission.token_limit),
        ):
            Gauge(f"roseinfer_{name}", help_, registry=registry).set(float("inf") if limit is None else limit)
        if manager.admission.moving_limit is not None:
            Gauge(
                "roseinfer_in_flight_moving_limit", "Where a limit that moves stands", registry=registry
            ).set_function(lambda: manager.admission.moving_limit or 0)
        Gauge(
            "roseinfer_tokens_in_flight", "Prompt + most new tokens of all in flight", registry=registry
        ).set_function(lambda: manager.counts().held_tokens)
        self._refusals = Counter("roseinfer_refusals", "Requests refused", ["reason"], registry=registry)
        always = ("max_inflight", "tokens", TOKENS_NEVER_FIT, "draining", "engine_dead")
        for reason in (*always, *manager.spec.reasons):
            self._refusals.labels(reason)  # a rate needs its zero
        self._ends = Counter("roseinfer_requests", "Requests ended", ["finish_reason"], registry=registry)
        self._tokens = Counter(
            "roseinfer_generated_tokens", "Tokens of requests that ended", registry=registry
        )
        self._prompt_tokens = Counter(
            "roseinfer_prompt_tokens", "Prompt tokens of requests that were scheduled", registry=registry
        )
        self._cached_tokens = Counter(
            "roseinfer_cached_prompt_tokens", "Of these, found in the prefix cache", registry=registry
        )
        self._hits = Counter(
            "roseinfer_prefix_cache_hits", "Requests that found some of their prompt there", registry=registry
        )

        def seconds(name: str, help_: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"roseinfer_{name}_seconds", help_, buckets=buckets, registry=registry)

        self._queue_wait = seconds("queue_wait", "From slot taken to first scheduled", _WAIT_BUCKETS_S)
        self._ttft = seconds(
            "time_to_first_token", "From slot taken to first bytes handed over", _WAIT_BUCKETS_S
        )
        self._itl = seconds("inter_token_latency", "Between tokens, as the engine made them", _GAP_BUCKETS_S)
        self._e2e = seconds("e2e_latency", "From slot taken to the last byte handed over", _WAIT_BUCKETS_S)

    def refused(self, reason: str | None) -> None:
        """A request was told to come back later; None: that it cannot be served."""
        if reason is not None:
            self._refusals.labels(reason).inc()

    def token_gap(self, seconds: float) -> None:
        """A token came so long after the one before it."""
        self._itl.observe(seconds)

    def scheduled(self, generation: Generation) -> None:
        """A request waits no longer in the queue. What left it before its first step was planned is not counted."""
        times = generation.timings
        if times.first_scheduled_s is not None:
            self._queue_wait.observe(times.first_scheduled_s - times.reserved_s)
            self._prompt_tokens.inc(generation.prompt_tokens)
            self._cached_tokens.inc(generation.cached_tokens)
            self._hits.inc(generation.cached_tokens > 0)

    def began(self, generation: Generation, now: float) -> None:
        """The first bytes of an answer were handed over, or would have been if it were a stream."""
        self._ttft.observe(now - generation.timings.reserved_s)

    def ended(self, generation: Generation, finish_reason: str, now: float) -> None:
        """Nothing more is sent. Latency is of complete answers only."""
        self._ends.labels(finish_reason).inc()
        self._tokens.inc(len(generation.token_times_s))
        if generation.finish_reason is not None:
            self._e2e.observe(now - generation.timings.reserved_s)

    def text(self) -> bytes:
        """In the text format of Prometheus."""
        return generate_latest(self._registry)
