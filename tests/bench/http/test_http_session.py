"""`run` and `sweep` against a server, from the flags to the files: a server of this process, or one that is started."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench import session
from roseinfer.bench.http import target, workers
from roseinfer.bench.http.exchange import ClientLoad
from roseinfer.bench.store import RunFolder
from tests.bench.asking import Answer, Ask
from tests.bench.http.openai_server import OpenAiServer, Said, refusal, two_tokens

RUN = Path("out/run/r")
SWEEP = Path("out/sweep/r")
STARTED = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, limit, dies_at = int(sys.argv[1]), sys.argv[2], sys.argv[3]
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def say(self, kind, body):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.say("application/json", json.dumps({"data": [{"id": "mock"}]}).encode())
    def do_POST(self):
        if limit == dies_at:
            print("out of memory", flush=True)
            os._exit(3)
        self.rfile.read(int(self.headers["Content-Length"]))
        chunk = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
        events = "".join("data: " + json.dumps(one) + "\\n\\n" for one in (chunk, usage))
        self.say("text/event-stream", (events + "data: [DONE]\\n\\n").encode())
    def log_message(self, *_): pass
class Server(ThreadingHTTPServer):
    request_queue_size = 128
with open("starts", "a") as file:
    file.write(limit + "\\n")
Server(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine sends slowly, and figures take seconds."""
    monkeypatch.setattr("roseinfer.bench.pacing._BURST_SPREAD_S", 60.0)
    monkeypatch.setattr("roseinfer.bench.pacing._SEND_LAG_S", 60.0)
    monkeypatch.setattr(session, "draw_figures", lambda folder, place: [folder.path / "figures" / "a.png"])


@pytest.fixture
def run(ask: Ask) -> Callable[..., Answer]:
    def ran(url: str, *words: str) -> Answer:
        fixed = "--num-requests 8 --prompt-len 4 -o out --run-id r --quiet"
        return ask("run", "--target", url, "--arrival", "burst", *fixed.split(), *words)

    return ran


def manifest(path: Path = RUN) -> dict[str, Any]:
    return RunFolder.open(path).manifest


def limited(number: int, said: Said) -> Any:
    return refusal() if number >= 5 else two_tokens(timings={"queue_s": 0.001, "prefill_s": 0.002})


def test_a_run_is_reported_with_what_was_measured_and_no_more(run: Callable[..., Answer]) -> None:
    with OpenAiServer(limited) as server:
        answer = run(server.url)
    assert (answer.code, answer.err) == (0, "")
    for line in ("Model: mock", "Requests: 5", "Rejected: 3", "API: completions"):
        assert f"\n{line}\n" in answer.out
    for absent in ("Paged attention", "Queue wait", "add_request", "explained", "slots came free"):
        assert absent not in answer.out
    assert "Server's own queue p50" in answer.out
    rows = RunFolder.open(RUN).read_requests()
    assert sorted(rows["outcome"]) == ["completed"] * 5 + ["rejected"] * 3
    assert rows["prompt_tokens"].dropna().unique() == [11]
    saved = manifest()
    assert saved["target"] == "http"
    assert saved["configuration"]["target"] == server.url
    assert saved["model"]["source"] == "server"
    assert saved["workload_notes"] == [
        "prompt lengths are in words (no --tokenizer); prompt_tokens are as the server counts them."
    ]


