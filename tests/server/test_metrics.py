from __future__ import annotations

from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from tests.scripted import ScriptedEngine, StepGate
from tests.server.serving import PacedSteps, an_app, ask, complete, manager_of, served, until


def samples(app: FastAPI) -> dict[str, float]:
    """Values of `/metrics` by name, with the one label that some have."""
    text = ask(app, "GET", "/metrics").text
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_gauges_tell_what_waits_and_what_runs() -> None:
    gate = StepGate()
    with an_app(ScriptedEngine(gate), max_inflight_requests=8, max_batch_size=2) as app:
        for _ in range(3):
            manager_of(app).submit([1])
        gate.entered.wait()
        found = samples(app)
        gate.opened.set()
    assert found["roseinfer_requests_in_flight"] == 3
    # The step may have begun with one request or with two.
    assert found["roseinfer_requests_waiting"] + found["roseinfer_requests_running"] == 3
    assert found["roseinfer_requests_running"] in (1, 2)
    assert found["roseinfer_in_flight_limit"] == 8


def test_answers_are_counted_by_how_they_ended_and_their_stages_measured() -> None:
    with an_app() as app:
        for stream in (False, True):
            complete(app, max_tokens=5, stream=stream)
        complete(app, max_tokens=5, stop="b")
        found = samples(app)
    assert found["roseinfer_requests_total/length"] == 2
    assert found["roseinfer_requests_total/stop"] == 1
    assert found["roseinfer_generated_tokens_total"] == 5 + 5 + 2
    for name in ("queue_wait", "time_to_first_token", "e2e_latency"):
        assert found[f"roseinfer_{name}_seconds_count"] == 3
    assert found["roseinfer_inter_token_latency_seconds_count"] == 4 + 4 + 1


def test_what_the_prefix_cache_knew_is_counted() -> None:
    with an_app() as app:
        before = samples(app)
        for _ in range(3):
            complete(app, prompt="x" * 40, max_tokens=1)
        found = samples(app)
    names = ("prompt_tokens", "cached_prompt_tokens", "prefix_cache_hits")
    assert [before[f"roseinfer_{name}_total"] for name in names] == [0, 0, 0]
    assert [found[f"roseinfer_{name}_total"] for name in names] == [120, 64, 2]


def test_refusals_are_counted_by_reason_from_zero_on() -> None:
    with an_app(max_inflight_requests=1) as app:
        assert samples(app)["roseinfer_refusals_total/max_inflight"] == 0
        ticket = manager_of(app).admission.reserve(0.0, 1)
        for _ in range(3):
            assert complete(app).status_code == 429
        manager_of(app).admission.release(ticket, 1.0)
        complete(app, n=2)
        found = samples(app)
    assert found["roseinfer_refusals_total/max_inflight"] == 3
    assert found["roseinfer_refusals_total/draining"] == 0


def test_two_apps_of_a_process_count_apart() -> None:
    with an_app() as one, an_app() as other:
        complete(one)
        assert "roseinfer_requests_total/length" in samples(one)
        assert "roseinfer_requests_total/length" not in samples(other)


def test_a_request_whose_client_leaves_counts_in_the_queue_if_it_was_scheduled() -> None:
    """One runs and one waits when both leave; neither has had a token."""
    steps = PacedSteps()
    with served(ScriptedEngine(steps), max_batch_size=1) as one, steps:
        running = one.send({"prompt": "x", "stream": True})
        steps.entered.acquire()
        waiting = one.send({"prompt": "x", "stream": True})
        until(lambda: one.manager.inflight == 2)
        for connection in (running, waiting):
            connection.close()
        until(lambda: samples(one.app).get("roseinfer_requests_total/client_gone") == 2)
        found = samples(one.app)
    assert found["roseinfer_queue_wait_seconds_count"] == 1
    assert found["roseinfer_time_to_first_token_seconds_count"] == 0


def test_what_the_end_of_the_server_cuts_short_is_no_refusal() -> None:
    gate = StepGate()
    with served(ScriptedEngine(gate), drain_timeout_s=0.01) as one:
        connection = one.send({"prompt": "x", "max_tokens": 4000})
        gate.entered.wait()
        one.end()
        try:
            until(lambda: one.manager._inbox.qsize() == 2)  # to drain, and then to abort
        finally:
            gate.opened.set()
        assert connection.makefile("rb").read().startswith(b"HTTP/1.1 503")
        connection.close()
        one.thread.join()
        found = samples(one.app)
    assert found["roseinfer_refusals_total/draining"] == 0
    assert found["roseinfer_requests_total/cut_short"] == 1
