"""Cells on a Ray cluster: each of its workers runs one at a time, and what it found travels back to be saved here."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import pandas as pd
import pyarrow as pa
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roseinfer.bench import measurement
from roseinfer.bench.environment import describe_environment
from roseinfer.bench.experiment import Experiment
from roseinfer.bench.measurement import Bench, CellRun
from roseinfer.bench.shards import Lost, outcome, share_out
from roseinfer.bench.store import RunFolder, differences
from roseinfer.errors import InputError, RunError
from roseinfer.model_source import local_path
from roseinfer.openmp import spin_briefly

NEWLINE: Final = "\n"

CONNECT_S: Final = 5.0
"""Patience with the place of a cluster."""


class Cluster:
    """In its `with` this process is connected to a Ray cluster, or, with "local", has started one of its own.

    Raises InputError("--ray", ...) where none answers.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._is_ours = not ray.is_initialized()  # else whoever connected this process ends that too

    def __enter__(self) -> Self:
        if not self._is_ours:
            return self
        self._check_somebody_answers()
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # what Ray announces as its future default
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address=self.address,
                include_dashboard=False if self.address == "local" else None,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            why = f"no Ray cluster answers there: {str(error).partition(NEWLINE)[0]}"
            raise InputError("--ray", self.address, why) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own ends the process without a word
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_ours:
            ray.shutdown()

    def _check_somebody_answers(self) -> None:
        """Ray itself would try for minutes."""
        host, colon, port = self.address.removeprefix("ray://").rpartition(":")
        if not (colon and port.isascii() and port.isdigit()):
            return  # no place on the network: Ray knows what it means, or says that it does not
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise InputError("--ray", self.address, f"no Ray cluster answers there: {error}") from error

    def cores(self) -> list[Place]:
        """A place for each CPU, to simulate on."""
        return self._places("CPU", lambda count: [{"num_cpus": 1}] * int(count))

    def machines(self, device: str) -> list[Place]:
        """A place for each GPU, or, on CPUs, for each node: nothing else that Ray runs is there with it."""
        if device != "cpu" and any(resources.get("GPU") for resources in _nodes().values()):
            return self._places("GPU", lambda count: [{"num_gpus": 1, "num_cpus": 1}] * int(count))
        if device == "cuda":
            raise InputError("--device", device, f"the cluster of --ray {self.address} has no GPU")
        return self._places("CPU", lambda count: [{"num_cpus": count}])

    def _places(self, resource: str, of_node: Callable[[float], list[dict[str, Any]]]) -> list[Place]:
        places = [
            Place(node_id, options)
            for node_id, resources in _nodes().items()
            if resources.get(resource)
            for options in of_node(resources[resource])
        ]
        if not places:
            raise InputError("--ray", self.address, f"that cluster has no {resource} to give")
        return places


class Place(NamedTuple):
    """What one worker takes of the cluster, as options of a Ray actor, and on which node."""

    node_id: str
    options: dict[str, Any]


def _nodes() -> dict[str, dict[str, float]]:
    """The resources of the nodes that are alive."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]


class Described(NamedTuple):
    """What run.json says of a worker."""

    model: dict[str, Any]
    environment: dict[str, object]


class _InStore:
    """Rows in the store of the cluster, which is not this process and goes to disk where they are more than it holds.

    `rows` says where, by the name of their table; they are gone with the worker.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[str, Any]] = []

    def add(self, name: str, rows: pd.DataFrame | pa.Table) -> None:
        self.rows.append((name, ray.put(rows)))


class Answer(NamedTuple):
    """What a worker says of a cell: where its rows are, and its facts."""

    described: Described
    rows: list[tuple[str, Any]]
    facts: dict[str, Any]


class _Worker:
    """Lives in a process of the cluster. Errors are returned: whatever is raised means that the worker is lost."""

    def __init__(self, make_bench: Callable[[], Bench]) -> None:
        self._make_bench = make_bench
        self._ready: tuple[Bench, Described] | None = None

    def draw(self) -> tuple[Described, pd.DataFrame, list[str]] | Exception:
        return outcome("setting up", self._draw)

    def run(self, run: CellRun) -> Answer | Exception:
        return outcome(str(run), partial(self._run, run))

    def _draw(self) -> tuple[Described, pd.DataFrame, list[str]]:
        bench, described = self._set_up()
        workload = bench.source.table()
        return described, workload, bench.source.notes

    def _run(self, run: CellRun) -> Answer:
        bench, described = self._set_up()
        taken = _InStore()
        facts = measurement.record(run, bench, taken)
        return Answer(described, taken.rows, facts)

    def _set_up(self) -> tuple[Bench, Described]:
        if self._ready is None:
            spin_briefly()  # before anything loads torch
            bench = self._make_bench()
            self._ready = bench, Described(bench.model, describe_environment())
        return self._ready


