"""An engine set up to be measured, in this process: the model loaded, prompts that its tokenizer can make."""

from __future__ import annotations

from dataclasses import asdict

from roseinfer.bench.experiment import Experiment
from roseinfer.bench.measurement import Bench
from roseinfer.bench.target import InProcessTarget
from roseinfer.bench.workload import WorkloadSource
from roseinfer.model_source import check_model_source


def engine_bench(experiment: Experiment) -> Bench:
    """Loads the model. Raises ModelError where that cannot be, InputError for prompts that it cannot serve."""
    from roseinfer.engine import InferenceEngine

    options = experiment.options
    engine = InferenceEngine.from_pretrained(
        experiment.model,
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        num_threads=options.num_threads,
        paged_attn=options.paged_attn,
    )
    source = WorkloadSource(
        experiment,
        engine.make_tokenizer(),
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
    )
    kind = check_model_source(experiment.model).kind
    model = {**asdict(engine.description), "model": experiment.model_name, "source": str(kind)}
    return Bench(InProcessTarget(engine, experiment), source, model)
