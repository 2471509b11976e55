"""The command `calibrate`. The app of `roseinfer-bench` takes it in."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from roseinfer.bench.engine_sizes import (
    KvCacheTokens,
    MaxBatchSize,
    MaxModelLen,
    MaxNumBatchedTokens,
    engine_sizes,
)
from roseinfer.errors import InputError

if TYPE_CHECKING:
    from roseinfer.bench.hold_out import Trial
    from roseinfer.sim.cost_model import CostModel
    from roseinfer.sim.noise import Noise

calibration: Final = typer.Typer()

FOLDER: Final = Path("results") / "cost_models"


@calibration.command("calibrate")
def calibrate(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs of one engine on one device.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the cost model goes. Default: results/cost_models/<device>-<model>-<dtype>.cost.json; one that"
            " is to be kept with the code belongs in results/reference/cost_models.",
        ),
    ] = None,
    hold_out: Annotated[
        str,
        typer.Option(
            metavar="SHARE|none",
            help="Share of the cells that a first fit goes without, and predicts. The file is fitted to all.",
        ),
    ] = "0.5",
    name: Annotated[
        str | None, typer.Option(help="What reports call the model. Default: model, dtype and device.")
    ] = None,
    max_batch_size: MaxBatchSize = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    kv_cache_tokens: KvCacheTokens = None,
    max_model_len: MaxModelLen = None,
    seed: Annotated[int, typer.Option(min=0, help="Of which cells are held out.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON on stdout instead of the tables.")
    ] = False,
) -> None:
    """Fit a cost model for --target sim to measured steps, and say how well it predicts cells it has not seen."""
    from dataclasses import replace

    from roseinfer.bench import calibration as fitting
    from roseinfer.bench.hold_out import try_out

    share = _share(hold_out)
    sizes = engine_sizes(max_batch_size, max_num_batched_tokens, kv_cache_tokens, max_model_len)
    if sizes is not None and share is None:
        why = "is for predicting what is held out: --hold-out none holds out nothing"
        raise InputError("--max-batch-size", sizes.max_batch_size, why)
    if name is not None and not (name.strip() and name.isprintable()):
        raise InputError("--name", name, "must be a line of text")
    if out is not None and out.is_dir():
        raise InputError("--out", str(out), "is a folder")
    if out is not None and not out.absolute().parent.is_dir():
        raise InputError("--out", str(out), "no such folder")
    measured = [fitting.MeasuredRun.open(path) for path in runs]
    model = fitting.calibrate(measured, name)
    trial = None if share is None else try_out(measured, share, seed, sizes)
    assert model.fitted is not None
    if trial is not None:
        model = replace(model, fitted=replace(model.fitted, held_out=trial.facts()))
    path = out or FOLDER / default_name(measured[0].identity)
    done = "Overwrote" if path.exists() else "Wrote"
    path.parent.mkdir(parents=True, exist_ok=True)
    model.write(path)
    if as_json:
        print(json.dumps(_json(path, model, trial), indent=1, allow_nan=False), flush=True)
    else:
        print("\n".join([*_model_lines(model), "", *_trial_lines(trial)]))
    print(f"{done} {path}, fitted to all cells.", file=sys.stderr if as_json else sys.stdout, flush=True)


def default_name(identity: dict[str, Any]) -> str:
    """The file of a model: kinds of device and model, and nothing about the machine."""
    device = (
        identity["device"] if identity["device"] == "cpu" else identity["device_name"] or identity["server"]
    )
    words = [
        re.sub(r"[^a-z0-9.]+", "-", str(word).lower()).strip("-.")
        for word in (device, identity["model"], identity["dtype"])
        if word is not None  # a server does not say all of it
    ]
    return f"{'-'.join(words)}.cost.json"


def _share(text: str) -> float | None:
    if text == "none":
        return None
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share < 1:
        raise InputError("--hold-out", text, "must be a share of the cells between 0 and 1, or none")
    return share


def _model_lines(model: CostModel) -> Iterator[str]:
    fitted, step, between, submit, noise = (
        model.fitted,
        model.step,
        model.between_steps,
        model.submit,
        model.noise,
    )
    assert fitted is not None
    assert noise is not None
    runs = "1 run" if len(fitted.runs) == 1 else f"{len(fitted.runs)} runs"
    yield f"{model.name}: fitted to {fitted.steps} steps of {runs} on {fitted.device}"
    yield (
        f"  a step: {_time(step.constant_s)}, + {_time(step.prefill_token_s)} a prefill token,"
        f" {_time(step.attention_pair_s)} an attention pair, {_time(step.decode_request_s)} a decode,"
        f" {_time(step.context_token_s)} a token of context"
    )
    unseen = {"attention": step.attention_pair_s, "context": step.context_token_s}
    if names := [name for name, seconds in unseen.items() if not seconds]:
        yield f"  (0 for {' and '.join(names)}: these steps do not tell it apart; longer ones may cost more)"
    stalls = "" if model.between_noise is None else f"; {_stalls(model.between_noise)}"
    yield f"  between steps: {_time(between.constant_s)}, + {_time(between.request_s)} a request{stalls}"
    yield (
        f"  submitting: {_time(submit.request_s)} a request, a refusal {_time(submit.refusal_s)},"
        f" tokenising {_time(submit.token_s)} a token"
    )
    middle = len(noise.ratios) // 2
    tenth = len(noise.ratios) // 10
    yield (
        f"  measured / predicted: p10 {noise.ratios[tenth]:.3f}, median {noise.ratios[middle]:.3f},"
        f" p90 {noise.ratios[-1 - tenth]:.3f}, max {noise.ratios[-1]:.3f};"
        f" {_stalls(noise)}"
    )


def _stalls(noise: Noise) -> str:
    return f"stalls apart: {100 * noise.stall_probability:.2f} % of steps"


def _trial_lines(trial: Trial | None) -> Iterator[str]:
    from roseinfer.bench.hold_out import composition_lines
    from roseinfer.bench.prediction import table, verdict_lines

    if trial is None:
        yield "No cell was held out: how far predictions are off is not known."
        return
    yield f"Held out, and predicted from the other cells (seed {trial.seed}): {', '.join(trial.held_out)}"
    yield ""
    yield table(trial.errors)
    yield ""
    yield from verdict_lines(trial.errors)
    yield ""
    yield from composition_lines(trial.by_composition)
    if trial.outside:
        shares = ", ".join(f"{100 * share:.1f} % in {column}" for column, share in trial.outside.items())
        yield f"Outside the range that the other cells were fitted on: {shares} of the steps."
    yield ""


def _json(path: Path, model: CostModel, trial: Trial | None) -> dict[str, Any]:
    from roseinfer.bench.prediction import to_json

    held_out = None
    if trial is not None:
        held_out = {
            **trial.facts(),
            "errors": to_json(trial.errors),
            "by_composition": trial.by_composition.to_dict("records"),
            "outside": trial.outside,
        }
    return {"file": str(path), "model": model.to_json(), "held_out": held_out}


def _time(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0"