class RayCrew:
    """Workers on a cluster, one a place, each started when it is first needed. This process alone saves."""

    def __init__(self, places: Sequence[Place], make_bench: Callable[[], Bench]) -> None:
        self._free = list(places)
        self._make_bench = make_bench
        self._idle: list[tuple[Any, Place]] = []
        self._busy: dict[Any, tuple[Any, Place, CellRun]] = {}
        self._started: dict[Any, Any] = {}  # of each worker what it answers first
        self._folder: RunFolder | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        workers = [worker for worker, _ in self._idle] + [worker for worker, _, _ in self._busy.values()]
        for worker in workers:
            ray.kill(worker)

    def draw(self) -> tuple[Described, pd.DataFrame, list[str]]:
        """What the first worker is, all requests of the experiment, and sentences on them."""
        worker, place = self._worker()
        self._idle.append((worker, place))
        try:
            answer: tuple[Described, pd.DataFrame, list[str]] | Exception = ray.get(worker.draw.remote())
        except RayError as error:
            raise RunError(f"the first worker was lost: {_reason(error)}") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run_cells(
        self, folder: RunFolder, todo: Sequence[CellRun], begins: Callable[[CellRun], None]
    ) -> None:
        """Runs all of `todo`, and saves what comes back."""
        self._folder = folder
        share_out(todo, self, begins)

    def has_room(self) -> bool:
        alive = _nodes().keys()
        self._idle = [(worker, place) for worker, place in self._idle if place.node_id in alive]
        self._free = [place for place in self._free if place.node_id in alive]
        return bool(self._idle or self._free)

    def begin(self, run: CellRun) -> None:
        worker, place = self._worker()
        self._busy[worker.run.remote(run)] = worker, place, run

    def wait(self) -> tuple[CellRun, Lost | None]:
        if not self._busy:
            raise RunError("the Ray cluster has lost every machine that it had")
        (answered,), _ = ray.wait(list(self._busy), num_returns=1)
        worker, place, run = self._busy.pop(answered)
        try:
            answer: Answer | Exception = ray.get(answered)
            if not isinstance(answer, Exception):
                self._save(run, answer)
        except RayError as error:
            ray.kill(worker)
            if place.node_id in _nodes():
                self._free.append(place)
            return run, Lost(_reason(error), began=_has_started(self._started[worker]))
        self._idle.append((worker, place))
        if isinstance(answer, Exception):
            raise answer
        return run, None

    def _save(self, run: CellRun, answer: Answer) -> None:
        assert self._folder is not None
        self._check_same(self._folder, answer.described)
        with self._folder.cell(*run.key) as writer:
            for name, place in answer.rows:
                writer.add(name, ray.get(place))  # one row group at a time
            writer.facts = answer.facts

    def _worker(self) -> tuple[Any, Place]:
        if self._idle:
            return self._idle.pop()
        place = self._free.pop(0)
        there = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
        actor = ray.remote(_Worker).options(scheduling_strategy=there, **place.options)
        worker: Any = actor.remote(self._make_bench)
        self._started[worker] = worker.__ray_ready__.remote()
        return worker, place

    @staticmethod
    def _check_same(folder: RunFolder, described: Described) -> None:
        known = folder.manifest
        if found := differences(known, {**known, **described._asdict()}):
            raise RunError(f"a worker of the Ray cluster does not match this run: {'; '.join(found)}")


def run_cells(
    bench: Bench,
    places: Sequence[Place],
    folder: RunFolder,
    todo: Sequence[CellRun],
    begins: Callable[[CellRun], None],
) -> None:
    """Runs all of `todo`, cells of a simulation, on these places of a cluster, and saves what comes back."""
    with RayCrew(places, partial(_given, bench)) as crew:
        crew.run_cells(folder, todo, begins)


def machines(cluster: Cluster, experiment: Experiment, load: Callable[[Experiment], Bench]) -> RayCrew:
    """Workers that measure the engine that `load` loads, each on a GPU or a node of its own and warmed up."""
    model = local_path(experiment.model)
    if model.exists():  # a worker is in another folder
        options = replace(experiment.options, model=str(model.absolute()))
        experiment = replace(experiment, options=options)
    return RayCrew(cluster.machines(experiment.options.device), partial(_warmed_up, load, experiment))


def _given(bench: Bench) -> Bench:
    return bench


def _warmed_up(load: Callable[[Experiment], Bench], experiment: Experiment) -> Bench:
    bench = load(experiment)
    measurement.warm_up(experiment, bench.target, bench.source, lambda *_: None)
    return bench


def _has_started(answer: Any) -> bool:
    """Whether a worker that is lost has ever been there: its node may have been gone before."""
    try:
        ray.get(answer)
    except RayError:
        return False
    return True


def _reason(error: Exception) -> str:
    return str(error).strip().rpartition(NEWLINE)[2]
