"""What a server says of itself at /metrics."""

from __future__ import annotations

import pytest

from roseinfer.bench.http import scrape
from roseinfer.bench.http.address import Address
from roseinfer.bench.http.scrape import MOST_SERIES, Scrape, read_metrics
from tests.bench.http.openai_server import METRICS, OpenAiServer

TEXT = b"""# HELP vllm:num_requests_waiting Number
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="a b",engine="0"} 3.0
vllm:num_requests_running 1e1
vllm:request_latency_bucket{le="0.5"} 7
http_requests_created 1.7e9
http_requests_total{handler="/v1/completions"} 9
vllm:time_to_first_token_seconds_sum 1.5
python_gc_collections_total 12
roseinfer_refusals_total{reason="max_inflight"} 4 1700000000
queue_depth NaN
max_inflight_requests +Inf
odd_queue x
"""


def test_series_about_requests_are_read_and_no_others() -> None:
    assert read_metrics(TEXT) == {
        'vllm:num_requests_waiting{model_name="a b",engine="0"}': 3.0,
        "vllm:num_requests_running": 10.0,
        'roseinfer_refusals_total{reason="max_inflight"}': 4.0,
        "vllm:time_to_first_token_seconds_sum": 1.5,
    }


def test_a_label_names_no_place() -> None:
    text = b'vllm:num_requests_running{model_name="/home/alice/models/gpt2",node="a, \\"b\\" /x/y"} 1\n'
    assert list(read_metrics(text)) == [
        r'vllm:num_requests_running{model_name="gpt2",node="a, \"b\" y"}',
    ]


def test_what_is_kept_is_bounded() -> None:
    assert len(read_metrics(b"".join(b"queue_%d 1\n" % n for n in range(1000)))) == MOST_SERIES


def test_it_is_asked_before_and_after() -> None:
    with OpenAiServer(metrics=METRICS) as server:
        with Scrape(Address.parse(server.url), every_s=3600) as it:
            pass
        assert server.asked == ["/metrics", "/metrics"]
    assert it.notes() == {
        "scrapes": 2,
        "series": {
            "vllm:num_requests_waiting": {"before": 3.0, "least": 3.0, "most": 3.0, "after": 3.0},
        },
    }


def test_a_counter_that_comes_up_during_a_cell_was_not_there_before() -> None:
    with OpenAiServer(metrics=METRICS) as server, Scrape(Address.parse(server.url), every_s=3600) as it:
        server.metrics = f"{METRICS}\nvllm:admission_rejections_total 24\n"
    notes = it.notes()
    assert notes is not None
    assert notes["series"]["vllm:admission_rejections_total"]["before"] is None


def test_nothing_is_understood_within_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []

    def noting(body: bytes) -> dict[str, float]:
        read.append(body)
        return read_metrics(body)

    monkeypatch.setattr(scrape, "read_metrics", noting)
    with OpenAiServer(metrics=METRICS) as server:
        with Scrape(Address.parse(server.url), every_s=3600) as it:
            before = len(read)
            it._take()
            assert len(read) == before
        notes = it.notes()
    assert notes is not None
    assert notes["scrapes"] == 3


def test_what_is_kept_within_a_cell_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stays, and the last."""
    monkeypatch.setattr(scrape, "MOST_KEPT_BYTES", 45)
    with OpenAiServer(metrics="queue_size 0.0\n") as server:
        with Scrape(Address.parse(server.url), every_s=3600) as it:
            for value in (9, 2, 3):
                server.metrics = f"queue_size {value}.0\n"
                it._take()
        notes = it.notes()
    assert notes == {
        "scrapes": 4,
        "series": {"queue_size": {"before": 0.0, "least": 0.0, "most": 3.0, "after": 3.0}},
    }


def test_a_server_without_metrics_is_asked_once() -> None:
    with OpenAiServer() as server:
        with Scrape(Address.parse(server.url), every_s=0) as it:
            pass
        assert server.asked == ["/metrics"]
    assert it.notes() is None


def test_a_server_that_is_not_there_is_no_failure() -> None:
    with OpenAiServer() as server:
        address = Address.parse(server.url)
    with Scrape(address) as it:
        pass
    assert it.notes() is None
