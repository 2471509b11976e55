"""Experiments from flags, and what measures them in milliseconds: a tokenizer of words, prompts that tell their end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from string import ascii_lowercase
from typing import Any

import numpy as np

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.options import SweepOptions
from roseinfer.bench.workload import Workload
from roseinfer.executor import StepPlan
from roseinfer.prompt import Prompt
from tests.scripted import ScriptedEngine, ScriptedTokenizer

WORDS = [first + second for first, second in product(ascii_lowercase, repeat=2)]


class WordTokenizer(ScriptedTokenizer):
    """A token is a word of two letters."""

    def encode(self, text: str) -> list[int]:
        return [WORDS.index(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(WORDS[token_id] for token_id in ids if token_id < len(WORDS))


def experiment(**flags: Any) -> Experiment:
    """As `sweep` would make it of these flags."""
    return Experiment.from_options(SweepOptions(**flags), flags.keys())


def cell_of(made: Experiment, limit: int | None) -> Cell:
    """The one cell with this limit."""
    (cell,) = [cell for cell in made.cells if cell.admission == AdmissionSpec(limit)]
    return cell


class AllSent:
    """Prompts that set an event once the sender has gone through them, and an engine that waits for it."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.event = threading.Event()
        self.prompts = _Announcing(prompts, self.event)

    def wait(self, plan: StepPlan) -> None:
        """For `ScriptedEngine.compute`: no step ends before the last request was sent."""
        assert self.event.wait(30)


class _Announcing(list[Prompt]):
    def __init__(self, prompts: list[Prompt], event: threading.Event) -> None:
        super().__init__(prompts)
        self._event = event

    def __iter__(self) -> Iterator[Prompt]:
        yield from super().__iter__()
        self._event.set()


def workload(prompts: list[Prompt], *, output_tokens: int = 2, interval_s: float = 0.0) -> Workload:
    """These prompts, all due at once or spaced in time."""
    n = len(prompts)  # and by index below: only the sender may go through prompts that announce their end
    return Workload(
        scheduled_s=np.arange(n, dtype=np.float64) * interval_s,
        prompts=prompts,
        prompt_tokens=np.array([len(prompts[i]) for i in range(n)], np.int64),
        output_tokens=np.full(n, output_tokens, np.int64),
        prompt_seed=0,
        arrival="constant" if interval_s else "burst",
    )


def burst(engine: ScriptedEngine, n: int, *, prompt: Prompt = "hello", output_tokens: int = 2) -> Workload:
    """`n` requests, of which `engine` serves none before all are sent."""
    sent = AllSent([prompt] * n)
    engine.compute = sent.wait
    return workload(sent.prompts, output_tokens=output_tokens)


@dataclass(frozen=True)
class ScriptedDescription:
    """As `EngineDescription`, which cannot be had without torch."""

    model: str = "scripted"
    architecture: str = "none"
    weights: str = "none"
    parameters: int = 0
    context_length: int = 4096
    max_model_len: int = 4096
    device: str = "cpu"
    device_name: str = "nothing"
    dtype: str = "float32"
    num_threads: int = 1
    linear_kernels: str = "plain"
    implementation: str = "native"
    matrix_parameters: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    kv_layout: str = "contiguous"
    attention: str = "SDPA"
    cuda_graph: bool = False


class ScriptedInferenceEngine(ScriptedEngine):
    """Stands for `InferenceEngine`, whatever model is asked for."""

    vocab_size = len(WORDS)

    def __init__(self) -> None:
        super().__init__()
        self.make_tokenizer = WordTokenizer
        self.description = ScriptedDescription()

    @classmethod
    def from_pretrained(cls, model: str, **_: object) -> ScriptedInferenceEngine:
        return cls()
