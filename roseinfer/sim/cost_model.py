"""What the simulated engine's time goes to: a few seconds a unit of work, and the noise around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from roseinfer.executor import StepPlan
from roseinfer.sim.cost_file import CostFile
from roseinfer.sim.noise import Noise, NoiseOfRun

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION: Final = 1

LARGEST_RATIO: Final = 1e6
LARGEST_COUNT: Final = 1e18
"""What a file may hold: more is no measurement."""

COMPOSITION: Final = ("prefill_tokens", "prefill_attention_pairs", "decode_requests", "context_tokens")
"""The columns of steps.parquet that say what a step computes."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds that a step computes: `constant_s`, and so much more per unit of each column of COMPOSITION."""

    constant_s: float
    prefill_token_s: float
    attention_pair_s: float
    decode_request_s: float
    context_token_s: float

    def seconds(self, plan: StepPlan) -> float:
        """How long the step computes: sums and products in a fixed order, equal on every machine."""
        _, prefill_tokens, attention_pairs, decode_requests, context_tokens, _ = plan.composition()
        return (
            self.constant_s
            + self.prefill_token_s * prefill_tokens
            + self.attention_pair_s * attention_pairs
            + self.decode_request_s * decode_requests
            + self.context_token_s * context_tokens
        )


@dataclass(frozen=True, slots=True)
class BetweenStepsCost:
    """Seconds from the end of a step's computation to the next step: publish, deliver, plan; `request_s` per span."""

    constant_s: float = 0.0
    request_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SubmitCost:
    """Seconds of whoever submits: per admitted request and per refused one.

    `token_s` is the time to tokenise one token of a text prompt, spent by the caller or by a worker.
    """

    request_s: float = 0.0
    token_s: float = 0.0
    refusal_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a model was fitted on. `range` holds the least and the largest of each column of COMPOSITION.

    `held_out`: what became of a trial on cells that the trial's fit had not seen, None where there was none. The
    numbers of the model itself come from all cells.
    """

    runs: tuple[str, ...]
    steps: int
    range: dict[str, tuple[float, float]]
    device: str | None
    model: str | None
    dtype: str | None
    held_out: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds that an engine's work takes. `name` is what reports call it.

    `noise` is that of steps, `between_noise` that of the time between them; without it it is always the same seconds.
    """

    name: str
    step: StepCost
    between_steps: BetweenStepsCost = field(default_factory=BetweenStepsCost)
    submit: SubmitCost = field(default_factory=SubmitCost)
    noise: Noise | None = None
    fitted: Fitted | None = None
    between_noise: Noise | None = None

    @classmethod
    def read(cls, path: Path) -> CostModel:
        """The model in a JSON file, as `write` writes it.

        Raises InputError("--cost-model", ...) for a file that cannot be read or is no such JSON, another schema
        version, unknown or missing keys, and numbers that are negative, not finite, or too large.
        """
        file = CostFile(path)
        values = file.read(SCHEMA_VERSION)
        known = ("schema_version", *(one.name for one in fields(cls)))
        file.group("", values, known, optional=_OPTIONAL)
        name = file.text("name", values["name"])
        step = _cost(file, "step", values["step"], StepCost, optional=False)
        if not any(asdict(step).values()):
            raise file.wrong("says that every step takes no time at all")
        return cls(
            name,
            step,
            _cost(file, "between_steps", values.get("between_steps", {}), BetweenStepsCost, optional=True),
            _cost(file, "submit", values.get("submit", {}), SubmitCost, optional=True),
            _noise(file, "noise", values.get("noise")),
            _fitted(file, values.get("fitted")),
            _noise(file, "between_noise", values.get("between_noise")),
        )

    def write(self, path: Path) -> None:
        """Saves the model, all or nothing. Raises OSError where the disk does not take it."""
        CostFile(path).write(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The model as its file and run.json hold it."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    def step_seconds(self, plan: StepPlan) -> float:
        """How long the step computes, without noise."""
        return self.step.seconds(plan)

    def told_of_fit(self, dtype: str) -> list[str]:
        """A note where it was fitted to steps in another dtype than an engine has."""
        fitted = None if self.fitted is None else self.fitted.dtype
        if fitted in (None, dtype):
            return []
        return [
            f"the cost model was fitted to {fitted}; this engine has {dtype}, whose steps take other times"
        ]

    def in_the_mean(self) -> CostModel:
        """The model without noise whose every step takes what such a step of this one takes in the mean."""
        return replace(
            self,
            step=_in_the_mean(self.step, self.noise),
            between_steps=_in_the_mean(self.between_steps, self.between_noise),
            noise=None,
            between_noise=None,
        )

    def costs(self, seed: int, *, as_text: bool, tokenize_workers: int = 0) -> RunCosts:
        """The costs of one simulated run, which have to be asked for its steps in their order.

        `as_text`: prompts have to be tokenised, by the caller or, if there are any, by `tokenize_workers`.
        """
        return RunCosts(self, seed, as_text=as_text, in_worker=tokenize_workers > 0)

    def outside(self, compositions: pd.DataFrame) -> dict[str, float]:
        """The share of steps (rows with the columns of COMPOSITION) outside of what was fitted, by column.

        Empty where the model was not fitted, or nothing lies outside.
        """
        if self.fitted is None or compositions.empty:
            return {}
        outside = {
            column: float(((compositions[column] < least) | (compositions[column] > most)).mean())
            for column, (least, most) in self.fitted.range.items()
        }
        return {column: share for column, share in outside.items() if share > 0}


class OutsideFitted:
    """Counts the steps of a simulation that lie outside of what its model was fitted to, by column of COMPOSITION."""

    def __init__(self, fitted: Fitted) -> None:
        self._bounds = [(column, *fitted.range[column]) for column in COMPOSITION]
        self._n_steps = self._n_outside = 0
        self._by_column = dict.fromkeys(COMPOSITION, 0)

    def add(self, values: Iterable[float]) -> None:
        """A step, by its values of COMPOSITION."""
        self._n_steps += 1
        is_outside = False
        for (column, least, most), value in zip(self._bounds, values, strict=True):
            if not least <= value <= most:
                self._by_column[column] += 1
                is_outside = True
        self._n_outside += is_outside

    def facts(self) -> dict[str, Any]:
        """`steps`, the `share` of them outside in any column, and that of each column in which some are."""
        n = self._n_steps or 1
        by_column = {column: count / n for column, count in self._by_column.items() if count}
        return {"steps": self._n_steps, "share": self._n_outside / n, "by_column": by_column}


class RunCosts:
    """The costs of one simulated run."""

    def __init__(self, model: CostModel, seed: int, *, as_text: bool, in_worker: bool) -> None:
        self._step_seconds = model.step.seconds
        self._between_steps = model.between_steps
        self._noise = None if model.noise is None else NoiseOfRun(model.noise, seed)
        self._between_noise = (
            None if model.between_noise is None else NoiseOfRun(model.between_noise, seed, stream=1)
        )
        self._n_steps = self._n_between = 0
        self._submit_request_s = model.submit.request_s
        self._submit_token_s = model.submit.token_s if as_text and not in_worker else 0.0
        self._worker_token_s = model.submit.token_s if as_text and in_worker else 0.0
        self.refuse_seconds = model.submit.refusal_s

    def step_seconds(self, plan: StepPlan) -> float:
        """How long the next step of the run computes, noise included."""
        seconds = self._step_seconds(plan)
        if self._noise is not None:
            seconds = self._noise.seconds(self._n_steps, seconds)
            self._n_steps += 1
        return seconds

    def between_seconds(self, plan: StepPlan) -> float:
        """From the end of this step's computation to the next step, noise included."""
        seconds = self._between_steps.constant_s + self._between_steps.request_s * len(plan.spans)
        if self._between_noise is not None:
            seconds = self._between_noise.seconds(self._n_between, seconds)
            self._n_between += 1
        return seconds

    def submit_seconds(self, prompt_tokens: int) -> float:
        """What submitting takes of the sender's time."""
        return self._submit_request_s + self._submit_token_s * prompt_tokens

    def tokenize_seconds(self, prompt_tokens: int) -> float:
        """What tokenising takes in a worker; 0 where none does it."""
        return self._worker_token_s * prompt_tokens


_OPTIONAL: Final = ("between_steps", "submit", "noise", "between_noise", "fitted")

Cost = TypeVar("Cost", StepCost, BetweenStepsCost, SubmitCost)
NoisyCost = TypeVar("NoisyCost", StepCost, BetweenStepsCost)


def _in_the_mean(cost: NoisyCost, noise: Noise | None) -> NoisyCost:
    if noise is None:
        return cost
    ratio, stall_s = noise.mean()
    cost = replace(cost, **{name: ratio * seconds for name, seconds in asdict(cost).items()})
    return replace(cost, constant_s=cost.constant_s + stall_s)


def _cost(file: CostFile, name: str, values: object, kind: type[Cost], *, optional: bool) -> Cost:
    """A group of coefficients; what lacks has its default."""
    names = [one.name for one in fields(kind)]
    values = file.group(name, values, names, optional=names if optional else ())
    return kind(**{key: file.seconds(f"{name}.{key}", value) for key, value in values.items()})


def _noise(file: CostFile, name: str, values: object) -> Noise | None:
    if values is None:
        return None
    values = file.group(name, values, [one.name for one in fields(Noise)])
    ratios = [file.number(*item, LARGEST_RATIO) for item in file.items(f"{name}.ratios", values["ratios"])]
    if not ratios or ratios[0] == 0 or any(a > b for a, b in pairwise(ratios)):
        raise file.wrong(f"{name}.ratios must be numbers above 0, ascending")
    probability = file.number(f"{name}.stall_probability", values["stall_probability"], 1)
    stalls_s = [file.seconds(*item) for item in file.items(f"{name}.stalls_s", values["stalls_s"])]
    if probability and not stalls_s:
        raise file.wrong(f"{name}.stall_probability {probability:g} needs {name}.stalls_s")
    return Noise(tuple(ratios), probability, tuple(stalls_s))


def _fitted(file: CostFile, values: object) -> Fitted | None:
    if values is None:
        return None
    values = file.group("fitted", values, [one.name for one in fields(Fitted)], optional=("held_out",))
    bounds = {}
    for column, pair in file.group("fitted.range", values["range"], COMPOSITION).items():
        name = f"fitted.range.{column}"
        numbers = [file.number(*item, LARGEST_COUNT) for item in file.items(name, pair)]
        if len(numbers) != 2 or numbers[0] > numbers[1]:
            raise file.wrong(f"{name} must be the least and the largest")
        bounds[column] = (numbers[0], numbers[1])
    held_out = values.get("held_out")
    return Fitted(
        runs=tuple(file.text(*item) for item in file.items("fitted.runs", values["runs"])),
        steps=int(file.number("fitted.steps", values["steps"], LARGEST_COUNT)),
        range=bounds,
        **{
            key: None if values[key] is None else file.text(f"fitted.{key}", values[key])
            for key in ("device", "model", "dtype")
        },
        held_out=None if held_out is None else file.group("fitted.held_out", held_out, held_out),
    )
