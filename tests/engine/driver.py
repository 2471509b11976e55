"""Drives an executor with hand-made plans: any span of any request, in any step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from roseinfer.engine.engine import InferenceEngine
from roseinfer.executor import KV_BLOCK_TOKENS, Span, StepPlan, StepResult
from roseinfer.request import Request, SamplingParams
from roseinfer.ticket import Ticket

NUM_BLOCKS = 64


class Driver:
    """An executor and its requests. Block tables are scattered over the cache and never in order.

    After every step, what a step must leave is checked.
    """

    def __init__(self, engine: InferenceEngine, num_blocks: int = NUM_BLOCKS) -> None:
        ticks = count()
        self.executor = engine.make_executor(
            num_kv_blocks=num_blocks, max_batch_size=32, clock=lambda: float(next(ticks))
        )
        self._num_blocks = num_blocks
        self._requests: list[Request] = []
        self._free = list(range(num_blocks))
        random.Random(0).shuffle(self._free)
        self._ids = count()

    def request(
        self, prompt: Sequence[int], *, seed: int = 0, max_new_tokens: int = 32, **params: Any
    ) -> Request:
        sampling = SamplingParams(max_new_tokens=max_new_tokens, **params)
        ticket: Ticket = None  # type: ignore[assignment]  # no admission here
        request = Request(next(self._ids), sampling, ticket, seed, list(prompt), 0.0)
        for _ in range(-(-request.max_len // KV_BLOCK_TOKENS)):
            request.block_table.append(self._free.pop())
        self._requests.append(request)
        return request

    def release(self, request: Request) -> None:
        """Its blocks are free for the next request, with what it left in them."""
        self._free[:0] = request.block_table
        request.block_table = []

    def plan(self, *work: Request | tuple[Request, int]) -> StepPlan:
        """Each request goes on by all its known tokens, or by so many of them."""
        spans = [_next_span(*item) if isinstance(item, tuple) else _next_span(item) for item in work]
        spans.sort(key=lambda span: span.n_tokens > 1)  # decodes first
        return StepPlan(spans)

    def step(self, *work: Request | tuple[Request, int]) -> StepResult:
        """Computes one step and appends its tokens to the requests."""
        plan = self.plan(*work)
        result = self.executor.launch(plan).wait()
        for span, token_id in zip(plan.spans, result.token_ids, strict=True):
            span.request.num_scheduled += span.n_tokens
            if token_id is not None:
                span.request.output_ids.append(token_id)
        self._check(plan, result)
        return result

    def _check(self, plan: StepPlan, result: StepResult) -> None:
        assert [span.samples for span in plan.spans] == [
            token_id is not None for token_id in result.token_ids
        ]
        assert result.exec_start_s < result.exec_end_s  # its clock ticks with every reading
        blocks = [*self._free, *(block for request in self._requests for block in request.block_table)]
        assert sorted(blocks) == list(range(self._num_blocks)), "an executor changed a block table"
        for request in self._requests:
            assert 0 <= request.num_scheduled <= request.prompt_len + len(request.output_ids)

    def logits(self, *work: Request | tuple[Request, int]) -> torch.Tensor:
        """Logits of the step, which is computed but not counted."""
        with torch.inference_mode():
            return self.executor.logits(self.plan(*work))


def _next_span(request: Request, at_most: int = 1_000_000) -> Span:
    known = request.prompt_len + len(request.output_ids)
    n_tokens = min(at_most, known - request.num_scheduled)
    return Span(request, request.num_scheduled, n_tokens, request.num_scheduled + n_tokens == known)
