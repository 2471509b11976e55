"""What the routes of one app share: the manager, what it is called, what may be asked of it, and its end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from roseinfer.chat_template import ChatTemplate, plain_chat
from roseinfer.errors import InputError, ManagerClosedError, PromptTooLongError, RequestFailedError
from roseinfer.manager import SchedulerManager
from roseinfer.request import SamplingParams
from roseinfer.server.bodies import BodyLimits
from roseinfer.server.generation import Generation, Generations
from roseinfer.server.metrics import Metrics
from roseinfer.server.refusals import Refusal, refusal_of

LONGEST_STEP_S: Final = 10.0
"""A request is aborted when the step that it is in ends; an engine that takes longer is left behind."""


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
        self._generations: Generations | None = None
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

    def accept(self, prompt: str | Sequence[int], params: SamplingParams, priority: int = 0) -> Generation:
        """Raises what `SchedulerManager.submit` raises, ManagerClosedError while draining as well."""
        if self.draining:
            raise ManagerClosedError("draining")
        if priority and not self.manager.admission.has_lanes:
            raise InputError(
                "priority", priority, "this server has no lanes: it was started without priority"
            )
        # The manager would copy the ids and look at each before it counts them, here in the event loop.
        if not isinstance(prompt, str) and len(prompt) + params.max_new_tokens > self.max_model_len:
            raise PromptTooLongError(len(prompt), params.max_new_tokens, "context", self.max_model_len)
        if self._generations is None or self._generations.loop is not asyncio.get_running_loop():
            self._generations = Generations(self.manager, self.metrics.token_gap)
        return self._generations.open(prompt, params, priority)

    def refusal_of(self, error: Exception) -> Refusal:
        """What to tell the client."""
        cause = error.__cause__ if isinstance(error, RequestFailedError) else None
        return refusal_of(cause or error, draining=self.draining)

    async def drain(self, timeout_s: float) -> None:
        """Takes no more requests, and returns when those that it has are done or, after `timeout_s`, were aborted."""
        self.draining = True
        if not await _finishes(partial(self.manager.close, drain=True), timeout_s):
            await self.close()

    async def close(self) -> None:
        """Aborts what lives. Returns also if the engine hangs and cannot be told."""
        self.draining = True
        await _finishes(self.manager.close, LONGEST_STEP_S)


async def _finishes(function: Callable[[], None], timeout_s: float) -> bool:
    """Whether a blocking function returns in time. If not it is left alone, and does not keep the process."""
    done, loop = asyncio.Event(), asyncio.get_running_loop()

    def run() -> None:
        function()
        try:
            loop.call_soon_threadsafe(done.set)
        except RuntimeError:
            pass  # too late: the loop was closed

    threading.Thread(target=run, name="roseinfer-close", daemon=True).start()
    try:
        await asyncio.wait_for(done.wait(), timeout_s)
    except TimeoutError:
        return False
    return True
