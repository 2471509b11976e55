"""Cells on a Ray cluster: two nodes of one CPU each, both on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import ray
from ray.cluster_utils import Cluster as TwoNodes

from roseinfer.bench import measurement, ray_shards
from roseinfer.bench.environment import describe_environment, public_command
from roseinfer.bench.experiment import Experiment
from roseinfer.bench.ray_shards import Cluster, RayCrew, machines
from roseinfer.bench.store import RunFolder
from roseinfer.errors import InputError, RunError
from tests.bench.asking import Ask
from tests.bench.experiments import experiment
from tests.bench.mortal_target import COST, Fault, mortal, scripted, simulated

ROOT = Path(__file__).parents[2]
SIZES = {
    "burst_size": "6",
    "prompt_len": "8",
    "max_new_tokens": "3",
    "max_batch_size": 2,
    "max_inflight": "2,4",
    "repeats": 1,
}
CELL = "inflight_4-burst_6-prompt_8-output_3"


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    """A cluster of two nodes, which lasts as long as the tests here do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))  # workers import `tests`
        made = TwoNodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            made.add_node(num_cpus=1)
            yield made
        finally:
            made.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def address(nodes: TwoNodes) -> str:
    return str(nodes.address)


@pytest.fixture(scope="module")
def cluster(address: str) -> Iterator[Cluster]:
    with Cluster(address) as connected:
        yield connected


@pytest.fixture(scope="module")
def cost_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cost") / "tenth.json"
    COST.write(path)
    return path


@pytest.fixture
def simulation(cost_file: Path) -> Experiment:
    return experiment(target="sim", cost_model=cost_file, **SIZES)


def create(path: Path, made: Experiment, **changes: Any) -> RunFolder:
    bench = simulated(made)
    environment = describe_environment() | changes
    manifest = measurement.manifest(made, bench.model, bench.source.table_blocks(), [], "", environment)
    return RunFolder.create(path, "sweep", "run", manifest)


def measure(made: Experiment, folder: RunFolder, run_cells: measurement.RunCells) -> list[str]:
    """What progress was told."""
    told: list[str] = []

    def tell(doing: str, done: int | None = None, total: int | None = None) -> None:
        told.append(f"{done}/{total} {doing}")

    measurement.measure(made, folder, tell, run_cells)
    return told


def on_cluster(cluster: Cluster, bench: measurement.Bench) -> measurement.RunCells:
    return partial(ray_shards.run_cells, bench, cluster.cores())


# ---- simulations ----


def test_a_simulation_leaves_the_tables_that_one_process_leaves(
    tmp_path: Path, cluster: Cluster, simulation: Experiment
) -> None:
    bench = simulated(simulation)
    here, there = create(tmp_path / "here", simulation), create(tmp_path / "there", simulation)
    told_here = measure(simulation, here, partial(measurement.run_cells, bench))
    assert measure(simulation, there, on_cluster(cluster, bench)) == told_here
    pd.testing.assert_frame_equal(there.read_requests(), here.read_requests())
    pd.testing.assert_frame_equal(there.read_steps(), here.read_steps())
    assert there.read_facts() == here.read_facts()


def test_it_goes_on_with_what_is_missing(tmp_path: Path, cluster: Cluster, simulation: Experiment) -> None:
    folder, bench = create(tmp_path, simulation), simulated(simulation)
    done, missing = (measurement.CellRun(cell, 0) for cell in simulation.cells)
    measurement.run_and_save(done, bench, folder)
    assert measure(simulation, folder, on_cluster(cluster, bench)) == [
        f"1/2 repeat 1/1, {missing.cell.cell_id}"
    ]
    assert folder.finished_cells() == {done.key, missing.key}


@pytest.mark.parametrize("how", ["exit", "killed"])
def test_the_cell_of_a_lost_worker_is_run_again(
    tmp_path: Path, cluster: Cluster, simulation: Experiment, how: str
) -> None:
    folder = create(tmp_path, simulation)
    bench = mortal(simulation, Fault(CELL, how), tmp_path / "tally", folder.path)
    told = measure(simulation, folder, on_cluster(cluster, bench))
    assert [line.split()[0] for line in told] == ["0/2", "1/2"]
    assert len(folder.finished_cells()) == len(list((tmp_path / "tally").iterdir())) == 2


def test_a_cell_that_two_workers_were_lost_in_is_named(
    tmp_path: Path, cluster: Cluster, simulation: Experiment
) -> None:
    folder = create(tmp_path, simulation)
    bench = mortal(simulation, Fault(CELL, "exit", times=2), tmp_path / "tally", folder.path)
    with pytest.raises(RunError, match=rf"^{CELL}, repeat 1: its worker died"):
        measure(simulation, folder, on_cluster(cluster, bench))


@pytest.mark.parametrize(
    ("how", "kind", "line"),
    [
        ("input error", InputError, "--burst-size 6: is not to our taste"),
        ("bug", RunError, f"{CELL}, repeat 1: ZeroDivisionError: nothing to share"),
    ],
)
def test_an_error_there_is_the_one_line_that_it_is_here(
    tmp_path: Path, cluster: Cluster, simulation: Experiment, how: str, kind: type[Exception], line: str
) -> None:
    folder = create(tmp_path, simulation)
    bench = mortal(simulation, Fault(CELL, how), tmp_path / "tally", folder.path)
    with pytest.raises(kind) as raised:
        measure(simulation, folder, on_cluster(cluster, bench))
    assert str(raised.value) == line


