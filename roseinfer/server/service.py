"""What the routes of one app share: the manager, what it is called, what may be asked of it, and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from roseinfer.chat_template import ChatTemplate, plain_chat
from roseinfer.errors import ManagerClosedError, RequestFailedError
from roseinfer.manager import SchedulerManager
from roseinfer.request import SamplingParams
from roseinfer.server.bodies import BodyLimits
from roseinfer.server.generation import Generation, Generations
from roseinfer.server.metrics import Metrics
from roseinfer.server.refusals import Refusal, refusal_of


class Service:
    """`write_timeout_s`: how long a client may take nothing before its request ends."""

    def __init__(
        self,
        manager: SchedulerManager,
        *,
        model: str,
        max_model_len: int,
        chat_template: ChatTemplate | None,
        limits: BodyLimits,
        write_timeout_s: float,
        log_requests: bool,
    ) -> None:
        self.manager = manager
        self.metrics = Metrics(manager)
        self.generations = Generations(manager, self.metrics.token_gap)
        self.model = model
        self.max_model_len = max_model_len
        self.clock = time.perf_counter  # the manager's
        self.chat_prompt = plain_chat if chat_template is None else chat_template.render
        self.limits = limits
        self.write_timeout_s = write_timeout_s
        self.log_requests = log_requests
        self.draining = False
        self.started_s = int(time.time())

    @property
    def is_alive(self) -> bool:
        """The engine runs, or has ended because it was told to."""
        return self.manager.died_of is None

    @property
    def is_ready(self) -> bool:
        """Requests are taken, as far as there are slots."""
        return self.is_alive and not self.draining

    def accept(self, prompt: str | Sequence[int], params: SamplingParams) -> Generation:
        """Raises what `SchedulerManager.submit` raises, ManagerClosedError while draining as well."""
        if self.draining:
            raise ManagerClosedError("draining")
        return self.generations.open(prompt, params)

    def refusal_of(self, error: Exception) -> Refusal:
        """What to tell the client; counted if it is told to come back."""
        cause = error.__cause__ if isinstance(error, RequestFailedError) else None
        refusal = refusal_of(cause or error, draining=self.draining)
        if refusal.reason is not None:
            self.metrics.refused(refusal.reason)
        return refusal

    async def drain(self, timeout_s: float) -> None:
        """Takes no more requests, and returns when those that it has are done or, after `timeout_s`, were aborted."""
        self.draining = True
        done = asyncio.ensure_future(asyncio.to_thread(partial(self.manager.close, drain=True)))
        await asyncio.wait([done], timeout=timeout_s)
        await asyncio.to_thread(self.manager.close)
        await done
