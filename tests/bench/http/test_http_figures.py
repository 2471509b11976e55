"""Figures of a run against a server: what its client saw, and nothing that only an engine can stamp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench import plots
from roseinfer.bench.figure_style import Caption
from roseinfer.bench.gantt import draw_gantt, gantt_data
from roseinfer.bench.http.exchange import Failure, HttpAttempt, HttpRequest
from roseinfer.bench.http.rows import request_row
from roseinfer.bench.records import derive
from roseinfer.bench.report import conclusions, explain_lines, slots_freed_lines, tables
from roseinfer.bench.steady_state import recoveries_s
from roseinfer.bench.summary import summarise
from roseinfer.bench.validity import CellFacts, check_cell
from tests.bench.rows import as_read

CAPTION = Caption(model="mock", machine="a remote server", run_id="run")
FACTS = CellFacts(
    offered=4,
    limit=2,
    peak_inflight=None,
    inflight_integral_s=None,
    inflight_at_start=None,
    started_utc="2026-01-01T00:00:00+00:00",
)


def rows(limit: int | None = 2, cell: str = "c") -> pd.DataFrame:
    """A burst of four, of which two are refused."""
    served = [
        HttpAttempt(
            sent_s=0.0001 * n,
            head_s=0.1,
            ended_s=0.3,
            status_code=200,
            deliveries=[(0.1, 1), (0.3, 1)],
            output_tokens=2,
            timings={"queue_s": 0.02, "prefill_s": 0.05},
        )
        for n in range(2)
    ]
    refused = [
        HttpAttempt(sent_s=0.001, head_s=0.002, ended_s=0.002, failure=Failure.STATUS, status_code=429)
        for _ in range(2)
    ]
    key = {"run_id": "run", "cell_id": cell, "repeat": 0, "target": "http", "model": "mock"}
    admission = str(AdmissionSpec(limit))
    factors = {"admission": admission, "burst_size": 4, "arrival": "burst", "output_len": 2}
    return as_read(
        [
            {**key, **factors, "request_index": index, **request_row(HttpRequest(0.0, tries=[attempt]), 0.0)}
            for index, attempt in enumerate([*served, *refused])
        ]
    )


def test_no_rule_about_slots_is_asked_of_a_server() -> None:
    """Two of four are refused at a limit of three, which for an idle engine is against the law of bursts."""
    assert check_cell(rows(3), replace(FACTS, limit=3)) == []


def test_the_client_s_own_rules_are() -> None:  # case K2
    (reason,) = check_cell(rows(), replace(FACTS, max_concurrency=2, peak_outstanding=3))
    assert reason == "3 requests were outstanding at once, the client's own limit is 2"


def test_a_summary_is_null_where_nobody_knows() -> None:
    summary = summarise(rows(), {("c", 0): FACTS})
    for name in ("admitted", "peak_inflight", "mean_inflight", "p99_queue_wait_ms"):
        assert summary[name].isna().all(), name
    assert summary["n_server_queue"].tolist() == [2, 2]
    assert summary["p99_server_queue_ms"].tolist() == [20.0, 20.0]
    assert summary["amplification"].tolist() == [1.0, 1.0]


def test_the_table_has_what_the_server_says_of_itself_and_no_queue_wait() -> None:
    both = pd.concat([rows(), rows(None, "d")], ignore_index=True)
    summary = summarise(both, {("c", 0): FACTS, ("d", 0): replace(FACTS, limit=None)})
    table = "\n".join(tables(summary))
    assert "queue p99, server's own (ms)" in table
    assert "queue wait" not in table
    assert "largest gap of chunks (ms)" in table
    (sentence,) = conclusions(summary)
    assert "queue wait" not in sentence
    assert "nan" not in sentence
    assert explain_lines(both, pd.DataFrame()) == slots_freed_lines(both) == []


def test_a_burst_on_a_load_has_no_recovery_that_nobody_measured() -> None:
    derived = derive(rows()).assign(arrival="poisson", scheduled_s=[0.0, 1.0, 1.0, 2.0])
    assert recoveries_s(derived).size == 0


def test_figures_show_what_the_client_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "save", lambda figure, folder, name: [folder / f"{name}.png"])
    requests = rows()
    summary = summarise(requests, {("c", 0): FACTS})
    files = plots.draw_all(requests, summary, CAPTION, tmp_path, steps=pd.DataFrame())
    names = {path.stem for path in files}
    assert "burst_gantt" in names
    assert not names & {"timeline", "p99_explained"}
    figure = draw_gantt(gantt_data(requests), CAPTION)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "until the first text",
        "until the last",
        "rejected",
    ]
    assert [collection.get_label() for collection in figure.axes[0].collections] == [
        "until the first text",
        "until the last",
    ]
