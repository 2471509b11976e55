"""SchedulerManager: the core with threads and a clock around it.

Callers reserve a slot, then leave a command in the inbox; one engine thread owns the core, turns the loop
and publishes each step's tokens at once. `step()` is one turn of that loop, for tests that drive it by hand.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from roseinfer.admission import AdmissionCounts
from roseinfer.admission_spec import admission_of
from roseinfer.core import Core
from roseinfer.errors import InputError, ManagerClosedError, check_whole
from roseinfer.executor import Clock, Engine, IncrementalDecoder, StepRecord
from roseinfer.kv_cache import KVCache, blocks_for
from roseinfer.nvtx import QUEUE, TOKENIZE, ranges
from roseinfer.pipeline import Pipeline, StepFailed
from roseinfer.policies import policies_of
from roseinfer.prompt import Prompt, check_text, checked_ids, most_tokens
from roseinfer.request import Request, SamplingParams, TokenEvent
from roseinfer.scheduler import SchedulerLimits
from roseinfer.stream import Collector, Mailbox, RequestStream, Token
from roseinfer.tokenizer_pool import TokenizerPool
from roseinfer.waiting import FCFS

if TYPE_CHECKING:
    from roseinfer.sim.cost_model import CostModel

Command = Callable[[], list[TokenEvent]]


LONGEST_WAIT_S: Final = 3600.0
"""The idle loop looks up this often; a queue cannot wait for as long as a user's timeout may be."""


