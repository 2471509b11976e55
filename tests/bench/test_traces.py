"""Traces: read in three formats, played as they were, and out of the ticks of a coarse clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roseinfer.bench.load import Load
from roseinfer.bench.traces import Trace, read_trace
from roseinfer.errors import InputError

FOLDER = Path(__file__).parent / "traces"
AZURE = FOLDER / "azure_llm_2023_conv.csv"
MOONCAKE = FOLDER / "mooncake_conversation_lengths.csv"
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,230,1317,Conversation log\n"
    "118,GPT-4,417,0,417,API log\n"
    "119,GPT-4,417,276,693,Conversation log\n"
)


def load(**changes: Any) -> Load:
    return Load(arrival="trace", **changes)


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(content: str | bytes) -> Path:
        path = tmp_path / "trace.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_an_azure_trace_is_read_to_its_last_line() -> None:
    trace = read_trace(AZURE)  # ends in CRLF but for the last line, which has no end
    assert len(trace) == 30
    assert trace.arrived_s[:3] == pytest.approx([0, 4.314579, 4.541877])
    assert trace.prompt_tokens[[0, -1]].tolist() == [374, 91]
    assert trace.output_tokens[[0, -1]].tolist() == [44, 16]
    assert trace.lines[[0, -1]].tolist() == [2, 31]


def test_a_mooncake_trace_is_read_from_csv_and_from_json_lines(written: Any) -> None:
    csv = read_trace(MOONCAKE)
    rows = [line.split(",") for line in MOONCAKE.read_text().splitlines()[1:]]
    lines = [
        {"timestamp": int(t), "input_length": int(p), "output_length": int(o), "hash_ids": [1, 2]}
        for t, p, o, *_ in rows
    ]
    from_json = read_trace(written("\n".join(map(json.dumps, lines))))
    for name in ("arrived_s", "prompt_tokens", "output_tokens"):
        assert getattr(csv, name).tolist() == getattr(from_json, name).tolist()
    assert from_json.lines.tolist() == list(range(1, 61))
    assert (csv.prompt_tokens[0], csv.output_tokens[0]) == (6758, 500)


def test_failures_of_a_burstgpt_trace_are_left_out_and_said(written: Any) -> None:
    trace = read_trace(written(BURSTGPT))
    assert trace.arrived_s.tolist() == [0, 40, 114]
    assert trace.prompt_tokens.tolist() == [472, 1087, 417]
    assert trace.output_tokens.tolist() == [18, 230, 276]
    assert trace.lines.tolist() == [2, 3, 5]
    assert any("1 of 4 rows have 0 output tokens" in said for said in trace.told(load()))


def test_rows_out_of_order_are_put_in_order_and_said(written: Any) -> None:
    trace = read_trace(written("timestamp_ms,input_length,output_length\n9000,1,1\n1000,2,2\n5000,3,3\n"))
    assert trace.arrived_s.tolist() == [0, 4, 8]
    assert trace.prompt_tokens.tolist() == [2, 3, 1]
    assert trace.lines.tolist() == [3, 4, 2]
    assert any("goes back 1 time" in said for said in trace.told(load()))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("a,b,c\n1,2,3\n", "header"),
        ("timestamp_ms,input_length\n1,2\n", "header"),
        ("timestamp_ms,input_length,output_length\n", "no requests"),
        ("timestamp_ms,input_length,output_length\n0,1,0\n", "no request with output"),
        ("timestamp_ms,input_length,output_length\n0,1,1\n0,x,1\n", "line 3: input_length 'x'"),
        ("timestamp_ms,input_length,output_length\n0,1,1\n\n\n0,1.5,1\n", "line 5: input_length 1.5"),
        ("timestamp_ms,input_length,output_length\n0,0,1\n", "line 2: input_length 0"),
        ("timestamp_ms,input_length,output_length\n0,1,-1\n", "line 2: output_length -1"),
        ("timestamp_ms,input_length,output_length\n0,1,1\nnan,1,1\n", "line 3: timestamp_ms nan"),
        ("timestamp_ms,input_length,output_length\n,1,1\n0,1,1\n", "line 2: timestamp_ms nan"),
        ("timestamp_ms,input_length,output_length\n0,1,1\n0,1\n", "line 3: 2 fields"),
        ("timestamp_ms,input_length,output_length\n0,1,1\n\n0,1,1,1\n", "line 4: 4 fields"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\nsoon,1,1\n", "line 3: TIMESTAMP"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 0', "line 2: is no JSON"),
        ('{"timestamp": 0, "input_length": 1}\n', "line 1: output_length"),
        ('{"timestamp": 0, "input_length": "1", "output_length": 1}\n', "line 1: input_length '1'"),
        ('\n{"timestamp": 0, "input_length": 0, "output_length": 1}\n', "line 2: input_length"),
        (b"\xff\xfe\x00", "is no text"),
    ],
)
def test_a_file_that_is_no_trace_says_where(written: Any, content: str | bytes, said: str) -> None:
    path = written(content)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert caught.value.name == "--trace"
    assert caught.value.value == str(path)
    assert said in caught.value.why


def test_a_trace_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path / "trace.csv")


def test_a_fine_clock_is_played_as_it_is() -> None:
    trace = read_trace(AZURE)
    assert trace.tick_s is None
    assert trace.arrival_times(load(), seed=0, repeat=0).tolist() == trace.arrived_s.tolist()


def test_time_is_stretched_and_the_load_cut() -> None:
    trace = read_trace(AZURE)
    slow = trace.arrival_times(load(time_scale=2.0), seed=0, repeat=0)
    assert slow.tolist() == (2 * trace.arrived_s).tolist()
    assert (
        trace.arrival_times(load(num_requests=4), seed=0, repeat=0).tolist() == trace.arrived_s[:4].tolist()
    )
    until = float(trace.arrived_s[5])
    assert len(trace.arrival_times(load(duration_s=until), seed=0, repeat=0)) == 5  # not at that time itself


@pytest.fixture
def ticking() -> Trace:
    trace = read_trace(MOONCAKE)
    assert trace.tick_s == pytest.approx(3.0, rel=0.001)
    return trace


def test_ticks_keep_their_counts_and_their_order(ticking: Trace) -> None:  # case C14
    due_s = ticking.arrival_times(load(), seed=0, repeat=0)
    assert due_s[0] == 0
    assert (np.diff(due_s) > 0).all()  # nothing at one instant any more
    assert ticking.tick_s is not None
    moved_s = ticking._out_of_ticks(ticking.tick_s, 0, 0)  # before the first becomes time zero
    stamps, counts = np.unique(ticking.arrived_s, return_counts=True)
    assert np.histogram(moved_s, [*stamps, stamps[-1] + 3.0])[0].tolist() == counts.tolist()
    assert np.diff(moved_s).tolist() == pytest.approx(np.diff(due_s).tolist())


def test_jitter_fills_its_tick(ticking: Trace) -> None:  # case C14
    ranges_s = []
    for repeat in range(200):
        due_s = ticking.arrival_times(load(), seed=0, repeat=repeat)
        last = due_s[ticking.arrived_s == ticking.arrived_s[-1]]
        ranges_s.append(last.max() - last.min())
    n = np.sum(ticking.arrived_s == ticking.arrived_s[-1])
    assert np.mean(ranges_s) == pytest.approx(3 * (n - 1) / (n + 1), rel=0.05)  # the range of n uniform draws


def test_jitter_follows_from_the_seed(ticking: Trace) -> None:  # case C14, C5
    first = ticking.arrival_times(load(), seed=0, repeat=0).tolist()
    assert first == ticking.arrival_times(load(), seed=0, repeat=0).tolist()
    assert first != ticking.arrival_times(load(), seed=1, repeat=0).tolist()
    assert first != ticking.arrival_times(load(), seed=0, repeat=1).tolist()


def test_ticks_are_said_and_can_be_kept(ticking: Trace) -> None:  # case C14
    kept = load(keep_ticks=True)
    assert ticking.arrival_times(kept, seed=0, repeat=0).tolist() == ticking.arrived_s.tolist()
    assert any("ticks every 3 s" in said and "random time" in said for said in ticking.told(load()))
    assert any("ticks every 3 s" in said and "at once" in said for said in ticking.told(kept))


def test_a_clock_of_whole_seconds_with_long_gaps_has_ticks_of_a_second(written: Any) -> None:
    rows = "".join(f"{second},m,5,5,10,x\n" for second in (0, 0, 40, 41, 41, 90, 120))
    trace = read_trace(written(BURSTGPT.splitlines(keepends=True)[0] + rows))
    assert trace.tick_s == 1.0
    due_s = trace.arrival_times(load(), seed=0, repeat=0)
    assert np.abs(due_s - trace.arrived_s).max() < 1.0
