"""Steps computed by torch: one packed row of tokens in, one token id per sampling span out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from roseinfer.engine.attention import copy_blocks
from roseinfer.engine.device_sampling import Draws, put_draws, sample_on_device
from roseinfer.engine.graphs import DecodeGraph, DecodeGraphs
from roseinfer.engine.model import Model
from roseinfer.engine.sampling import sample
from roseinfer.engine.staging import Staged, staging_for
from roseinfer.engine.step_context import LayerKV, StepContext, build_step_context, idle_step_context
from roseinfer.engine.varlen import Flash
from roseinfer.executor import Clock, StepPlan, StepResult, step_token_ids
from roseinfer.request import Request


class _Inputs(NamedTuple):
    """A step on its way to the device; its tensors have their values once they are sent."""

    ids: torch.Tensor  # [tokens], and the padding of a graph
    sampled_before: tuple[torch.Tensor, torch.Tensor] | None  # places in ids, rows of the last step's tokens
    copies: torch.Tensor | None  # [copies, 2]: KV blocks
    draws: Draws | None
    eager: tuple[torch.Tensor, StepContext] | None  # positions [tokens], where no graph computes it
    graph: DecodeGraph | None


class TorchExecutor:
    """Implements `roseinfer.executor.Executor` on a model and its KV tensors. Owned by one thread.

    With a staged way to the device nothing in `launch` waits for the device.
    """

    def __init__(
        self,
        model: Model,
        kv: list[LayerKV],
        clock: Clock,
        *,
        paged_attn: bool = False,
        flash: Flash | None = None,
        reads_in_place: bool = False,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._paged_attn = paged_attn
        self._flash = flash
        self._reads_in_place = reads_in_place
        self._graphs = graphs
        self._kv = kv
        self._clock = clock
        self._device = kv[0][0].device
        self._staging = staging_for(self._device) if graphs is None else graphs.staging
        self._row_of: dict[int, int] = {}  # of what the last step sampled, by request id
        self._chosen = torch.empty(0, dtype=torch.int64, device=self._device)  # its ids
        self._last_end_s = -math.inf

    def warm_up(self, batch_sizes: Iterable[int]) -> None:
        """Decodes so many requests that there are not. Call it before there are any: slot 0 is written.

        Kernels are made for a number of rows when it first comes: 4 to 5 ms of a step of GPT-2, in somebody's tail.
        """
        with torch.inference_mode():
            for n in batch_sizes:
                nothing = torch.zeros(n, dtype=torch.int64, device=self._device)
                idle = idle_step_context(n, self._kv, self._device, reads_in_place=self._reads_in_place)
                self._model.warm_up(nothing, nothing, idle)

    def launch(self, plan: StepPlan) -> TorchStep:
        """Starts a step. On CPU it is over when this returns; what it raises comes out here, not in wait()."""
        launch_s = self._clock()
        with torch.inference_mode():
            chosen = self._compute(plan)
            if chosen.device.type == "cuda":
                return self._left_running(plan, chosen, launch_s)
        clock = self._clock
        return TorchStep(plan, chosen, lambda: (launch_s, clock()))

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Float logits [sampling spans, vocab] at the last position of every span that samples."""
        return self._forward(self._send(plan, draws=False), plan)

    def _compute(self, plan: StepPlan) -> torch.Tensor:
        inputs = self._send(plan, draws=True)
        logits = self._forward(inputs, plan)
        requests, positions = _sampling(plan)
        if isinstance(self._staging, Staged):
            chosen = sample_on_device(logits, inputs.draws)
        else:
            chosen = sample(logits, requests, positions)
        self._row_of = {request.request_id: row for row, request in enumerate(requests)}
        self._chosen = chosen
        return chosen

    def _send(self, plan: StepPlan, *, draws: bool) -> _Inputs:
        staging = self._staging
        staging.begin()
        ids, places, rows = self._token_ids(plan)
        graph = None if self._graphs is None else self._graphs.graph_of(plan)
        eager = None
        if graph is not None:
            token_ids = graph.put(plan, ids).ids  # first of all: see there
        else:
            token_ids = staging.put(ids)
            spans = [np.arange(span.start, span.start + span.n_tokens) for span in plan.spans]
            positions = staging.put(np.concatenate(spans))
            context = build_step_context(
                plan,
                self._kv,
                staging,
                paged=self._paged_attn,
                flash=self._flash,
                reads_in_place=self._reads_in_place,
            )
            eager = positions, context
        inputs = _Inputs(
            token_ids,
            (staging.put(np.array(places)), staging.put(np.array(rows))) if places else None,
            staging.put(np.array(plan.copies, np.int64)) if plan.copies else None,
            put_draws(*_sampling(plan), staging) if draws and isinstance(staging, Staged) else None,
            eager,
            graph,
        )
        staging.send()
        return inputs

    def _forward(self, inputs: _Inputs, plan: StepPlan) -> torch.Tensor:
        if inputs.copies is not None:
            copy_blocks(self._kv, inputs.copies)
        if inputs.sampled_before is not None:
            places, rows = inputs.sampled_before
            inputs.ids[places] = self._chosen[rows]
        if inputs.graph is not None:
            inputs.graph.replay()
            return inputs.graph.logits[: len(plan.spans)]
        assert inputs.eager is not None
        return self._model.forward(inputs.ids, *inputs.eager)

    def _token_ids(self, plan: StepPlan) -> tuple[NDArray[np.int64], list[int], list[int]]:
        """Input ids [tokens]. Those that the step before samples are not on the host yet: their places here, and
        their rows there.
        """
        ids: list[int] = []
        places, rows = list[int](), list[int]()
        for span in plan.spans:
            request = span.request
            if span.start < request.prompt_len + len(request.output_ids):
                ids += step_token_ids(span)
            else:
                places.append(len(ids))
                rows.append(self._row_of[request.request_id])
                ids.append(0)
        return np.array(ids, np.int64), places, rows

    def _left_running(self, plan: StepPlan, chosen: torch.Tensor, launch_s: float) -> TorchStep:
        """The copy of the ids to the host is what a step waits for: one event, and nothing before it."""
        host_ids = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)  # CUDA only, all of it
        host_ids.copy_(chosen, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def finish() -> tuple[float, float]:
            copied.synchronize()
            # It was launched while the step before it ran, and began when that was over.
            exec_start_s = max(launch_s, self._last_end_s)
            self._last_end_s = self._clock()
            return exec_start_s, self._last_end_s

        return TorchStep(plan, host_ids, finish)


class TorchStep:
    """A launched step. Implements `roseinfer.executor.StepHandle`."""

    def __init__(
        self, plan: StepPlan, token_ids: torch.Tensor, finish: Callable[[], tuple[float, float]]
    ) -> None:
        """`finish` returns when the step began and ended, once `token_ids` are on the host."""
        self._plan = plan
        self._token_ids = token_ids
        self._finish = finish

    def wait(self) -> StepResult:
        """Blocks until the ids are on the host. The end stamp is of when they were, never of a launch."""
        exec_start_s, exec_end_s = self._finish()
        ids = iter(self._token_ids.tolist())
        token_ids = [next(ids) if span.samples else None for span in self._plan.spans]
        return StepResult(token_ids, exec_start_s, exec_end_s)


def _sampling(plan: StepPlan) -> tuple[list[Request], list[int]]:
    """The requests that get a token, and its position."""
    spans = [span for span in plan.spans if span.samples]
    return [span.request for span in spans], [span.start + span.n_tokens for span in spans]
