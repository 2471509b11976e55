"""A cost model fitted to measured runs: what steps took, what lay between them, and what submitting cost.

Only consecutive steps say what lies between steps, and only where there was work all along: requests waited when the
first was planned, or the second decodes, so that its requests ran before. Otherwise the engine may have waited for
work.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from roseinfer.bench.observed_steps import observed_steps
from roseinfer.bench.records import FACTORS, HTTP
from roseinfer.bench.robust_fit import RobustFit, robust_fit
from roseinfer.bench.store import RunFolder
from roseinfer.errors import InputError
from roseinfer.sim.cost_model import (
    COMPOSITION,
    BetweenStepsCost,
    CostModel,
    Fitted,
    StepCost,
    SubmitCost,
)
from roseinfer.sim.noise import Noise

QUANTILES: Final = 101
LEAST_OWN_SHARE: Final = 0.01
"""What of a column's sum of squares the others must leave open: one over its variance inflation factor."""

_DIGITS: Final = 6
_IDENTITY: Final = ("model", "dtype", "device", "device_name", "num_threads", "server")
"""What of a run's model decides how long its steps take."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run to fit to, or some of its cells. `steps` has `step_s` and `between_s` (NaN where not known) beside."""

    folder: RunFolder
    requests: pd.DataFrame
    steps: pd.DataFrame

    @classmethod
    def open(cls, path: Path) -> MeasuredRun:
        """Raises InputError("RUN", path, ...) where there are no measured steps."""
        folder = RunFolder.open(path)
        if folder.manifest.get("target") == "sim":
            raise InputError("RUN", str(path), "is a simulated run; a cost model is fitted to measured steps")
        requests = folder.read_requests()
        if requests.empty:
            raise InputError("RUN", str(path), "has no rows: nothing was measured")
        if folder.manifest.get("target") == HTTP:
            steps = observed_steps(requests)
            why = "has no steps, and its server did not say how many tokens prompts have, or answered none"
        else:
            steps = folder.read_steps()
            why = "has no steps: nothing was computed"
        if steps.empty:
            raise InputError("RUN", str(path), why)
        return cls(folder, requests, _with_durations(steps))

    def only(self, cells: Collection[str]) -> MeasuredRun:
        """The run as if it had these cells alone."""
        requests, steps = (frame[frame["cell_id"].isin(cells)] for frame in (self.requests, self.steps))
        return replace(self, requests=requests, steps=steps)

    def cells(self) -> pd.DataFrame:
        """`cell_id` and the factors, a row per cell in the order of the run."""
        return self.requests[["cell_id", *FACTORS]].drop_duplicates("cell_id", ignore_index=True)

    @property
    def is_remote(self) -> bool:
        """Only a client's view: steps are guessed from deliveries, and whoever submits does not wait for the server."""
        return bool(self.folder.manifest.get("target") == HTTP)

    @property
    def identity(self) -> dict[str, Any]:
        """What computed, as far as it decides how fast."""
        model = self.folder.manifest["model"]
        return {key: model.get(key) for key in _IDENTITY}


def calibrate(runs: Sequence[MeasuredRun], name: str | None = None) -> CostModel:
    """The model of these runs, all of one engine on one device.

    Raises InputError("RUN", ...) for runs of different ones.
    """
    _check_alike(runs)
    steps = pd.concat([run.steps for run in runs])
    steps = steps[steps["step_s"] > 0]
    if steps.empty:
        raise InputError("RUN", str(runs[0].folder.path), "no step of its cells was measured")
    step_s = steps["step_s"].to_numpy()
    step = robust_fit(_told_apart(_columns(steps, COMPOSITION), step_s), step_s)
    identity = runs[0].identity
    between_steps, between_noise = _between_steps(steps)
    return CostModel(
        name=name or f"{_words(identity, 'model', 'dtype', 'device')}, calibrated",
        step=StepCost(*_rounded(step.coefficients)),
        between_steps=between_steps,
        submit=submit_cost(runs),
        noise=_noise(step, step_s),
        between_noise=between_noise,
        fitted=Fitted(
            runs=tuple(run.folder.run_id for run in runs),
            steps=len(steps),
            range={
                column: (float(steps[column].min()), float(steps[column].max())) for column in COMPOSITION
            },
            device=_device_text(identity),
            model=identity["model"],
            dtype=identity["dtype"],
        ),
    )