def test_workers_with_other_code_are_refused(
    tmp_path: Path, cluster: Cluster, simulation: Experiment
) -> None:
    folder = create(tmp_path, simulation, source_sha256="other")
    with pytest.raises(RunError, match="a worker of the Ray cluster does not match this run: the code of"):
        measure(simulation, folder, on_cluster(cluster, simulated(simulation)))


def test_its_workers_are_gone_afterwards(tmp_path: Path, cluster: Cluster, simulation: Experiment) -> None:
    with RayCrew(cluster.cores(), partial(simulated, simulation)) as crew:
        folder = create(tmp_path, simulation)
        measure(simulation, folder, crew.run_cells)
        workers = [worker for worker, _ in crew._idle]
    for worker in workers:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(worker.draw.remote())


def test_a_node_that_was_lost_is_no_death_of_the_cell_that_was_to_run_there(
    tmp_path: Path, nodes: TwoNodes, cluster: Cluster, simulation: Experiment
) -> None:
    known = cluster.cores()
    node = nodes.add_node(num_cpus=1)
    (place,) = [place for place in cluster.cores() if place not in known]
    nodes.remove_node(node, allow_graceful=False)
    run = measurement.CellRun(simulation.cells[0], 0)
    with RayCrew([place, *known], partial(simulated, simulation)) as crew:
        crew.begin(run)
        again, lost = crew.wait()
        assert again == run
        assert lost is not None
        assert not lost.began
        assert crew.has_room()
        assert place not in crew._free


# ---- engines ----


def test_a_measured_cell_has_a_node_to_itself(cluster: Cluster) -> None:
    places = cluster.machines("auto")
    assert [place.options for place in places] == [{"num_cpus": 1.0}] * 2
    assert len({place.node_id for place in places}) == 2


def test_a_gpu_that_is_asked_for_and_not_there_is_missed(cluster: Cluster) -> None:
    with pytest.raises(InputError, match=r"^--device 'cuda': the cluster of --ray .* has no GPU$"):
        cluster.machines("cuda")


def test_engines_are_measured_and_nothing_says_where(tmp_path: Path, cluster: Cluster) -> None:
    made = experiment(**SIZES)
    with machines(cluster, made, scripted) as crew:
        described, workload, notes = crew.draw()
        environment = dict(described.environment)
        manifest = measurement.manifest(made, described.model, [workload], notes, "", environment)
        folder = RunFolder.create(tmp_path, "sweep", "run", manifest)
        measure(made, folder, crew.run_cells)
    requests = folder.read_requests()
    assert requests["target"].unique().tolist() == ["in-process"]
    assert requests.groupby("cell_id")["request_index"].count().tolist() == [6, 6]
    written = (folder.path / "run.json").read_text() + requests.to_csv() + str(folder.read_facts())
    assert socket.gethostname() not in written
    assert str(ROOT) not in written


# ---- the command line ----


def test_a_sweep_on_a_cluster(ask: Ask, address: str, cost_file: Path) -> None:
    words = f"sweep --target sim --cost-model {cost_file} --max-inflight 2,4 --repeats 1 --run-id run"
    answer = ask(*words.split(), "--ray", address)
    assert answer.code == 0
    folder = RunFolder.open(Path("results/sweep/run"))
    assert folder.is_done
    assert folder.manifest["command"].endswith("--ray remote")
    assert "ray" not in folder.manifest["configuration"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--ray cluster", "--ray 'cluster': must be local, HOST:PORT or ray://HOST:PORT"),
        (
            "--ray local --target http://localhost:1/v1",
            "--ray 'local': contradicts a server as --target, which is measured from one place",
        ),
        (
            "--ray local --shards 2 --target sim --cost-model x",
            "--ray 'local': contradicts --shards 2: the cluster says how many share the cells",
        ),
    ],
)
def test_bad_input(ask: Ask, words: str, complaint: str) -> None:
    answer = ask("sweep", *words.split())
    assert (answer.code, answer.complaint) == (2, complaint)


def test_without_ray_it_is_said_how_to_install_it(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.bench.target_flags.find_spec", lambda name: None)
    answer = ask("sweep", "--ray", "local")
    assert (answer.code, answer.complaint) == (2, "--ray 'local': needs Ray: pip install 'roseinfer[ray]'")


def test_a_cluster_that_does_not_answer_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: object) -> None:
        raise ConnectionError("ray client connection timeout\nand more")

    monkeypatch.setattr(ray, "init", refused)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(InputError) as raised, Cluster("auto"):
        pass
    assert str(raised.value) == "--ray 'auto': no Ray cluster answers there: ray client connection timeout"


def test_a_place_where_nobody_listens_is_bad_input_before_ray_tries_for_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with (
        pytest.raises(InputError, match=f"--ray '{address}': no Ray cluster answers there"),
        Cluster(address),
    ):
        pass


def test_a_simulation_that_finds_no_cluster_leaves_no_run(
    ask: Ask, cost_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    words = f"sweep --target sim --cost-model {cost_file} -o out --ray {address}".split()
    answer = ask(*words)
    assert answer.code == 2
    assert answer.complaint.startswith(f"--ray '{address}': no Ray cluster answers there")
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--ray", "local"], "--ray local"),
        (["--ray", "head.example.org:6379"], "--ray remote"),
        (["--ray=ray://10.0.0.1:10001"], "--ray=remote"),
    ],
)
def test_a_run_keeps_no_address_of_a_cluster(words: list[str], kept: str) -> None:
    assert public_command(words) == kept


def test_usage_statistics_are_off(cluster: Cluster) -> None:
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
