"""The class of a request in its body, and what policies of admission tell a client and Prometheus."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from tests.scripted import ScriptedEngine, StepGate
from tests.server.serving import an_app, ask, chat, complete, error_of, manager_of, until
from tests.server.test_metrics import samples


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("priority", [None, 0, 3])
def test_every_api_takes_a_priority(path: str, priority: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with an_app(admission="priority") as app:
        manager = manager_of(app)
        submit, seen = manager.submit, []

        def noting(*args: Any, **named: Any) -> Any:
            seen.append(named["priority"])
            return submit(*args, **named)

        monkeypatch.setattr(manager, "submit", noting)
        body: dict[str, Any] = {"prompt": "hi"}
        if "chat" in path:
            body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = ask(app, "POST", path, json=body | {"priority": priority})
    assert answer.status_code == 200
    assert seen == [priority or 0]


@pytest.mark.parametrize("priority", [-1, 256, 1.0, "1", True])
def test_what_is_no_class_is_refused_by_name(priority: Any) -> None:
    with an_app() as app:
        answers = [complete(app, priority=priority), chat(app, priority=priority)]
    for answer in answers:
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "priority"


@pytest.mark.parametrize("send", [complete, chat])
def test_a_class_that_nothing_would_read_is_refused_by_name(send: Any) -> None:
    with an_app() as app:
        answer = send(app, priority=1)
        assert (answer.status_code, error_of(answer)["param"]) == (400, "priority")
        assert send(app, priority=0).status_code == 200


def test_a_higher_class_takes_the_place_of_one_that_waits() -> None:
    gate, answers = StepGate(), list[httpx.Response]()
    with an_app(ScriptedEngine(gate), admission="inflight:2+priority", max_batch_size=1) as app:
        manager = manager_of(app)
        first = manager.submit([1])
        gate.entered.wait()
        waiting = threading.Thread(target=lambda: answers.append(complete(app, priority=2)))
        waiting.start()
        until(lambda: manager.inflight == 2)
        assert samples(app)["roseinfer_refusals_total/evicted"] == 0
        second = manager.submit([1], priority=1)
        refused = complete(app, priority=1)
        gate.opened.set()
        waiting.join()
        for stream in (first, second):
            assert len(list(stream.tokens())) == 16
        found = samples(app)
    assert [answer.status_code for answer in (*answers, refused)] == [429, 429]
    assert answers[0].headers["x-roseinfer-reason"] == error_of(answers[0])["code"] == "evicted"
    assert refused.headers["x-roseinfer-reason"] == "max_inflight"
    assert found["roseinfer_refusals_total/evicted"] == 1


def test_only_policies_that_are_on_have_a_zero() -> None:
    reasons = ("aimd", "gradient", "slo", "queue-timeout", "codel", "evicted")
    for admission, on in [("none", ()), ("queue-timeout:2s+codel", ("queue-timeout", "codel"))]:
        with an_app(admission=admission) as app:
            found = samples(app)
        assert [reason for reason in reasons if f"roseinfer_refusals_total/{reason}" in found] == list(on)