def test_of_a_remote_server_no_host_is_kept(
    run: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roseinfer.bench.environment.is_loopback", lambda host: False)
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    with OpenAiServer() as server:
        run(server.url, "--api-key-env", "SOME_KEY")
        assert {said.headers["authorization"] for said in server.said} == {"Bearer sk-secret"}
    text = (RUN / "run.json").read_text()
    assert "127.0.0.1" not in text
    assert "sk-secret" not in text
    assert manifest()["configuration"]["target"] == "http://remote/v1"


def test_only_measured_requests_are_sent(run: Callable[..., Answer]) -> None:
    """No warm-up, no probe: the lab's servers count them."""
    with OpenAiServer() as server:
        run(server.url)
        assert len(server.said) == 8
        run(server.url, "--run-id", "r2", "--warmup-runs", "1")
        assert len(server.said) == 8 + 8 + 8
    prompts = [said.body["prompt"] for said in server.said[8:]]
    assert len({prompt.split()[0] for prompt in prompts}) == 16  # case I3


def test_all_failed_ends_with_5_and_null(run: Callable[..., Answer]) -> None:  # cases D2, G13
    with OpenAiServer(lambda number, said: refusal(500)) as server:
        answer = run(server.url, "--json")
    assert answer.code == 5
    (pooled,) = [row for row in json.loads(answer.out)["summary"] if row["repeat"] is None]
    assert (pooled["offered"], pooled["error"], pooled["n_ttft"]) == (8, 8, 0)
    assert [pooled[name] for name in ("p50_ttft_ms", "request_throughput", "admitted", "peak_inflight")] == [
        None
    ] * 4
    assert "Error: 8 (status 500 x 8)" in answer.err
    assert RunFolder.open(RUN).is_done


def test_a_server_that_takes_requests_and_never_answers_is_given_up(
    run: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:  # case D12
    monkeypatch.setattr("roseinfer.bench.load.SERVER_TIMEOUT_S", 0.2)
    is_over = threading.Event()

    def hang(number: int, said: Said) -> Any:
        is_over.wait()
        return two_tokens()

    with OpenAiServer(hang) as server:
        answer = run(server.url)
        is_over.set()
    assert answer.code == 5
    assert "Timeout: 8 (timeout x 8)" in answer.out
    assert manifest()["configuration"]["timeout"] == 0.2


def test_a_load_that_was_not_sent_as_drawn_ends_with_4(
    run: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roseinfer.bench.pacing._BURST_SPREAD_S", 0.0)
    monkeypatch.setattr("roseinfer.bench.pacing._BURST_SPREAD_S_PER_REQUEST", 0.0)
    with OpenAiServer() as server:
        answer = run(server.url)
    assert answer.code == 4
    assert "INVALID" in answer.out
    assert RunFolder.open(RUN).is_done


def test_every_try_is_on_record(run: Callable[..., Answer]) -> None:  # cases J3, J4
    with OpenAiServer(lambda number, said: refusal() if number < 2 else two_tokens()) as server:
        answer = run(server.url, "--retry", "immediate")
    assert answer.code == 0
    folder = RunFolder.open(RUN)
    attempts, requests = folder.read_attempts(), folder.read_requests()
    assert len(attempts) == requests["attempts"].sum() == len(server.said) == 10
    summary = folder.read_summary()
    assert summary is not None
    assert summary["amplification"].tolist() == [10 / 8] * 2
    retried = requests[requests["attempts"] > 1]
    assert (retried["last_sent_s"] > retried["sent_s"]).all()


def test_a_client_that_was_busy_all_the_time_says_so(  # case K6
    run: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = workers.play
    monkeypatch.setattr(
        target,
        "play",
        lambda *a, **k: real(*a, **k)._replace(client_load=ClientLoad(0.2, 0.93, 0.012, 0.001)),
    )
    with OpenAiServer() as server:
        answer = run(server.url)
    assert (
        "the client was busy for 93 % of its busiest 100 ms, and did not look for what came for up to 12.0 ms"
        in (answer.out)
    )
    assert answer.code == 0


def test_a_client_that_sent_again_says_so(
    run: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = workers.play
    monkeypatch.setattr(target, "play", lambda *a, **k: real(*a, **k)._replace(resent=2))
    with OpenAiServer() as server:
        answer = run(server.url)
    assert "requests were sent again: the server closed an idle connection as it went out" in answer.out
    assert answer.code == 0


def test_the_other_commands_read_such_a_run(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.bench.gate_cli._draw_shift", lambda *_: "no figure")
    fixed = "--num-requests 60 --arrival burst -o out --quiet --prompt-len 4".split()
    with OpenAiServer() as server:
        for run_id in ("a", "b"):
            words = ("--target", server.url, "--repeats", "2", "--slo", "p99_ttft:60000", "--run-id", run_id)
            answer = ask("sweep", *words, *fixed)
            assert answer.code == 0
    assert "recommended for p99_ttft:60000: no limit." in answer.out
    assert "queue wait" not in answer.out
    assert ask("compare", "out/sweep/b", "out/sweep/a").code == 0
    Path("rules.toml").write_text('[[rule]]\nmetric = "p99_ttft_ms"\nmax = 60000\n')
    checked = ask("check", "out/sweep/b", "--thresholds", "rules.toml")
    assert (checked.code, "UNKNOWN" in checked.out) == (3, True)  # two repeats carry no verdict


# --- servers that are started -----------------------------------------------------------------------------


@pytest.fixture
def started(ask: Ask, tmp_path: Path) -> Callable[..., Answer]:
    """A sweep over two limits and two lengths; each start of a server is a word in the file `starts`."""
    (tmp_path / "server.py").write_text(STARTED)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def ran(*words: str, dies_at: str = "none") -> Answer:
        command = f"{shlex.quote(sys.executable)} server.py {{port}} {{max_inflight}} {dies_at}"
        fixed = "--num-requests 3 --prompt-len 4,5 -o out --run-id r --quiet --repeats 2"
        return ask(
            *("sweep", "--target", f"http://127.0.0.1:{port}/v1", "--target-cmd", command),
            *("--max-inflight", "4,8", "--arrival", "burst", *fixed.split(), *words),
        )

    return ran


def starts() -> list[str]:
    return Path("starts").read_text().split()


def is_there(url: str) -> bool:
    port = int(url.rpartition(":")[2].partition("/")[0])
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_cells_of_one_limit_share_a_start_in_every_block(started: Callable[..., Answer]) -> None:
    assert started().code == 0
    order = [
        [cell.split("-")[0].removeprefix("inflight_") for cell in block] for block in manifest(SWEEP)["order"]
    ]
    assert all(block[0] == block[1] != block[2] == block[3] for block in order)
    assert starts() == [limit for block in order for limit in (block[0], block[2])]
    assert not is_there(manifest(SWEEP)["configuration"]["target"])
    facts = RunFolder.open(SWEEP).read_facts()
    assert len(facts) == 8
    rows = RunFolder.open(SWEEP).read_requests()
    assert (rows["admission"] == "inflight:" + rows["max_inflight"].astype(int).astype(str)).all()


def test_a_server_that_dies_leaves_what_was_finished(started: Callable[..., Answer]) -> None:
    answer = started(dies_at="8")
    assert answer.code == 1
    # Each of its threads may come to say it before the process is gone.
    assert (
        "the server of --target-cmd ended with exit code 3; it said last: out of memory" in answer.complaint
    )
    finished = RunFolder.open(SWEEP).finished_cells()
    order = manifest(SWEEP)["order"][0]
    assert len(finished) == (2 if order[0].startswith("inflight_4") else 0)


def test_an_interrupt_stops_the_server(
    started: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(target, "play", interrupted)
    answer = started()
    assert answer.code == 130
    assert "0 of 8 cells are on disk" in answer.complaint
    assert not is_there(manifest(SWEEP)["configuration"]["target"])


@pytest.fixture
def _a_foreground_process() -> Iterator[None]:
    """A shell that puts us into the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_a_foreground_process")
class TestInterrupted:
    """A run of one cell of 8 requests, one after the other, of which the fourth is never answered."""

    @pytest.fixture
    def answer(self, ask: Ask) -> Iterator[Answer]:
        is_over = threading.Event()

        def answering(number: int, said: Said) -> Any:
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
                is_over.wait(20)
            return two_tokens()

        words = (
            "--max-concurrency 1 --num-requests 8 --arrival burst --prompt-len 4 -o out --run-id r --quiet"
        )
        with OpenAiServer(answering) as server:
            try:
                yield ask("run", "--target", server.url, *words.split(), "--json")
            finally:
                is_over.set()

    def test_what_was_measured_is_on_disk(self, answer: Answer) -> None:
        assert answer.code == 130
        folder = RunFolder.open(RUN)
        rows = folder.read_requests()
        assert rows["outcome"].tolist() == ["completed"] * 3 + ["incomplete"] * 5
        assert set(rows["error"][3:]) == {"interrupted"}
        assert rows["sent_s"].notna().sum() == 4
        assert folder.finished_cells() == set()
        assert not folder.is_done

    def test_it_is_summed_up_as_interrupted(self, answer: Answer) -> None:
        said = json.loads(answer.out)
        assert (said["interrupted"], said["valid"]) == (True, False)
        assert {row["completed"] for row in said["summary"]} == {3}
        assert "when 3 of 8 requests had ended" in said["summary"][0]["invalid_reasons"]
        assert "Requests: 4\n" in answer.err
        assert "Incomplete: 5 (interrupted x 5)\n" in answer.err
        last = answer.err.splitlines()[-1]
        assert last.startswith(
            "roseinfer-bench: interrupted; 0 of 1 cells are on disk, and what there is of another"
        )

    def test_going_on_measures_it_anew(self, answer: Answer, ask: Ask) -> None:
        words = shlex.split(answer.err.splitlines()[-1].partition("To go on: ")[2])[1:]
        resumed = ask(*words, "--quiet")
        assert resumed.code == 0, resumed.err
        rows = RunFolder.open(RUN).read_requests()
        assert rows["outcome"].tolist() == ["completed"] * 8
        assert not [*RUN.glob("**/.*")]


def test_a_sweep_goes_on_with_the_command_named_again(
    started: Callable[..., Answer], ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = workers.play, iter(range(100))

    def third_is_interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(target, "play", third_is_interrupted)
    told = started().complaint
    assert "2 of 8 cells are on disk" in told
    words = shlex.split(told.partition("To go on: ")[2])[1:]
    assert ask("sweep", "--resume", str(SWEEP)).complaint.endswith("no places of files: add --target-cmd CMD")
    assert ask(*words, "--quiet").code == 0
    assert RunFolder.open(SWEEP).is_done
