"""An engine set up to be measured, in this process: the model loaded, prompts that its tokenizer can make."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from roseinfer.bench.experiment import Experiment
from roseinfer.bench.measurement import Bench
from roseinfer.bench.target import InProcessTarget
from roseinfer.bench.workload import WorkloadSource
from roseinfer.model_source import check_model_source
from roseinfer.nvtx import ranges
from roseinfer.sim.cost_model import CostModel

if TYPE_CHECKING:
    from roseinfer.engine import InferenceEngine


def engine_bench(experiment: Experiment) -> Bench:
    """Loads the model. Raises ModelError where that cannot be, InputError for prompts that it cannot serve."""
    return _bench(experiment, _load(experiment))


class OneEngine:
    """`engine_bench` for one experiment after another, of one model: it is loaded for the first of them."""

    def __init__(self) -> None:
        self._engine: InferenceEngine | None = None

    def __call__(self, experiment: Experiment) -> Bench:
        if self._engine is None:
            self._engine = _load(experiment)
        return _bench(experiment, self._engine)


def _load(experiment: Experiment) -> InferenceEngine:
    from roseinfer.engine import InferenceEngine

    options = experiment.options
    ranges(options.nvtx)  # before the model is loaded: that takes its time
    return InferenceEngine.from_pretrained(
        experiment.model,
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        num_threads=options.num_threads,
        paged_attn=options.paged_attn,
        cuda_graph=options.cuda_graph,
    )


def _bench(experiment: Experiment, engine: InferenceEngine) -> Bench:
    source = WorkloadSource(
        experiment,
        engine.make_tokenizer(),
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
    )
    if experiment.options.cost_model is not None:
        source.notes += CostModel.read(experiment.options.cost_model).told_of_fit(engine.description.dtype)
    kind = check_model_source(experiment.model).kind
    model = {**asdict(engine.description), "model": experiment.model_name, "source": str(kind)}
    return Bench(InProcessTarget(engine, experiment), source, model)
