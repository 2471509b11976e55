"""What a notebook gets from `import roseinfer.bench as rb`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import roseinfer.bench as rb
from roseinfer.bench import explain, measurement, unattended
from roseinfer.bench.measurement import summary_of
from roseinfer.bench.records import REQUEST_SCHEMA, STEP_SCHEMA, TTFT_PARTS
from roseinfer.bench.store import RunFolder
from roseinfer.bench.summary import SUMMARY_SCHEMA
from roseinfer.errors import InputError

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
RUNS = sorted(path.parent for path in REFERENCE.glob("*/*/run.json"))


def test_the_public_names_are_exactly_these() -> None:
    assert rb.__all__ == ["load_requests", "load_steps", "load_summary", "sweep"]


def test_no_module_of_the_package_hides_a_public_name() -> None:
    # importing `roseinfer.bench.sweep` would put a module in the place of the function
    modules = {path.stem for path in Path(rb.__file__).parent.glob("*.py")}

    assert not modules & set(rb.__all__)
    assert callable(rb.sweep)
    assert all(
        module.__name__.startswith("roseinfer.bench.") for module in (explain, measurement, unattended)
    )


def test_importing_it_imports_nothing_slow() -> None:
    code = "import sys, roseinfer.bench; print(*{'torch', 'transformers', 'pandas', 'matplotlib'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.parent.name)
def test_reference_runs_load_with_cells_in_order(run: Path) -> None:
    # they were made by earlier versions: columns that these did not have are there, and null
    requests, steps, summary = rb.load_requests(run), rb.load_steps(run), rb.load_summary(run)

    assert {*REQUEST_SCHEMA.names, *TTFT_PARTS, "limit", "cell"} <= set(requests.columns)
    assert {*STEP_SCHEMA.names, "exec_s", "limit", "cell"} == set(steps.columns)
    assert {*SUMMARY_SCHEMA.names, "limit", "cell"} == set(summary.columns)
    for frame in (requests, steps, summary):
        assert frame["cell"].cat.ordered
        limits = list(frame["limit"].cat.categories)
        assert limits[-1] == "no limit" or "none" not in set(requests["admission"])
        assert frame[["limit", "cell"]].notna().all(axis=None)


@pytest.mark.parametrize(
    "run", [run for run in RUNS if run.parent.name != "foreign_server"], ids=lambda run: run.parent.name
)
def test_steps_have_the_labels_of_their_cells(run: Path) -> None:
    requests, steps = rb.load_requests(run), rb.load_steps(run)

    names = [frame.groupby("cell_id")["cell"].first().astype(str) for frame in (requests, steps)]
    pd.testing.assert_series_equal(names[0], names[1])
    np.testing.assert_allclose(steps["exec_s"], steps["exec_end_s"] - steps["exec_start_s"])


def test_nobody_saw_the_steps_of_a_server() -> None:
    (run,) = (run for run in RUNS if run.parent.name == "foreign_server")
    assert rb.load_steps(run).empty


def test_the_frames_are_the_run_and_no_more() -> None:
    folder = RunFolder.open(RUNS[0])
    derived = rb.load_requests(RUNS[0])[REQUEST_SCHEMA.names]

    pd.testing.assert_frame_equal(derived, folder.read_requests())
    pd.testing.assert_frame_equal(rb.load_summary(RUNS[0])[SUMMARY_SCHEMA.names], summary_of(folder))


def test_what_is_no_run_is_an_input_error(tmp_path: Path) -> None:
    for load in (rb.load_requests, rb.load_steps, rb.load_summary):
        with pytest.raises(InputError, match="no run to read here"):
            load(tmp_path)
