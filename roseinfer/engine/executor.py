"""Steps computed by torch: one packed row of tokens in, one token id per sampling span out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch

from roseinfer.engine.attention import (
    LayerKV,
    StepContext,
    build_step_context,
    copy_blocks,
    idle_step_context,
)
from roseinfer.engine.sampling import sample
from roseinfer.executor import Clock, StepPlan, StepResult, step_token_ids


class Model(Protocol):
    """What computes: a native model, or one of transformers (`transformers_path.TransformersModel`)."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext) -> torch.Tensor:
        """ids, positions [tokens] -> logits [spans that sample, vocab]."""
        ...

    def warm_up(self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext) -> None:
        """Uses every kernel once that `forward` would use for a step of this size."""
        ...


class TorchExecutor:
    """Implements `roseinfer.executor.Executor` on a model and its KV tensors. Owned by one thread."""

    def __init__(self, model: Model, kv: list[LayerKV], clock: Clock, *, paged_attn: bool = False) -> None:
        self._model = model
        self._paged_attn = paged_attn
        self._kv = kv
        self._clock = clock
        self._device = kv[0][0].device
        self._row_of: dict[int, int] = {}  # of what the last step sampled, by request id
        self._chosen = torch.empty(0, dtype=torch.int64, device=self._device)  # its ids

    def warm_up(self, batch_sizes: Iterable[int]) -> None:
        """Decodes so many requests that there are not. Call it before there are any: slot 0 is written.

        Kernels are made for a number of rows when it first comes: 4 to 5 ms of a step of GPT-2, in somebody's tail.
        """
        with torch.inference_mode():
            for n in batch_sizes:
                nothing = torch.zeros(n, dtype=torch.int64, device=self._device)
                self._model.warm_up(nothing, nothing, idle_step_context(n, self._kv, self._device))

    def launch(self, plan: StepPlan) -> TorchStep:
        """Starts a step. On CPU it is over when this returns; what it raises comes out here, not in wait()."""
        exec_start_s = self._clock()
        with torch.inference_mode():
            return TorchStep(plan, self._compute(plan), exec_start_s, self._clock)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Float logits [sampling spans, vocab] at the last position of every span that samples."""
        positions = np.concatenate([np.arange(span.start, span.start + span.n_tokens) for span in plan.spans])
        context = build_step_context(plan, self._kv, self._device, paged=self._paged_attn)
        return self._model.forward(
            self._token_ids(plan), torch.from_numpy(positions).to(self._device), context
        )

    def _compute(self, plan: StepPlan) -> torch.Tensor:
        if plan.copies:
            copy_blocks(self._kv, plan.copies)
        sampling = [span for span in plan.spans if span.samples]
        requests = [span.request for span in sampling]
        chosen = sample(self.logits(plan), requests, [span.start + span.n_tokens for span in sampling])
        self._row_of = {request.request_id: row for row, request in enumerate(requests)}
        self._chosen = chosen
        return chosen

    def _token_ids(self, plan: StepPlan) -> torch.Tensor:
        """Input ids [tokens]; those that the step before samples are not on the host yet."""
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
        token_ids = torch.tensor(ids, device=self._device)
        if places:
            token_ids[places] = self._chosen[rows]
        return token_ids


class TorchStep:
    """A launched step. Implements `roseinfer.executor.StepHandle`."""

    def __init__(self, plan: StepPlan, chosen: torch.Tensor, exec_start_s: float, clock: Clock) -> None:
        self._plan = plan
        self._chosen = chosen
        self._exec_start_s = exec_start_s
        self._clock = clock

    def wait(self) -> StepResult:
        """Blocks until the ids are on the host; the end stamp is taken then, never at launch."""
        ids = iter(self._chosen.tolist())
        exec_end_s = self._clock()
        token_ids = [next(ids) if span.samples else None for span in self._plan.spans]
        return StepResult(token_ids, self._exec_start_s, exec_end_s)
