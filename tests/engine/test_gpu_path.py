"""The path of a GPU, its kernels and graphs replaced: the same tokens as transformers' own generate."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.engine import executor, graphs, varlen
from roseinfer.engine.device import settle_kernels
from roseinfer.engine.engine import InferenceEngine
from roseinfer.engine.graphs import BATCHES, bucket_of, widths_for
from roseinfer.engine.staging import Staged
from roseinfer.engine.varlen import Flash, flash_for
from tests.engine.driver import Driver
from tests.engine.gpu_on_cpu import CPU, GpuEngine, varlen_attn, varlen_attn_of_2_11
from tests.engine.test_greedy import engine_of, prompt_of
from tests.engine.test_prefix_cache import LOOPS, PROMPT, Server, assert_right
from tests.engine.tiny_models import CONFIGS, make_engine

KINDS: dict[str, dict[str, Any]] = {
    "eager": {},
    "FA2": {"flash": "FA2"},
    "FA3": {"flash": "FA3"},
    "graphs": {"graphs": True},
    "graphs FA2": {"graphs": True, "flash": "FA2"},
    "graphs FA3": {"graphs": True, "flash": "FA3"},
}


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(executor, "staging_for", Staged)
    monkeypatch.setattr(graphs, "_FEWEST_BLOCKS", 2)  # so that 8 blocks have three widths


def gpu(family: str = "llama", kind: str = "graphs") -> GpuEngine:
    return GpuEngine(engine_of(family, "native", "paged"), **KINDS[kind])


def server_of(engine: GpuEngine, **sizes: Any) -> Server:
    return Server(cast("InferenceEngine", engine), **sizes)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_cold_then_warm(family: str, kind: str, loop: str) -> None:  # case B1
    server = server_of(gpu(family, kind), budget=128, loop=loop)
    cold, warm, other_end = (
        server.serve(prompt)[0] for prompt in (PROMPT, PROMPT, (*PROMPT[:40], *prompt_of(9, 1)))
    )
    assert [request.cached_tokens for request in (cold, warm, other_end)] == [0, 48, 32]
    assert_right(family, cold, warm, other_end)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [5, 21, 70, 512])
def test_batches_and_chunks(kind: str, budget: int, loop: str) -> None:  # case B19
    server = server_of(gpu(kind=kind), budget=budget, batch=4, loop=loop)
    prompts = [prompt_of(n, n) for n in (3, 16, 17, 30, 33, 64, 1, 90)]
    assert_right("llama", *server.serve(*prompts))
    assert_right("llama", *server.serve(PROMPT, (*PROMPT, 5), PROMPT[:63], PROMPT[:17]))


@settings(max_examples=20)
@given(st.data())
def test_whoever_comes_and_goes(data: st.DataObject) -> None:  # cases B3, B6, B19
    kind = data.draw(st.sampled_from([*KINDS]), label="kind")
    server = server_of(
        gpu(kind=kind),
        budget=data.draw(st.sampled_from([6, 20, 200]), label="budget"),
        batch=data.draw(st.integers(1, 4), label="batch"),
        loop=data.draw(st.sampled_from([*LOOPS]), label="loop"),
    )
    for _ in range(data.draw(st.integers(1, 8), label="requests")):
        server.add(prompt_of(data.draw(st.integers(1, 70), label="prompt"), 3))
        for _ in range(data.draw(st.integers(0, 4), label="steps")):
            server.step()
        if data.draw(st.integers(0, 3), label="abort") == 0:
            server.driver.abort(data.draw(st.sampled_from(server.driver.requests)))
    server.serve()
    assert_right("llama", *[r for r in server.driver.requests if not r.aborted])


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_streams_do_not_depend_on_the_path(kind: str, loop: str) -> None:
    def streams(kind: str, batch: int, loop: str) -> list[list[int]]:
        server = server_of(gpu(kind=kind), budget=64, batch=batch, loop=loop)
        requests = [
            server.add(prompt_of(5 + 9 * n, n), seed=n, temperature=0.5 * n, top_k=10 * (n % 2))
            for n in range(4)
        ]
        server.serve()
        return [request.output_ids for request in requests]

    assert streams(kind, 4, loop) == streams("eager", 1, "plain")


@pytest.mark.parametrize("kind", ["FA2", "FA3"])
def test_a_chunk_in_front_is_no_part_of_what_others_attend_to(kind: str) -> None:
    driver = Driver(cast("InferenceEngine", gpu(kind=kind)))
    chunked, whole = (driver.request(prompt_of(length), max_new_tokens=4) for length in (20, 9))
    driver.step((chunked, 12), whole)
    while len(chunked.output_ids) < 4:
        driver.step(chunked, *[whole] * (len(whole.output_ids) < 4))
    assert_right("llama", chunked, whole)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_packed_spans_with_torch_2_11(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn_of_2_11)
    server = server_of(gpu(family, "FA2"), budget=40, batch=4)
    assert_right(family, *server.serve(PROMPT, PROMPT[:20], PROMPT[:5], prompt_of(33, 1)))


def test_decodes_are_replayed_and_nothing_else_is() -> None:
    engine = gpu()
    server = server_of(engine, budget=512, batch=3)
    server.serve(PROMPT, PROMPT[:20], PROMPT[:5])
    assert engine.replays == [4, 4, 4]  # the first tokens come of the prefill


def test_padding_writes_to_nobodys_block() -> None:
    engine = gpu()
    server = server_of(engine, budget=512, batch=3)
    for prompt in (PROMPT, PROMPT[:20], PROMPT[:5]):
        server.add(prompt)
    server.step()
    before = [tensor.clone() for layer in engine.kv for tensor in layer]
    server.step()
    after = [tensor for layer in engine.kv for tensor in layer]
    for old, new in zip(before, after, strict=True):
        changed = {int(slot) for slot in (old.nan_to_num() != new.nan_to_num()).flatten(1).any(1).nonzero()}
        written = {
            request.block_table[place // 16] * 16 + place % 16
            for request in server.driver.requests
            for place in [request.prompt_len]
        }
        assert changed <= written | {len(new) - 16}
        assert changed >= written


def test_a_batch_beyond_the_largest_is_computed_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "BATCHES", (1, 2))
    engine = gpu()
    server = server_of(engine, budget=512, batch=3)
    assert_right("llama", *server.serve(PROMPT, PROMPT[:20], PROMPT[:5]))
    assert engine.replays == []
    assert_right("llama", *server.serve(PROMPT[:20], PROMPT[:5]))
    assert engine.replays == [2, 2, 2]


def test_a_step_has_the_narrowest_table_that_holds_it() -> None:  # case B19
    engine = gpu()
    driver = Driver(cast("InferenceEngine", engine))
    assert engine.graphs is not None
    for tokens, blocks in ((32, 2), (33, 4), (64, 4), (65, 8), (128, 8)):
        request = driver.request([1] * tokens, max_new_tokens=1)
        request.num_scheduled = tokens - 1
        graph = engine.graphs.graph_of(driver.plan(request))
        assert graph is not None
        assert graph.key == (1, blocks)
        driver.release(request)


def test_warming_up_again_captures_what_is_missing_alone() -> None:
    engine = gpu()
    engine.make_executor(num_kv_blocks=4, max_batch_size=2, clock=lambda: 0.0)
    assert engine.graphs is not None
    assert len(engine.graphs._graphs) == 2 * 3
    graphs_before = {**engine.graphs._graphs}
    engine.graphs.warm_up(3)
    assert len(engine.graphs._graphs) == 3 * 3
    assert graphs_before.items() <= engine.graphs._graphs.items()


def test_tables_that_would_cost_too_much_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_BLOCKS", 8)
    engine = gpu()
    engine.make_executor(num_kv_blocks=4, max_batch_size=4, clock=lambda: 0.0)
    assert engine.graphs is not None
    assert sorted(engine.graphs._graphs) == [(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)]


@pytest.mark.parametrize(
    ("n", "bucket"), [(1, 1), (2, 2), (3, 4), (9, 16), (65, 96), (256, 256), (257, None)]
)
def test_the_smallest_bucket_that_holds_it(n: int, bucket: int | None) -> None:
    assert bucket_of(n, BATCHES) == bucket


@pytest.mark.parametrize(
    ("max_blocks", "flash", "widths"),
    [(64, None, (8, 16, 32, 64)), (63, "FA2", (8, 16, 32, 63)), (3, None, (3,)), (64, "FA3", (64,))],
)
def test_widths_of_block_tables(
    max_blocks: int, flash: Flash | None, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_FEWEST_BLOCKS", 8)
    assert widths_for(max_blocks, flash) == widths


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> InferenceEngine:
    """An engine that believes it is on a GPU."""
    engine = make_engine(CONFIGS["llama"], paged_attn=True)
    monkeypatch.setattr(engine, "_uses_graphs", True)
    monkeypatch.setattr(engine._kv, "_spare_blocks", 1)
    stand_in = GpuEngine(engine)
    monkeypatch.setattr(graphs, "_capture_in_pool", lambda: stand_in._capture)
    return engine


def test_an_executor_of_the_same_size_finds_the_graphs_of_the_last_one(graphed: InferenceEngine) -> None:
    last = Driver(graphed).executor._graphs
    assert last is not None
    assert Driver(graphed).executor._graphs is last
    assert Driver(graphed, num_blocks=5).executor._graphs is not last


def test_two_living_executors_share_no_graphs(graphed: InferenceEngine) -> None:
    one, other = Driver(graphed), Driver(graphed)
    assert one.executor._graphs is not other.executor._graphs
    requests = [driver.request(PROMPT, max_new_tokens=4) for driver in (one, other)]
    for _ in range(4):
        for driver, request in zip((one, other), requests, strict=True):
            driver.step(request)
    assert_right("llama", *requests)


def test_an_engine_with_graphs_gives_one_block_to_nobody(graphed: InferenceEngine) -> None:
    assert Driver(graphed, num_blocks=5).executor._kv[0][0].shape[0] == 6 * 16


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("llama", {}, "needs a GPU"),
        ("llama", {"on": "cuda", "paged_attn": False}, "needs the paged layout"),
        ("llama", {"on": "cuda", "native": False}, "needs a model with a native form"),
    ],
)
def test_graphs_that_cannot_be_are_refused(family: str, options: dict[str, Any], why: str) -> None:
    options = {"on": "cpu", "paged_attn": True, "native": True, **options}
    engine = make_engine(CONFIGS[family], native=options["native"], paged_attn=options["paged_attn"])
    engine._device = torch.device(options["on"])
    said = engine._why_no_graphs(engine.description.implementation)
    assert said is not None
    assert said.startswith(why)


# Lines that need a GPU, with a recorder in its place.


class FakeCuda:
    """Writes down what is asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        fake, empty = self, torch.empty

        class Graph:
            def replay(self) -> None:
                fake.done.append("replay")

        class Capturing:
            def __init__(self, graph: Graph, *, pool: str, capture_error_mode: str) -> None:
                assert isinstance(graph, Graph)
                assert (pool, capture_error_mode) == ("the pool", "thread_local")

            def __enter__(self) -> None:
                fake.done.append("capture")

            def __exit__(self, *error: object) -> None:
                fake.done.append("captured")

        class Event:
            def record(self) -> None:
                fake.done.append("record")

            def synchronize(self) -> None:
                fake.done.append("synchronize")

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", Capturing)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")

        def unpinned(*sizes: Any, pin_memory: bool = False, **rest: Any) -> torch.Tensor:
            return empty(*sizes, **rest)

        monkeypatch.setattr(torch, "empty", unpinned)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with monkeypatch.context() as patch:
        yield FakeCuda(patch)