class SchedulerManager:
    """Serves requests on one engine.

    max_inflight_requests: bound on tokenising + waiting + running + ended-but-unread; None is no bound. Over it,
        `submit` and `add_request` raise SchedulerManagerOverloadedError before anything is tokenised.
    admission: the same in full, "inflight:64", or a budget of tokens, "tokens:16384": the sum of prompt +
        max_new_tokens over all that are in flight, where a text counts its bytes until it is tokenised; or both,
        "inflight:64+tokens:16384". A text that turns out to exceed the budget by itself ends with that error. Further
        policies ("slo:ttft=250ms", "queue-timeout:2s", "codel", "aimd", "gradient", "priority") are in the README;
        what they drop while it waits ends with the same error, whose `stage` is then "queued".
    scheduling: the order in which requests wait: "fcfs", "spf" (shortest prefill first) or "edf" (earliest deadline).
    cost_model: what work takes here, for the policies that weigh it (slo, aimd, gradient).
    max_active_requests, max_batch_size: bounds on what runs at a time.
    max_num_batched_tokens, kv_cache_tokens: token budget of a step and size of the KV cache; None asks the engine.
    tokenize_workers: threads that tokenise text prompts; with 0 the caller does it, after its reservation.
    unread_timeout_s: how long an ended stream that nobody reads keeps its slot.
    prefix_cache: what a prompt begins with is not computed again while the KV cache still holds it, from whichever
        request of this manager.
    overlap_steps: launch a step while the one before it runs; None does so where the engine computes beside its
        thread, which is on CUDA.
    nvtx: mark steps and the stages of requests for Nsight Systems; needs a torch with CUDA.
    on_step: called by the engine thread after each step was published.
    start: False leaves the engine thread out; then `step()` turns the loop.

    Raises InputError (a ValueError) for values that cannot work.
    """

    def __init__(
        self,
        engine: Engine,
        max_batch_size: int = 8,
        max_active_requests: int | None = None,
        max_inflight_requests: int | None = None,
        max_num_batched_tokens: int | None = None,
        kv_cache_tokens: int | None = None,
        tokenize_workers: int = 0,
        unread_timeout_s: float = 60.0,
        *,
        prefix_cache: bool = True,
        overlap_steps: bool | None = None,
        nvtx: bool = False,
        admission: str | None = None,
        scheduling: str = FCFS,
        cost_model: CostModel | None = None,
        clock: Clock = time.perf_counter,
        on_step: Callable[[StepRecord], None] | None = None,
        start: bool = True,
    ) -> None:
        check_whole("max_batch_size", max_batch_size, 1)  # before the engine is asked what suits it
        check_whole("tokenize_workers", tokenize_workers, 0)
        if not isinstance(unread_timeout_s, int | float) or not unread_timeout_s > 0:
            raise InputError("unread_timeout_s", unread_timeout_s, "must be a positive number")
        if kv_cache_tokens is not None:
            check_whole("kv_cache_tokens", kv_cache_tokens, 1)
        self.limits = SchedulerLimits(
            max_batch_size,
            max_active_requests,
            engine.default_num_batched_tokens(max_batch_size)
            if max_num_batched_tokens is None
            else max_num_batched_tokens,
        )
        self.limits.check()
        self._ranges = ranges(nvtx)
        self.spec = admission_of(max_inflight_requests, admission)
        """Which requests get in."""
        kv_cache = KVCache(
            blocks_for(
                engine.default_kv_cache_tokens(max_batch_size) if kv_cache_tokens is None else kv_cache_tokens
            ),
            prefix_cache=prefix_cache,
            shares_blocks=engine.paged_attn,
        )
        self.admission, policy = policies_of(
            self.spec, scheduling, self.limits, cost_model, num_kv_blocks=kv_cache.num_blocks
        )
        self._core = Core(
            limits=self.limits,
            kv_cache=kv_cache,
            admission=self.admission,
            max_model_len=engine.max_model_len,
            eos_token_ids=engine.eos_token_ids,
            unread_timeout_s=unread_timeout_s,
            policy=policy,
        )
        self._vocab_size = engine.vocab_size
        self._clock = clock
        self._on_step = on_step
        self._collector = Collector()
        self._streams: dict[int, RequestStream] = {}  # every request that may still hold a slot, by id
        self._ids = itertools.count()
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        # Guards the two flags below and every entry into the inbox. Reentrant: the garbage collector may close an
        # abandoned stream in a thread that is inside.
        self._gate = threading.RLock()
        self._closed = False  # no new requests
        self._ended = False  # the loop has ended: no commands either
        self._died_of: BaseException | None = None
        executor = engine.make_executor(
            num_kv_blocks=kv_cache.num_blocks, max_batch_size=self.limits.seats, clock=clock
        )
        overlaps = engine.launches_async if overlap_steps is None else overlap_steps
        self._pipeline = Pipeline(executor, depth=int(overlaps), ranges=self._ranges)
        self._tokenizer = engine.make_tokenizer()
        self._tokenizer_lock = threading.Lock()
        # A bound must hold where it is counted against a budget: a tokenizer may put its own tokens in front.
        self._added_tokens = 0 if self.admission.token_limit is None else len(self._tokenizer.encode(""))
        self._pool = TokenizerPool(tokenize_workers, engine.make_tokenizer) if tokenize_workers else None
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(target=self._run, name="roseinfer-engine", daemon=True)
            self._thread.start()

    # ---- callers' side ----

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        mailbox: Mailbox | None = None,
        priority: int = 0,
        ttft_deadline_s: float | None = None,
    ) -> RequestStream:
        """Enters a request and returns its stream, or raises.

        `prompt` is text or token ids. `mailbox` makes several streams share one (see `new_mailbox`); whoever
        reads it calls `acknowledge` for each terminal event. `priority` is its class where there are lanes, 0 the
        highest. What cannot have its first token within `ttft_deadline_s` is dropped as soon as that is known.

        Raises SchedulerManagerOverloadedError over the limit, ManagerClosedError after `close` or the engine's
        death, InputError (a ValueError) for token ids that are none, PromptTooLongError for those that can never fit.
        """
        params = SamplingParams() if params is None else params
        if mailbox is not None and not mailbox.belongs_to(self._collector):
            raise InputError("mailbox", mailbox, "was made by another manager")
        if self._closed:
            raise self._closed_error()
        check_whole("priority", priority, 0)
        if ttft_deadline_s is not None and not ttft_deadline_s > 0:
            raise InputError("ttft_deadline_s", ttft_deadline_s, "must be a positive number")
        is_text = isinstance(prompt, str)
        prompt_tokens = most_tokens(prompt) + (self._added_tokens if is_text else 0)
        if self.admission.has_lanes:  # nobody is evicted for what cannot run
            if isinstance(prompt, str):
                check_text(prompt)
            else:
                self._checked_ids(prompt, params)
        ticket = self.admission.reserve(
            self._clock(),
            prompt_tokens + params.max_new_tokens,
            is_bound=is_text,
            prompt_tokens=prompt_tokens,
            priority=priority,
        )
        request = None
        try:
            ids = None if isinstance(prompt, str) else self._checked_ids(prompt, params)
            if isinstance(prompt, str) and not prompt.isascii():
                check_text(prompt)
            encoded = self._encode(prompt) if isinstance(prompt, str) and self._pool is None else None
            seed = self._seed(params)
            deadline_s = None if ttft_deadline_s is None else ticket.reserved_s + ttft_deadline_s
            request = Request(
                next(self._ids), params, ticket, seed, ids, ticket.reserved_s, priority, deadline_s
            )
            box = Mailbox(self._collector) if mailbox is None else mailbox
            stream = RequestStream(request, box if mailbox is None else None, self)
            self._streams[request.request_id] = stream  # before its reader can see an event of it
            self._enter(request, box, prompt)
            if encoded is not None:
                self._tokenized(request, encoded)
            return stream
        except BaseException:  # a caller that is interrupted here keeps no slot either
            if request is not None:
                self._streams.pop(request.request_id, None)
            if request is None or not self._command(lambda: self._close_in_engine(request)):
                self.admission.release(ticket, self._clock())
            if request is not None and self._ended:
                self._collector.discard(request.request_id)
            raise

    def add_request(
        self,
        prompt: Prompt,
        max_new_tokens: int = 16,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: tuple[str, ...] = (),
        ignore_eos: bool = False,
    ) -> int:
        """`submit` for readers that keep an id: pass it to `stream_text`, `stream_tokens` or `abort`."""
        params = SamplingParams(max_new_tokens, temperature, top_k, top_p, seed, stop, ignore_eos)
        return self.submit(prompt, params).request_id

    def stream_text(self, request_id: int) -> Iterator[str]:
        """Pieces of a request's text, as they come."""
        return self._stream(request_id).text()

    def stream_tokens(self, request_id: int) -> Iterator[Token]:
        """(token_id, engine_time_s) of a request, as they come."""
        return self._stream(request_id).tokens()

    def abort(self, request_id: int) -> None:
        """Ends a request; its reader sees the end. Ids that are unknown or over are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.close()

    def new_mailbox(self, *, wants_starts: bool = False) -> Mailbox:
        """A mailbox that several submissions may share. `wants_starts`: it hears of first steps as well."""
        return Mailbox(self._collector, wants_starts=wants_starts)

    def acknowledge(self, request_id: int) -> None:
        """The terminal event of a request was taken from a shared mailbox: its slot is free.

        Raises InputError for a request that has not ended. Ids that are unknown or over are ignored.
        """
        stream = self._streams.get(request_id)
        if stream is not None:
            request = stream._request
            if request.finish_reason is None and not self._ended:
                raise InputError(
                    "request_id", request_id, "has not ended: abort it, or wait for its terminal event"
                )
            self.acknowledge_request(request)

    @property
    def inflight(self) -> int:
        """Slots taken now."""
        return self.admission.inflight

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self._core.scheduler.kv_cache.capacity_tokens

    @property
    def waiting(self) -> int:
        """Requests that are tokenising or wait for a seat now."""
        return self.admission.not_started

    @property
    def running(self) -> int:
        """Requests that steps work on now."""
        return len(self._core.scheduler.running)

    @property
    def died_of(self) -> BaseException | None:
        """What ended the engine's loop, if it was not `close`."""
        return self._died_of

    def counts(self) -> AdmissionCounts:
        """Admission's own account of the slots."""
        return self.admission.counts()

    def close(self, *, drain: bool = False) -> None:
        """Refuses further requests and ends: at once, aborting what lives, or after finishing it (`drain`).

        May be repeated: while one thread drains, another may still abort.
        """
        with self._gate:
            self._closed = True
            if not self._ended:
                self._inbox.put(list if drain else self._abort_all)
        if self._pool is not None:
            self._pool.close()
        if self._thread is not None:
            self._thread.join()
        else:
            while self.step() or not self._try_end():
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- engine's side ----

    def step(self) -> bool:
        """One turn of the loop: inbox, plan, compute, commit, publish. False when there was nothing to compute.

        With `overlap_steps` a turn commits the step before the one that it launches.
        """
        self._take_inbox()
        plan_start_s = self._clock()
        for request in self._core.expire(plan_start_s):
            self._streams.pop(request.request_id, None)
        with self._ranges.phase("plan"):
            plan = self._core.plan(plan_start_s)
        self._publish(self._core.take_dropped())
        if plan is None and not self._pipeline:
            return False
        if plan is not None and self._collector.is_asked_for_starts and (started := plan.started_ids()):
            self._collector.announce(started, plan_start_s)
        if plan is not None:
            self._ranges.started(plan)
        scheduler = self._core.scheduler
        counts = len(scheduler.waiting), len(scheduler.running), scheduler.kv_cache.used_tokens
        limit = self.admission.moving_limit
        try:
            for step, result in self._pipeline.turn(plan, plan_start_s, (*counts, limit)):
                with self._ranges.phase("commit"):
                    self._publish(self._core.commit(step.plan, result, self._clock()))
                if self._on_step is not None:
                    now = self._clock()
                    self._on_step(StepRecord(step.plan, result, step.plan_start_s, now, *step.counts))
        except StepFailed as failed:
            self._publish(self._core.fail_step(failed.cause, self._clock()))
        return True

    def _run(self) -> None:
        try:
            while True:
                if not self.step():
                    if self._try_end():
                        return
                    self._wait_for_command()
        except BaseException as error:
            self._die(error)

    def _try_end(self) -> bool:
        """Ends the loop if it is closed and has nothing left; from then on nobody takes commands."""
        with self._gate:
            self._ended = self._closed and not len(self._core) and self._inbox.empty()
            return self._ended

    def _wait_for_command(self) -> None:
        due_s = self._core.next_due_s()
        timeout_s = None if due_s is None else min(max(0.0, due_s - self._clock()), LONGEST_WAIT_S)
        try:
            self._publish(self._inbox.get(timeout=timeout_s)())
        except queue.Empty:
            pass

    def _take_inbox(self) -> None:
        while not self._inbox.empty():  # this thread alone takes things out
            self._publish(self._inbox.get()())

    def _publish(self, events: list[TokenEvent]) -> None:
        if events:
            self._ranges.published(events)
            self._collector.publish(events)

    def _abort_all(self) -> list[TokenEvent]:
        now = self._clock()
        return [event for request_id in self._core.live_ids() for event in self._core.abort(request_id, now)]

    def _die(self, error: BaseException) -> None:
        """The core itself failed and cannot be asked any more: everybody who waits for it gets the error."""
        with self._gate:
            self._died_of = error
            self._closed = self._ended = True
        self._collector.end_all(error, self._clock())

    # ---- between the two ----

    def _enter(self, request: Request, mailbox: Mailbox, prompt: Prompt) -> None:
        # Not inside the gate: a collection while the collector's lock is held may close an abandoned stream, and
        # so wait for the gate.
        self._collector.open(request.request_id, mailbox)
        with self._gate:
            if self._closed:
                raise self._closed_error()
            self._ranges.enter(request.request_id, TOKENIZE if request.prompt_ids is None else QUEUE)
            self._inbox.put(partial(self._core.submit, request))
            if self._pool is not None and isinstance(prompt, str):
                # Inside the gate, so that `close` cannot end the workers before they know of this prompt.
                self._pool.encode(
                    prompt,
                    wanted=lambda: request.finish_reason is None and not self._ended,
                    done=lambda result: self._tokenized(request, result),
                )

    def _command(self, command: Command) -> bool:
        """Leaves a command for the engine thread; False if that has ended."""
        with self._gate:
            if not self._ended:
                self._inbox.put(command)
            return not self._ended

    def _encode(self, text: str) -> list[int]:
        with self._tokenizer_lock:
            return self._tokenizer.encode(text)

    def _tokenized(self, request: Request, result: list[int] | BaseException) -> None:
        now = self._clock()
        self._ranges.advance(request.request_id, QUEUE)
        if isinstance(result, BaseException):
            self._command(lambda: self._core.fail(request.request_id, result, self._clock()))
        else:
            self._command(lambda: self._core.tokenized(request.request_id, result, now))

    @staticmethod
    def _seed(params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        # Greedy asks for none, and drawing one takes long.
        return secrets.randbits(63) if params.temperature else 0

    def _closed_error(self) -> ManagerClosedError:
        if self._died_of is None:
            return ManagerClosedError("the manager is closed")
        error = ManagerClosedError(f"the engine died: {self._died_of}")
        error.__cause__ = self._died_of
        return error

    def _checked_ids(self, prompt: Sequence[int], params: SamplingParams) -> array[int]:
        ids = checked_ids(prompt, self._vocab_size)
        self._core.check_fits(len(ids), params.max_new_tokens)
        return ids

    def _stream(self, request_id: int) -> RequestStream:
        stream = self._streams.get(request_id)
        if stream is None:
            raise InputError("request_id", request_id, "unknown, already read, or given up unread")
        return stream

    # What a stream asks of its manager:

    def new_decoder(self) -> IncrementalDecoder:
        return self._tokenizer.new_decoder()

    def acknowledge_request(self, request: Request) -> None:
        self._streams.pop(request.request_id, None)
        self._core.acknowledge(request, self._clock())

    def close_request(self, request: Request) -> None:
        """The reader leaves: what still runs is aborted, what has ended unread is free at once."""
        self._streams.pop(request.request_id, None)
        if request.finish_reason is not None or not self._command(lambda: self._close_in_engine(request)):
            self._core.acknowledge(request, self._clock())

    def stop_request(self, request: Request) -> None:
        """Nothing more is computed; the slot is held until `close_request`."""
        self._command(lambda: self._core.abort(request.request_id, self._clock(), True))

    def _close_in_engine(self, request: Request) -> list[TokenEvent]:
        now = self._clock()
        if request.arrival < 0:  # its caller failed to enter it
            self._collector.discard(request.request_id)
            self._core.acknowledge(request, now)
        elif request.finish_reason is not None:
            self._core.acknowledge(request, now)
        return self._core.abort(request.request_id, now)
