"""An engine without a model: scripted durations, so that tests of order and concurrency take milliseconds."""

from __future__ import annotations

from collections.abc import Callable

from roseinfer.executor import Clock, StepPlan, StepResult


class FakeClock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ScriptedTokenizer:
    """A token is a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def new_decoder(self) -> ScriptedDecoder:
        return ScriptedDecoder()


class ScriptedDecoder:
    def step(self, token_id: int) -> str:
        return chr(token_id)

    def finish(self) -> str:
        return ""


class ScriptedEngine:
    """`compute(plan)` is the step: it may pass time, wait for something, or raise.

    The n-th output token of a request is `script[n % len(script)]`, by default the letters of "abc...".
    """

    max_model_len = 4096
    vocab_size = 0x110000
    eos_token_ids = frozenset({0})

    def __init__(
        self, compute: Callable[[StepPlan], None] = lambda plan: None, script: str = "abcdefghijklmnopqrstuvwxyz"
    ) -> None:
        self.compute = compute
        self.script = script
        self.plans: list[list[tuple[int, int, int]]] = []  # (request_id, start, n_tokens) of each step
        self.clock: Clock = FakeClock()
        self.make_tokenizer: Callable[[], ScriptedTokenizer] = ScriptedTokenizer

    def default_num_batched_tokens(self, max_batch_size: int) -> int:
        return max_batch_size + 256

    def default_kv_cache_tokens(self, max_batch_size: int) -> int:
        return 1 << 16

    def make_executor(self, *, num_kv_blocks: int, max_batch_size: int, clock: Clock) -> ScriptedEngine:
        self.clock = clock
        return self

    def launch(self, plan: StepPlan) -> ScriptedHandle:
        return ScriptedHandle(self, plan)


class ScriptedHandle:
    def __init__(self, engine: ScriptedEngine, plan: StepPlan) -> None:
        self.engine = engine
        self.plan = plan

    def wait(self) -> StepResult:
        engine, start = self.engine, self.engine.clock()
        engine.plans.append([(s.request.request_id, s.start, s.n_tokens) for s in self.plan.spans])
        engine.compute(self.plan)
        ids: list[int | None] = [
            ord(engine.script[len(span.request.output_ids) % len(engine.script)]) if span.samples else None
            for span in self.plan.spans
        ]
        return StepResult(ids, start, engine.clock())