def predicted_step_s(model: CostModel, steps: pd.DataFrame) -> NDArray[np.float64]:
    """What steps of these compositions take, without noise: float64[rows]."""
    cost = model.step
    coefficients = [
        cost.constant_s,
        cost.prefill_token_s,
        cost.attention_pair_s,
        cost.decode_request_s,
        cost.context_token_s,
    ]
    seconds: NDArray[np.float64] = _columns(steps, COMPOSITION) @ np.array(coefficients)
    return seconds


def submit_cost(runs: Sequence[MeasuredRun]) -> SubmitCost:
    """Seconds of the sender and of a tokenise worker. What no run shows is 0.

    Of a server, all that is known is how quickly its client sends one after another: a burst does not come at once.
    Else the sender: sent to admitted, per request and, where it tokenises, per token; the median of sent to rejected.
    A worker: tokenised, less when it could begin, by the median over requests: prompts are taken in their order.
    """
    if runs[0].is_remote:
        send_s = _median(pd.concat([_between_sends_s(run.requests) for run in runs]))
        return SubmitCost(request_s=send_s, refusal_s=send_s)
    requests = pd.concat([_with_tokenising(run) for run in runs])
    admitted = requests[requests["admitted_s"].notna()]
    tokens_and_s = np.column_stack([admitted["caller_tokens"], admitted["admitted_s"] - admitted["sent_s"]])
    tokens_and_s = tokens_and_s[tokens_and_s[:, 1] > 0]
    request_s = token_s = 0.0
    if tokens_and_s[:, 0].any():
        columns = np.column_stack([np.ones(len(tokens_and_s)), tokens_and_s[:, 0]])
        request_s, token_s = _rounded(robust_fit(columns, tokens_and_s[:, 1]).coefficients)
    elif len(tokens_and_s):
        request_s = _median(tokens_and_s[:, 1])
    in_worker = requests[requests["worker_s"] > 0]
    if len(in_worker):
        token_s = _median(in_worker["worker_s"] / in_worker["prompt_tokens"])
    refused = requests[requests["reject_stage"] == "submit"]
    return SubmitCost(request_s, token_s, _median(refused["rejected_s"] - refused["sent_s"]))


def _with_durations(steps: pd.DataFrame) -> pd.DataFrame:
    ordered = steps.sort_values(["cell_id", "repeat", "step"], kind="stable", ignore_index=True)
    following = ordered.shift(-1)
    has_next = (
        (following["cell_id"] == ordered["cell_id"])
        & (following["repeat"] == ordered["repeat"])
        & (following["step"] == ordered["step"] + 1)
    )
    had_work = (ordered["waiting"] > 0) | (following["decode_requests"] > 0)
    between_s = (following["exec_start_s"] - ordered["exec_end_s"]).where(has_next & had_work)
    return ordered.assign(step_s=ordered["exec_end_s"] - ordered["exec_start_s"], between_s=between_s)


def _between_sends_s(requests: pd.DataFrame) -> pd.Series[float]:
    """From one sending to the next, of requests that were due at once."""
    sent = requests[requests["sent_s"].notna()].sort_values(["cell_id", "repeat", "sent_s"])
    same = ["cell_id", "repeat", "scheduled_s"]
    return sent.groupby(same, observed=True)["sent_s"].diff().dropna()


def _with_tokenising(run: MeasuredRun) -> pd.DataFrame:
    """The requests with `caller_tokens`, tokenised before add_request returned, and `worker_s`, a worker's time."""
    configuration = run.folder.manifest["configuration"]
    workers = 0 if configuration.get("pretok") else int(configuration.get("tokenize-workers") or 0)
    requests = run.requests
    if not workers:
        is_text = requests["tokenized_s"].notna()
        return requests.assign(caller_tokens=requests["prompt_tokens"].where(is_text, 0), worker_s=np.nan)
    parts = []
    for _, cell in requests.groupby(["cell_id", "repeat"], sort=False):
        texts = cell[cell["tokenized_s"].notna()].sort_values("reserved_s")
        # A worker is free for this prompt once all but workers - 1 of those before it are done.
        free_s = pd.Series(np.sort(texts["tokenized_s"].to_numpy()), texts.index).shift(workers)
        began_s = pd.concat([texts["reserved_s"], free_s], axis=1).max(axis=1)
        parts.append((texts["tokenized_s"] - began_s).reindex(cell.index))
    return requests.assign(caller_tokens=0, worker_s=pd.concat(parts))


