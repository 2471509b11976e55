"""An answer is measured once more, at length: what is printed is what was confirmed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roseinfer.bench.capacity import LimitSearch, RateSearch
from roseinfer.bench.options import SweepOptions
from roseinfer.bench.probe import longer
from roseinfer.bench.recommendation_cli import CapacityOptions, _probers
from roseinfer.bench.store import RunFolder
from tests.bench.asking import Ask
from tests.bench.experiments import ScriptedInferenceEngine
from tests.bench.made_servers import Server, queue, refusals, told, waits

COST_MODEL = Path(__file__).parents[2] / "experiments" / "gpt2_cpu.cost.json"

Wait = Callable[[float, float], float]


def rate_at_length(wait: Wait, *, in_short: Wait = queue, slo: str = "p99_ttft:250") -> RateSearch:
    """The search at length on a server that waits so, after probes in short."""
    probes = RateSearch(Server(in_short, slo=slo), 0.05)
    probes.run()
    search = RateSearch(Server(wait, slo=slo, is_long=True), 0.05, probes)
    search.run()
    return search


def test_both_ends_are_measured_at_length_and_nothing_else() -> None:
    search = rate_at_length(queue)

    assert search.proposal is not None
    assert search.edge == search.proposal.edge
    assert set(search.probes) == set(search.edge)
    assert "Confirmed over 4 times as much of the load as a probe has, in other requests." in told(search)


@pytest.mark.parametrize("slower", [0.85, 1.2])
def test_where_a_probe_was_too_short_the_answer_is_that_of_the_longer_one(slower: float) -> None:
    search = rate_at_length(lambda rate, limit: queue(rate * slower, limit))

    holds, fails = search.edge
    assert holds is not None
    assert fails is not None
    assert holds <= 16 / slower <= fails <= holds * 1.06
    assert "the shorter probes said 1" in told(search)
    assert "Confirmed" not in told(search)


def test_that_it_is_impossible_is_confirmed_too() -> None:
    search = rate_at_length(queue, slo="p99_ttft:40")

    assert search.is_impossible
    assert told(search).endswith("in other requests.")


def test_what_is_possible_after_all_is_said_so() -> None:
    search = rate_at_length(queue, in_short=lambda rate, limit: 260.0)

    assert not search.is_impossible
    assert "the shorter probes said that it cannot be met" in told(search)


def test_limits_are_measured_at_length_at_their_ends() -> None:
    probes = LimitSearch(Server(waits, refusals), 0.01)
    probes.run()
    server = Server(waits, refusals, is_long=True)
    search = LimitSearch(server, 0.01, probes)
    search.run()

    assert server.tried == ["inflight none", *(f"inflight {limit}" for limit in (19, 18, 24, 26, 25))]
    assert "Confirmed over 4 times as much" in told(search)


def test_other_limits_at_length_are_told_beside_those_of_the_probes() -> None:
    probes = LimitSearch(Server(waits, refusals), 0.01)
    probes.run()
    search = LimitSearch(Server(lambda rate, limit: 1.1 * waits(rate, limit), refusals, is_long=True), 0.01)
    search.proposal = probes
    search.run()

    assert told(search).startswith("the goal is kept with limits from 19 to 22.")
    assert "the shorter probes said limits from 19 to 24." in told(search)


@pytest.mark.parametrize(
    ("flags", "is_spaced", "changes"),
    [
        ({"num_requests": 200}, True, {"num_requests": 800}),
        ({"duration": 10.0}, True, {"duration": 40.0}),
        ({"num_requests": 32}, False, {"repeats": 32}),  # of one burst
        ({"trace": Path("t.csv"), "num_requests": 32}, False, {"repeats": 32}),
    ],
)
def test_at_length_is_four_times_the_load_in_other_requests(
    flags: dict[str, Any], is_spaced: bool, changes: dict[str, Any]
) -> None:
    found = longer(SweepOptions(**flags, seed=6), is_spaced=is_spaced)

    assert found == SweepOptions(**{**flags, "seed": 7, **changes})


def test_a_workload_has_no_other_requests() -> None:
    assert longer(SweepOptions(workload=Path("w.parquet")), is_spaced=False) is None


# --- on a scripted engine


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A scripted engine in place of a model: the models that were loaded."""
    loaded: list[str] = []

    def from_pretrained(model: str, **_: object) -> ScriptedInferenceEngine:
        loaded.append(model)
        return ScriptedInferenceEngine()

    engine = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "roseinfer.engine", SimpleNamespace(InferenceEngine=engine))
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)
    return loaded


def test_one_engine_serves_the_probes_and_what_confirms_them(ask: Ask, loads: list[str]) -> None:
    words = "--slo p95_ttft:0.000001 --num-requests 10 --repeats 2 --prompt-len 3 --run-id it -o out --quiet"
    answer = ask("capacity", *words.split())

    assert answer.code == 0
    assert "cannot be met at any rate" in answer.out
    assert "2 probes were measured, 1 of them at length." in answer.out
    assert loads == ["builtin:gpt2"]
    short, long = (RunFolder.open(Path(f"out/capacity/it{name}-one_user")) for name in ("", "-at_length"))
    assert len(long.read_requests()) == 4 * len(short.read_requests())


# --- what is proposed


def proposing(**flags: Any) -> list[Any]:
    """The options of all that would be measured."""
    options = CapacityOptions(cost_model=COST_MODEL, slo=["p95_ttft:250"], **flags)
    return [prober.options for prober in _probers(options, {*flags, "cost_model"}, "it", False)]


def test_a_proposal_is_of_text_or_token_ids_as_they_are_measured() -> None:
    simulated, *measured = proposing(pretok=True)
    assert [simulated.pretok, *(options.pretok for options in measured)] == [True] * 3
    simulated, *measured = proposing(tokenize_workers=0)
    assert [simulated.tokenize_workers, *(options.tokenize_workers for options in measured)] == [0] * 3


def test_the_sizes_of_a_server_are_those_of_its_simulation_alone() -> None:
    server = {"target": "http://localhost:1/v1", "tokenizer": "builtin"}
    simulated, *measured = proposing(**server, max_batch_size=128, max_num_batched_tokens=2048)

    assert (simulated.max_batch_size, simulated.max_num_batched_tokens) == (128, 2048)
    assert simulated.pretok  # a server gets token ids where its tokenizer is known
    assert {(options.max_batch_size, options.max_num_batched_tokens) for options in measured} == {(32, None)}