def test_a_step_is_computed_once_before_it_is_captured(cuda: FakeCuda) -> None:
    def compute() -> torch.Tensor:
        cuda.done.append("compute" if gc.isenabled() else "compute without collections")
        return torch.ones(1)

    replay, logits = graphs._capture_in_pool()(compute)
    assert gc.isenabled()
    replay()
    assert cuda.done == ["compute", "capture", "compute without collections", "captured", "replay"]
    assert logits.tolist() == [1]


def test_a_step_ends_when_its_ids_are_on_the_host_and_begins_behind_the_one_before(cuda: FakeCuda) -> None:
    driver = Driver(cast("InferenceEngine", gpu(kind="eager")))
    plan = driver.plan(driver.request([1, 2, 3]))
    first, second = (
        driver.executor._left_running(plan, torch.tensor([token_id]), launch_s)
        for token_id, launch_s in ((7, -2.0), (8, -1.0))
    )
    assert cuda.done == ["record", "record"]
    assert first.wait() == ([7], -2.0, 0.0)  # the driver's clock ticks from 0
    assert second.wait() == ([8], 0.0, 1.0)
    assert cuda.done[2:] == ["synchronize", "synchronize"]


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dims", "flash"),
    [
        ((9, 0), torch.bfloat16, [(64, 64)], "FA2"),  # no FA3 is installed
        ((8, 0), torch.float16, [(128, 128)], "FA2"),
        ((7, 5), torch.float16, [(64, 64)], None),
        ((9, 0), torch.float32, [(64, 64)], None),
        ((9, 0), torch.bfloat16, [(64, 64), (60, 60)], None),
        ((9, 0), torch.bfloat16, [(64, 128)], None),
        ((9, 0), torch.bfloat16, [(512, 512)], None),
    ],
)
def test_kernels_are_chosen_by_gpu_dtype_and_size(
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dims: list[tuple[int, int]],
    flash: Flash | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(varlen, "find_spec", lambda name: None)
    assert flash_for(torch.device("cuda"), dtype, head_dims) == flash
    assert flash_for(CPU, dtype, head_dims) is None


def test_fa3_is_taken_where_it_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert flash_for(torch.device("cuda"), torch.bfloat16, [(64, 64)]) == "FA3"


def test_torch_2_11_has_fa2_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn_of_2_11)
    assert flash_for(torch.device("cuda"), torch.bfloat16, [(64, 64)]) == "FA2"
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, is_causal: query)
    assert flash_for(torch.device("cuda"), torch.bfloat16, [(64, 64)]) is None


@pytest.mark.parametrize(("device", "stays"), [("cpu", True), ("cuda", False)])
def test_cudnn_plans_no_attention_on_a_gpu(device: str, stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", said.append)
    settle_kernels(torch.device(device))
    assert said == ([] if stays else [False])


def test_an_engine_settles_the_kernels_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr("roseinfer.engine.engine.settle_kernels", devices.append)
    make_engine(CONFIGS["llama"])
    assert devices == [CPU]


@pytest.mark.parametrize("stand_in", [varlen_attn, varlen_attn_of_2_11])
def test_the_stand_in_takes_what_torch_takes(stand_in: Any) -> None:
    import inspect

    from torch.nn.attention.varlen import varlen_attn as of_torch

    theirs = inspect.signature(of_torch).parameters
    for name, parameter in inspect.signature(stand_in).parameters.items():
        assert theirs[name].kind == parameter.kind
