"""The notebooks run from the first cell to the last on what results/reference holds, and show what they say they do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
SIZE_LIMIT = 400_000
PLACE_OF_A_MACHINE = re.compile(
    r"(?<![\w.])/(?:home|root|Users|tmp|work|usr|var|opt|mnt)/|[A-Z]:\\\\|https?://"
)

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> NotebookNode:
    notebook: NotebookNode = nbformat.read(path, 4)  # type: ignore[no-untyped-call]
    return notebook


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def texts(notebook: NotebookNode) -> Iterator[str]:
    """What cells printed or showed, but for pictures."""
    for output in outputs(notebook):
        if output.output_type == "stream":
            yield output.text
        elif "image/png" not in output.data:
            yield output.data["text/plain"]


def test_there_are_notebooks() -> None:
    assert [path.name[:3] for path in NOTEBOOKS] == ["01_", "02_", "03_", "04_", "05_"]


@each_notebook
def test_it_runs_afresh_and_says_what_its_kept_outputs_say(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    kept, fresh = read(path), read(path)

    NotebookClient(fresh, timeout=90, resources={"metadata": {"path": str(path.parent)}}).execute()

    assert list(texts(fresh)) == list(texts(kept))  # else: run it in Jupyter and save it


@each_notebook
def test_its_outputs_are_kept_whole_and_small(path: Path) -> None:
    notebook = read(path)

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [o for o in outputs(notebook) if o.output_type == "error" or o.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", ()) for output in outputs(notebook)) >= 3
    assert path.stat().st_size < SIZE_LIMIT


@each_notebook
def test_it_tells_nothing_about_the_machine_it_was_run_on(path: Path) -> None:
    notebook = read(path)

    found = [*texts(notebook), *(cell.source for cell in notebook.cells), str(notebook.metadata)]
    assert not [text for text in found if PLACE_OF_A_MACHINE.search(text)]