def _between_steps(steps: pd.DataFrame) -> tuple[BetweenStepsCost, Noise | None]:
    known = steps[steps["between_s"] > 0]
    if known.empty:
        return BetweenStepsCost(), None
    requests = known["prefill_requests"] + known["decode_requests"]
    between_s = known["between_s"].to_numpy()
    fit = robust_fit(_columns(known.assign(requests=requests), ("requests",)), between_s)
    return BetweenStepsCost(*_rounded(fit.coefficients)), _noise(fit, between_s)


def _noise(fit: RobustFit, seconds: NDArray[np.float64]) -> Noise:
    excess_s = seconds[fit.stalled] * (1 - 1 / fit.ratios[fit.stalled])
    if excess_s.size > QUANTILES:
        excess_s = np.quantile(excess_s, np.linspace(0, 1, QUANTILES))
    return Noise(
        ratios=_rounded(np.quantile(fit.ratios[~fit.stalled], np.linspace(0, 1, QUANTILES))),
        stall_probability=_rounded([fit.stalled.mean()])[0],
        stalls_s=_rounded(np.sort(excess_s)),
    )


def _told_apart(columns: NDArray[np.float64], step_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """The columns of ones and COMPOSITION, with zeros for what these steps do not tell apart from the others.

    Where all prompts have one length, attention pairs say what prefill tokens say, and so does context with decodes:
    the fit would give either the other's time, which is wrong for every other length.
    """
    columns = columns.copy()
    weighted = columns / step_s[:, None]
    for name in ("prefill_attention_pairs", "context_tokens"):
        place = 1 + COMPOSITION.index(name)
        others = np.delete(weighted, place, axis=1)
        sizes = np.linalg.norm(others, axis=0)
        others = others[:, sizes > 0] / sizes[sizes > 0]
        left = weighted[:, place] - others @ np.linalg.lstsq(others, weighted[:, place], rcond=None)[0]
        if left @ left < LEAST_OWN_SHARE * (weighted[:, place] @ weighted[:, place]):
            columns[:, place] = weighted[:, place] = 0
    return columns


def _columns(frame: pd.DataFrame, names: Sequence[str]) -> NDArray[np.float64]:
    """A column of ones and these: float64[rows, 1 + names]."""
    return np.column_stack([np.ones(len(frame)), *(frame[name].to_numpy(np.float64) for name in names)])


def _check_alike(runs: Sequence[MeasuredRun]) -> None:
    first = runs[0].identity
    for run in runs[1:]:
        if other := [f"{key} {value}" for key, value in run.identity.items() if value != first[key]]:
            why = f"has {', '.join(other)}, unlike {runs[0].folder.path.name}: a cost model is of one engine"
            raise InputError("RUN", str(run.folder.path), why)


def _device_text(identity: dict[str, Any]) -> str | None:
    if identity["device"] != "cpu":
        place = identity["device_name"] or identity["server"] or identity["device"]
        return None if place is None else str(place)
    return "cpu ({device_name}, {num_threads} threads)".format(**identity)


def _words(identity: dict[str, Any], *keys: str) -> str:
    """A server does not say all of it."""
    return " ".join(str(identity[key]) for key in keys if identity[key] is not None)


def _median(seconds: Any) -> float:
    """0 of nothing: there is nothing to pay for."""
    return _rounded([np.median(seconds)])[0] if len(seconds) else 0.0


def _rounded(values: Any) -> tuple[float, ...]:
    """For a file that people read: fewer digits than any fit is sure of would still be many."""
    return tuple(float(f"{value:.{_DIGITS}g}") for value in values)
