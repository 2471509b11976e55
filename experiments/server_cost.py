"""What HTTP adds to the time to first token, beside 64 steady streams.

A scripted engine (every step takes the same time, no model) behind the real server, in a process of its own; the
client is another process, one thread over epoll. A probe's TTFT as its client saw it, less the engine's own share of it
(queue + prefill, from `timings`), is what getting in and out costs. The same probe beside the same streams without HTTP
(an event loop in the manager's process) has that cost as well: HTTP adds the difference of the medians. Bar: under 2 ms
on 2 cores. Then bursts: what it takes until the last of those let in has its first token, beyond the engine's share,
and until the last refusal has come.

    python experiments/server_cost.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

from roseinfer.executor import Clock, StepPlan, StepResult
from roseinfer.manager import SchedulerManager
from roseinfer.request import SamplingParams
from roseinfer.server.app import create_app
from roseinfer.server.process import listen, serve
from roseinfer.stream import RequestStream
from roseinfer.tokenization import FastTokenizer, builtin_tokenizer

LIMIT = 65
STREAMS = 64
PROMPT = "Hello" * 32
LETTER = 300
"""An id of the built-in vocabulary that has text."""


class SteadyEngine:
    """Steps of one length, whatever is in them."""

    max_model_len = 1 << 20
    vocab_size = 50257
    eos_token_ids: frozenset[int] = frozenset()
    paged_attn = False
    launches_async = False

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.clock: Clock = time.perf_counter
        self._tokenizer = builtin_tokenizer()

    def default_num_batched_tokens(self, max_batch_size: int) -> int:
        return 1 << 16

    def default_kv_cache_tokens(self, max_batch_size: int) -> int:
        return 1 << 23

    def make_tokenizer(self) -> FastTokenizer:
        return self._tokenizer.clone()

    def make_executor(self, *, num_kv_blocks: int, max_batch_size: int, clock: Clock) -> SteadyEngine:
        self.clock = clock
        return self

    def launch(self, plan: StepPlan) -> SteadyStep:
        return SteadyStep(self, plan)


class SteadyStep:
    def __init__(self, engine: SteadyEngine, plan: StepPlan) -> None:
        self._engine = engine
        self._plan = plan

    def wait(self) -> StepResult:
        start_s = self._engine.clock()
        time.sleep(self._engine.step_s)
        ids: list[int | None] = [LETTER if span.samples else None for span in self._plan.spans]
        return StepResult(ids, start_s, self._engine.clock())


def run_server(step_s: float, ready: Connection) -> None:
    app = create_app(SteadyEngine(step_s), max_inflight_requests=LIMIT, max_batch_size=LIMIT)
    sock = listen("127.0.0.1", 0, 30.0)
    ready.send(sock.getsockname())
    sock.listen(1024)
    serve(app, sock, drain_timeout_s=0.1)


class Exchange:
    """A request that was sent, and what came of its answer."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.start()

    def start(self) -> None:
        self.sent_s = 0.0
        self.first_s: float | None = None
        self.ended_s: float | None = None
        self.received = b""

    def send(self, max_tokens: int) -> None:
        self.start()
        body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        content = json.dumps({**body, "ignore_eos": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(content)}"
        self.sent_s = time.perf_counter()
        self.socket.sendall(head.encode() + b"\r\n\r\n" + content)

    def read(self, *, keep: bool) -> None:
        data = self.socket.recv(1 << 16)
        now = time.perf_counter()
        if not keep:
            self.first_s = now
            return
        self.received += data
        if self.first_s is None and b'"text": "' in self.received:
            self.first_s = now
        if self.received.endswith(b"0\r\n\r\n") or (self.status == 429 and self.received.endswith(b"}}")):
            self.ended_s = now

    @property
    def status(self) -> int:
        return int(self.received[9:12] or 0)

    @property
    def added_s(self) -> float:
        """TTFT beyond what the engine took."""
        assert self.first_s is not None
        (line,) = [line for line in self.received.splitlines() if b'"timings"' in line]
        timings: dict[str, float] = json.loads(line.removeprefix(b"data: "))["timings"]
        return self.first_s - self.sent_s - timings["queue_s"] - timings["prefill_s"]


def all_ended(exchanges: list[Exchange]) -> bool:
    return all(exchange.ended_s for exchange in exchanges)


def play(selector: selectors.BaseSelector, until: Callable[[], bool]) -> None:
    """Reads what comes until `until()`; `data` of a key is (exchange, keep)."""
    while not until():
        for key, _ in selector.select(timeout=1.0):
            exchange, keep = key.data
            exchange.read(keep=keep)


def main() -> None:
    """Measures beside streams, alone, and in bursts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--probes", type=int, default=200)
    parser.add_argument("--bursts", type=int, default=10)
    parser.add_argument("--step-ms", type=float, default=10.0)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=run_server, args=(args.step_ms / 1000, theirs))
    server.start()
    address = ours.recv()
    time.sleep(0.5)
    without = asyncio.run(without_http(args.probes, args.step_ms))
    try:
        alone = probes(address, args.probes, 0, args.step_ms)
        beside = probes(address, args.probes, STREAMS, args.step_ms)
        print(
            f"steps of {args.step_ms:g} ms, {args.probes} probes; ms of their TTFT beyond queue and prefill"
        )
        print(f"{'':<24}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}")
        rows = {
            "alone": alone,
            f"beside {STREAMS} streams": beside,
            "the same without HTTP": without,
        }
        for name, added_s in rows.items():
            figures = [*np.percentile(added_s, [50, 90, 99]), max(added_s)]
            print(f"{name:<24}" + "".join(f"{1000 * figure:>10.2f}" for figure in figures))
        print(f"HTTP adds {1000 * (np.median(beside) - np.median(without)):.2f} ms to the median probe")
        bursts(address, args.bursts)
    finally:
        server.terminate()
        server.join()


def probes(address: tuple[str, int], n_probes: int, n_streams: int, step_ms: float) -> list[float]:
    """Seconds that each probe's TTFT had beyond the engine's share."""
    selector = selectors.DefaultSelector()
    streams = [Exchange(address) for _ in range(n_streams)]
    for stream in streams:
        stream.send(1 << 16)
        selector.register(stream.socket, selectors.EVENT_READ, (stream, False))
    play(selector, lambda: all(stream.first_s for stream in streams))
    probe = Exchange(address)
    selector.register(probe.socket, selectors.EVENT_READ, (probe, True))
    added_s = []
    for pause_s in pauses(n_probes, step_ms):
        resume_s = time.perf_counter() + pause_s
        while (left_s := resume_s - time.perf_counter()) > 0:
            for key, _ in selector.select(timeout=left_s):
                key.data[0].read(keep=key.data[1])
        probe.send(2)
        play(selector, partial(all_ended, [probe]))
        added_s.append(probe.added_s)
    for exchange in (probe, *streams):
        exchange.socket.close()
    time.sleep(0.3)
    return added_s


async def without_http(n_probes: int, step_ms: float) -> list[float]:
    """As `probes`, in the manager's process."""

    async def drain(stream: RequestStream) -> None:
        async for _ in stream.text_async():
            pass

    with SchedulerManager(
        SteadyEngine(step_ms / 1000), LIMIT, max_inflight_requests=LIMIT, tokenize_workers=1
    ) as manager:
        endless = SamplingParams(1 << 16, ignore_eos=True)
        readers = [asyncio.ensure_future(drain(manager.submit(PROMPT, endless))) for _ in range(STREAMS)]
        await asyncio.sleep(0.5)
        added_s = []
        for pause_s in pauses(n_probes, step_ms):
            await asyncio.sleep(pause_s)
            sent_s = time.perf_counter()
            stream = manager.submit(PROMPT, SamplingParams(2, ignore_eos=True))
            async for _ in stream.text_async():
                first_s = time.perf_counter()
                break
            times = stream.timings
            assert times.first_token_s is not None
            added_s.append(first_s - sent_s - (times.first_token_s - times.reserved_s))
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return added_s


def pauses(n_probes: int, step_ms: float) -> list[float]:
    """Seconds before each probe: at no fixed place in a step."""
    return list(np.random.default_rng(0).uniform(2, 6, n_probes) * step_ms / 1000)


def bursts(address: tuple[str, int], n_bursts: int) -> None:
    """Over each burst: the slowest first token of those let in, beyond the engine's share; the slowest refusal."""
    last_first_ms, last_refusal_ms, sending_ms = [], [], []
    for _ in range(n_bursts):
        selector = selectors.DefaultSelector()
        exchanges = [Exchange(address) for _ in range(4 * STREAMS)]
        for exchange in exchanges:
            selector.register(exchange.socket, selectors.EVENT_READ, (exchange, True))
        time.sleep(0.2)  # until the server has taken the connections
        for exchange in exchanges:
            exchange.send(64)
        sending_ms.append(1000 * (exchanges[-1].sent_s - exchanges[0].sent_s))
        play(selector, partial(all_ended, exchanges))
        accepted = [exchange for exchange in exchanges if exchange.status == 200]
        refused = [exchange for exchange in exchanges if exchange.status == 429]
        assert len(accepted) == LIMIT
        assert len(refused) == len(exchanges) - LIMIT
        last_first_ms.append(1000 * max(exchange.added_s for exchange in accepted))
        last_refusal_ms.append(1000 * max((one.ended_s or 0) - one.sent_s for one in refused))
        for exchange in exchanges:
            exchange.socket.close()
        time.sleep(0.2)
    print(f"{n_bursts} bursts of {4 * STREAMS} at limit {LIMIT}: median (worst) of the slowest, ms")
    for name, values in (
        ("first token, added", last_first_ms),
        ("refusal", last_refusal_ms),
        ("(sending took)", sending_ms),
    ):
        print(f"{name:<24}{np.median(values):>10.1f}{f'({max(values):.1f})':>10}")


if __name__ == "__main__":
    main()
