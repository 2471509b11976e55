"""The target over HTTP: plays a workload against a server, its own or somebody's, and writes down what came of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pandas as pd

from roseinfer.bench.environment import GcPauses, public_text
from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.http.address import Address
from roseinfer.bench.http.asking import find_model
from roseinfer.bench.http.exchange import Failure, HttpPlayed
from roseinfer.bench.http.rows import attempt_rows, request_row
from roseinfer.bench.http.scrape import Scrape
from roseinfer.bench.http.server_process import ServerProcess, command_for
from roseinfer.bench.http.workers import play
from roseinfer.bench.http_options import BUILTIN_TOKENIZER
from roseinfer.bench.load import Load
from roseinfer.bench.prompts import OnDemand
from roseinfer.bench.records import HTTP
from roseinfer.bench.retries import Retrier
from roseinfer.bench.rows import CellInterrupted, CellResult, factor_columns
from roseinfer.bench.stats import spread_of
from roseinfer.bench.target_flags import api_key
from roseinfer.bench.termination import interruptible
from roseinfer.bench.validity import CellFacts
from roseinfer.bench.words import WordCounter
from roseinfer.bench.workload import Workload
from roseinfer.errors import InputError
from roseinfer.tokenization import FastTokenizer, builtin_tokenizer

DYING_S: Final = 2.0
"""A process that dies loses its connections some time before it has an exit code."""

MOST_TOKENS: Final = 1 << 20
"""What a request may span as far as the client knows: the server is the judge of it."""


class HttpTarget:
    """Runs cells of an experiment on a server, in a `with` that no server outlives which was started for it.

    `warm_ups` draws the bursts that a server is given before anything is measured on it.
    """

    name = HTTP

    def __init__(self, experiment: Experiment, warm_ups: Callable[[], list[Workload]] = list) -> None:
        self._experiment = experiment
        self._options = experiment.options
        self._warm_ups = warm_ups
        self._address = Address.parse(self._options.target)
        self._api_key = api_key(self._options)
        self._endpoint = self._address.endpoint(self._options.api, self._api_key)
        self._model = self._options.model
        self._server: ServerProcess | None = None
        self._is_warm = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def end_block(self) -> None:
        """The next block starts its servers anew."""
        self._stop()

    def describe(self, first: Cell) -> dict[str, Any]:
        """What computes, as run.json says it. Asks the server, which is started for this cell if it has to be.

        Raises InputError where it has no such model, RunError where nobody answers.
        """
        self._serve(first)
        served = find_model(self._address, self._model, self._api_key)
        self._model = served.model
        return {
            "model": public_text(served.model),
            "source": "server",
            "device": self._address.place,
            "server": served.server,
            "url": self._address.public,
            "api": self._options.api,
        }

    def run(self, cell: Cell, workload: Workload) -> CellResult:
        """One cell and repeat, from the first arrival to the end of the last answer.

        Raises RunError where a server that was started for it dies, or the run is impossible, CellInterrupted where a
        user stops it once something was sent.
        """
        with interruptible():
            self._serve(cell)
            self._warm()
        with Scrape(self._address, self._api_key) as scrape:
            played = self._play(self._experiment.load, workload)
        if played.interrupted_s is not None:
            if not any(request.tries for request in played.requests):
                raise KeyboardInterrupt
            raise CellInterrupted(self._result(cell, workload, played, scrape))
        if self._server is not None:
            self._server.check_alive(DYING_S if _lost_connections(played) else 0.0)
        return self._result(cell, workload, played, scrape)

    def _result(self, cell: Cell, workload: Workload, played: HttpPlayed, scrape: Scrape) -> CellResult:
        load, options = self._experiment.load, self._options
        is_one_text = options.prompt is not None and options.tokenizer is not None
        factors = factor_columns(
            self.name, public_text(self._named()), cell, workload, is_one_text=is_one_text
        )
        requests, t0 = played.requests, played.t0
        # How many a closed loop offers until its time ends, or its user's patience, is known to nobody else.
        has_end = load.duration_s is None and played.interrupted_s is None
        open_ended = workload.scheduled_s is None and not has_end
        tries = (row for index, request in enumerate(requests) for row in attempt_rows(index, request, t0))
        return CellResult(
            requests=pd.DataFrame(
                [
                    {
                        **factors,
                        "request_index": index,
                        "priority": workload.class_of(index),
                        **request_row(request, t0),
                    }
                    for index, request in enumerate(requests)
                ]
            ),
            steps=pd.DataFrame(),
            facts=CellFacts(
                offered=len(requests) if open_ended else len(workload.prompt_tokens),
                limit=cell.max_inflight,
                token_limit=cell.admission.tokens,
                peak_inflight=None,
                inflight_integral_s=None,
                inflight_at_start=None,
                started_utc=played.started_utc,
                max_concurrency=load.max_concurrency,
                peak_outstanding=played.peak_outstanding,
                ramp_s=load.ramp_s if load.is_closed else None,
                ran_out_s=played.ran_out_s if load.ends_by_time_alone else None,
                may_be_cached=self._experiment.prompts_may_be_alike,
                client_busy_share_max_100ms=played.client_load.busy_share_max_100ms,
                client_longest_turn_s=played.client_load.longest_turn_s,
                client_p99_read_lag_s=played.client_load.p99_read_lag_s,
                interrupted_s=None if played.interrupted_s is None else played.interrupted_s - t0,
            ),
            notes={
                "client": {
                    **played.client_load._asdict(),
                    "connections": played.connections,
                    "resent": played.resent,
                    "workers": options.client_workers,
                },
                "refill_lag_s": spread_of(played.refill_lags_s),
                "server_metrics": scrape.notes(),
            },
            attempts=pd.DataFrame(list(tries)) if load.retries.is_on else None,
        )

    def _serve(self, cell: Cell) -> None:
        """Sees to it that the server of this cell runs, where it is ours to start."""
        if self._options.target_cmd is None:
            return
        command = command_for(self._options.target_cmd, cell.admission, self._address.port)
        if self._server is None or self._server.command != command:
            self._stop()
            self._server = ServerProcess(command, self._address, self._api_key)

    def _stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            server.stop()
            self._is_warm = False

    def _warm(self) -> None:
        if not self._is_warm:
            load = Load(arrival="burst", timeout_s=self._experiment.load.timeout_s)
            for workload in self._warm_ups():
                if self._play(load, workload).interrupted_s is not None:
                    raise KeyboardInterrupt
        self._is_warm = True

    def _play(self, load: Load, workload: Workload) -> HttpPlayed:
        scheduled_s = None if workload.scheduled_s is None else workload.scheduled_s.tolist()
        with GcPauses(time.perf_counter):  # for its freeze: nothing is collected while the client runs
            return play(
                self._endpoint,
                load,
                scheduled_s,
                self._bodies(workload),
                Retrier(load.retries, workload.prompt_seed),
                client_workers=self._options.client_workers,
            )

    def _bodies(self, workload: Workload) -> OnDemand[bytes]:
        fixed: dict[str, Any] = {
            "model": self._named(),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self._options.stop_at_eos:
            fixed["ignore_eos"] = True
        is_chat, classes = self._options.api == "chat", workload.classes

        def make(index: int) -> bytes:
            prompt = workload.prompts[index]
            asked: dict[str, Any] = (
                {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
            )
            asked["max_tokens"] = int(workload.output_tokens[index])
            if classes is not None:
                asked["priority"] = int(classes.places[index])
            return json.dumps({**fixed, **asked}).encode()

        return OnDemand(make, len(workload.output_tokens))

    def _named(self) -> str:
        """The model as its server names it, by a path maybe, which no record holds.

        Asked for by `describe`, if nobody named it.
        """
        assert self._model is not None
        return self._model


def tokenizer_of(named: str | None) -> FastTokenizer | WordCounter:
    """That of --tokenizer; without one lengths are in words. Raises InputError where there is none in that folder."""
    if named is None:
        return WordCounter()
    if named == BUILTIN_TOKENIZER:
        return builtin_tokenizer()
    from tokenizers import Tokenizer

    try:
        return FastTokenizer(
            Tokenizer.from_str((Path(named).expanduser() / "tokenizer.json").read_text("utf-8"))
        )
    except OSError as error:
        raise InputError("--tokenizer", named, f"tokenizer.json: {error.strerror}") from error
    except Exception as error:  # the library raises plain ones
        raise InputError("--tokenizer", named, f"tokenizer.json is not one: {error}") from error


def told_of_lengths(experiment: Experiment) -> list[str]:
    """What a reader of the record must know of its prompt lengths."""
    if experiment.options.tokenizer is None:
        return ["prompt lengths are in words (no --tokenizer); prompt_tokens are as the server counts them."]
    if not experiment.sends_token_ids:
        return ["prompt lengths are without the chat template; prompt_tokens are as the server counts them."]
    return []


def _lost_connections(played: HttpPlayed) -> bool:
    lost = (Failure.REFUSED, Failure.RESET, Failure.CLOSED)
    return any(attempt.failure in lost for request in played.requests for attempt in request.tries)
