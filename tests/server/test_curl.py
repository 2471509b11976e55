"""`roseinfer-serve` as a process, asked with curl: no library of ours stands between the two."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from tests.server.serving import events_of, text_of, until

SERVE = """
import sys
from types import SimpleNamespace
from tests.scripted import ScriptedEngine

def load(*_, **__):
    return ScriptedEngine(lambda plan: sys.stdin.readline())

sys.modules["roseinfer.engine"] = SimpleNamespace(InferenceEngine=SimpleNamespace(from_pretrained=load))
from roseinfer.server.cli import main
main()
"""
"""Takes the words of roseinfer-serve. A step for each line of its input; any number once that has ended."""

JSON = ("-H", "Content-Type: application/json")
PROMPT = {"prompt": "x", "max_tokens": 5, "temperature": 0}


class Server:
    def __init__(self, url: str, steps: IO[str]) -> None:
        self.url = url
        self._steps = steps

    def step(self) -> None:
        self._steps.write("\n")
        self._steps.flush()

    def run_free(self) -> None:
        self._steps.close()

    def ask(self, path: str, *words: str) -> str:
        return curl(*words, f"{self.url}{path}")

    def complete(self, *words: str, **body: Any) -> str:
        return self.ask("/v1/completions", *JSON, "-d", json.dumps({**PROMPT, **body}), *words)


@contextmanager
def serving(*words: str, **environment: str) -> Iterator[Server]:
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SERVE, "--port", "0", *words],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("roseinfer-serve: "), line
        server = Server(line.partition(" at ")[2].partition(",")[0], process.stdin)
        until(lambda: is_up(server.url))
        try:
            yield server
        finally:
            process.terminate()
            if not process.stdin.closed:
                server.run_free()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as one:
        one.run_free()
        yield one


def curl_command(*words: str) -> list[str]:
    program = shutil.which("curl")
    assert program is not None, "these tests need curl: apt-get install curl"
    return [program, "-sS", "--max-time", "60", *words]


def curl(*words: str) -> str:
    done = subprocess.run(curl_command(*words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_up(url: str) -> bool:
    done = subprocess.run(curl_command(f"{url}/health"), capture_output=True, check=False)
    return done.returncode == 0


def status_and_headers(answer: str) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Of what `curl -i` prints; the body is JSON."""
    head, _, body = answer.replace("\r\n", "\n").partition("\n\n")
    first, *lines = head.split("\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(first.split()[1]), headers, json.loads(body)


def test_a_stream(server: Server) -> None:
    events = events_of(server.complete("-N", stream=True, stream_options={"include_usage": True}))
    assert text_of(events) == "abcde"
    assert events[-1]["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 5,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_whole_answer(server: Server) -> None:
    status, headers, body = status_and_headers(server.complete("-i"))
    assert (status, headers["content-type"]) == (200, "application/json")
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("abcde", "length")


def test_a_chat(server: Server) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    body = json.loads(server.ask("/v1/chat/completions", *JSON, "-d", json.dumps(asked)))
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "abc"}


def test_over_the_limit_it_says_when_to_come_back() -> None:  # cases A14, J7
    with serving("--max-inflight-requests", "1") as server:
        command = curl_command("-N", *JSON, "-d", json.dumps({**PROMPT, "stream": True}))
        with subprocess.Popen(
            [*command, f"{server.url}/v1/completions"], stdout=subprocess.PIPE, text=True
        ) as first:
            assert first.stdout is not None
            server.step()
            begun = first.stdout.readline()
            status, headers, body = status_and_headers(server.complete("-i", stream=True))
            server.run_free()
            text = text_of(events_of(begun + first.stdout.read()))
    assert status == 429
    assert (headers["content-type"], headers["x-roseinfer-reason"]) == ("application/json", "max_inflight")
    assert 1 <= int(headers["retry-after"]) <= 60
    assert int(headers["retry-after-ms"]) >= 1
    assert headers["x-request-id"]
    assert (body["error"]["code"], body["error"]["limit"], body["error"]["inflight"]) == (
        "max_inflight",
        1,
        1,
    )
    assert text == "abcde"


@pytest.mark.parametrize(
    ("words", "status", "code"),
    [
        ((*JSON, "-d", '{"prompt": '), 400, "invalid_json"),
        ((*JSON, "-d", "[]"), 400, "invalid_body"),
        ((*JSON, "-d", '{"prompt": "x", "n": 2}'), 400, "invalid_value"),
        (("-d", '{"prompt": "x"}'), 415, "no_json"),  # as curl does by itself
        (("-X", "PUT"), 405, "method_not_allowed"),
    ],
)
def test_what_is_no_request(server: Server, words: tuple[str, ...], status: int, code: str) -> None:
    got, _, body = status_and_headers(server.ask("/v1/completions", "-i", *words))
    assert (got, body["error"]["code"]) == (status, code)


def test_a_body_that_is_too_large(server: Server, tmp_path: Path) -> None:
    """Of a large body curl asks first whether it is wanted."""
    (tmp_path / "body").write_text(json.dumps({"prompt": "x" * 5_000_000}))
    words = ("-i", *JSON, "-H", "Expect: 100-continue", "--data-binary", f"@{tmp_path / 'body'}")
    status, _, body = status_and_headers(server.ask("/v1/completions", *words))
    assert (status, body["error"]["code"]) == (413, "body_too_large")


def test_a_key() -> None:
    with serving(ROSEINFER_API_KEY="secret") as server:
        server.run_free()
        status, _, body = status_and_headers(server.complete("-i"))
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert status_and_headers(server.complete("-i", "-H", "Authorization: Bearer secre"))[0] == 401
        assert status_and_headers(server.complete("-i", "-H", "Authorization: Bearer secret"))[0] == 200
        assert "secret" not in json.dumps(body)
