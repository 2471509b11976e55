"""A against B: whose code runs, in which order, and what is kept of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest

from roseinfer.bench import ab
from roseinfer.bench.ab import BlockedRuns, Variant
from roseinfer.bench.checkouts import Checkout, checkout, own_folder
from roseinfer.bench.environment import source_sha256
from roseinfer.bench.sides import Side, share_blocks
from roseinfer.errors import InputError, RunError
from roseinfer.sim.cost_model import CostModel, StepCost
from tests.bench.asking import Ask
from tests.bench.made_sides import ENVIRONMENT, stored_run


def package(place: Path, init: str = "") -> Path:
    """A folder with a package of our name in it."""
    (place / "roseinfer").mkdir(parents=True)
    (place / "roseinfer" / "__init__.py").write_text(init)
    return place


class Measurer:
    """Stands for the processes: plans one cell, and measures a burst in no time."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self.stop_at = 1_000_000
        self.sha256: Callable[[Variant], str] = lambda variant: source_sha256(
            variant.checkout.folder / "roseinfer"
        )
        self.cells = {"a": ["limit=None,prompt=32: 8 requests, 1 repeats"]}
        self.cells["b"] = self.cells["a"]

    def __call__(self, variant: Variant, code: str, *words: str, ok: Sequence[int] = (0,)) -> str:
        if "--dry-run" in words:
            return json.dumps(self.cells[variant.name])
        if not words:
            return str(variant.checkout.folder / "roseinfer" / "__init__.py")
        self.asked.append((variant.name, list(words)))
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        value = dict(pairwise(words))
        place = Path(value["--output-dir"])
        environment = {**ENVIRONMENT, "source_sha256": self.sha256(variant)}
        run = stored_run(place, value["--run-id"], (0.01,), environment=environment, order=[["x"]])
        pd.DataFrame({"repeat": [0], "request_index": [0]}).to_parquet(run.path / "workload.parquet")
        (place / value["--experiment-name"]).mkdir(exist_ok=True)
        run.path.rename(place / value["--experiment-name"] / value["--run-id"])
        return ""


@pytest.fixture
def measurer(monkeypatch: pytest.MonkeyPatch) -> Measurer:
    made = Measurer()
    monkeypatch.setattr(ab, "_python", made)
    return made


def blocked(tmp_path: Path, blocks: int = 3, b_flags: Sequence[str] = ()) -> BlockedRuns:
    sides = [package(tmp_path / name, f"# {name}") for name in "ab"]
    variants = (
        Variant("a", Checkout(sides[0], "a", None)),
        Variant("b", Checkout(sides[1], "b", "c0ffee"), b_flags),
    )
    return BlockedRuns(
        variants, ["--burst-size", "8"], blocks, 7, tmp_path / "out", "ab", "run", lambda _: None
    )


def words_of(measurer: Measurer, name: str) -> list[str]:
    return [words[words.index(name) + 1] for _, words in measurer.asked]


def test_blocks_alternate_which_side_is_first(tmp_path: Path, measurer: Measurer) -> None:
    blocked(tmp_path).measure()
    assert "".join(side for side, _ in measurer.asked) == "abbaab"


def test_both_sides_of_a_block_get_the_same_requests(tmp_path: Path, measurer: Measurer) -> None:
    blocked(tmp_path).measure()
    assert words_of(measurer, "--seed") == ["7", "7", "8", "8", "9", "9"]
    assert set(words_of(measurer, "--repeats")) == {"1"}


def test_flags_of_one_side_reach_that_side_only(tmp_path: Path, measurer: Measurer) -> None:
    blocked(tmp_path, 1, ["--max-batch-size", "8"]).measure()
    assert [("--max-batch-size" in words) for _, words in measurer.asked] == [False, True]
    assert all(words[:3] == ["sweep", "--burst-size", "8"] for _, words in measurer.asked)


def test_each_block_is_a_repeat_of_two_runs_that_share_blocks(tmp_path: Path, measurer: Measurer) -> None:
    a, b = (Side(folder) for folder in blocked(tmp_path).measure())
    assert (a.name, b.name) == ("run-a", "run-b")
    assert share_blocks(a, b)
    (cell,) = a.cells
    assert list(a.values(cell, "p99_ttft_ms").index) == [0, 1, 2]
    assert a.folder.is_done
    assert a.manifest["configuration"]["repeats"] == 3
    assert b.manifest["code"] == {"name": "b", "commit": "c0ffee"}
    assert "order" not in a.manifest


def test_the_requests_of_all_blocks_are_kept(tmp_path: Path, measurer: Measurer) -> None:
    a, _ = blocked(tmp_path).measure()
    assert list(pd.read_parquet(a.path / "workload.parquet")["repeat"]) == [0, 1, 2]


def test_nothing_else_is_left_behind(tmp_path: Path, measurer: Measurer) -> None:
    blocked(tmp_path).measure()
    assert {path.name for path in (tmp_path / "out" / "ab").iterdir()} == {"run-a", "run-b"}


def test_a_side_that_ran_other_code_ends_the_comparison(tmp_path: Path, measurer: Measurer) -> None:
    measurer.sha256 = lambda variant: "other"
    with pytest.raises(RunError, match="side a did not run the code of a"):
        blocked(tmp_path).measure()


def test_an_interrupted_comparison_keeps_and_names_whole_blocks(tmp_path: Path, measurer: Measurer) -> None:
    measurer.stop_at = 5  # a b, b a, a
    runs = blocked(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        runs.measure()
    path = tmp_path / "out" / "ab"
    assert runs.so_far() == (
        f"2 of 3 blocks are on disk. To judge them: roseinfer-bench check {path / 'run-b'}"
        f" --baseline {path / 'run-a'}"
    )
    sides = [Side.open(path / name, "RUN") for name in ("run-a", "run-b")]
    assert [len(side.folder.finished_cells()) for side in sides] == [2, 2]


def test_interrupted_in_its_first_block_it_says_so(tmp_path: Path, measurer: Measurer) -> None:
    measurer.stop_at = 2
    runs = blocked(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        runs.measure()
    assert runs.so_far() == "no block was finished"


def test_sides_of_other_cells_are_refused(tmp_path: Path, measurer: Measurer) -> None:
    measurer.cells["b"] = ["limit=64: 8 requests, 1 repeats"]
    with pytest.raises(
        InputError, match=r"sweep both values instead.*a has limit=None,prompt=32, b has limit=64"
    ):
        blocked(tmp_path).check()


def test_a_run_of_the_same_name_is_left_alone(tmp_path: Path, measurer: Measurer) -> None:
    blocked(tmp_path).measure()
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(InputError, match=r"--run-id 'run'.*has a run of this id"):
        blocked(tmp_path).check()


# --- real processes


def test_the_folder_named_wins_over_the_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(package(tmp_path / "here"))  # nor does the current folder
    runs = blocked(tmp_path)
    for variant in runs.variants:
        said = ab._python(variant, "import roseinfer; print(roseinfer.__file__)")
        assert said.strip() == str(variant.checkout.folder / "roseinfer" / "__init__.py")


def test_what_a_process_refuses_is_bad_input_of_its_side(tmp_path: Path) -> None:
    variant = blocked(tmp_path).variants[0]
    with pytest.raises(InputError, match=r"flags of sweep.*: side a refuses them: no such flag"):
        ab._python(variant, "import sys; sys.exit(sys.stderr.write('roseinfer-bench: no such flag') and 2)")
    with pytest.raises(RunError, match="side a ended with code 1: out of memory"):
        ab._python(variant, "import sys; sys.exit(sys.stderr.write('out of memory') and 1)")
    with pytest.raises(KeyboardInterrupt):
        ab._python(variant, "import sys; sys.exit(130)")


def test_two_versions_of_the_code_side_by_side(ask: Ask, tmp_path: Path) -> None:
    """The whole command, over the simulated engine; side b is this code with one file more, and a smaller batch."""
    changed = tmp_path / "changed"
    shutil.copytree(
        own_folder() / "roseinfer", changed / "roseinfer", ignore=shutil.ignore_patterns("__pycache__")
    )
    (changed / "roseinfer" / "other.py").write_text("# other code\n")
    CostModel("made up", StepCost(0.01, 1e-4, 0.0, 1e-3, 0.0)).write(tmp_path / "costs.json")
    words = "--target sim --cost-model costs.json --burst-size 4 --blocks 1 --run-id x --b-flags".split()
    answer = ask("ab", "--b", "changed", *words, "--max-batch-size 2", "--json")
    found = json.loads(answer.out)
    assert (answer.code, found["verdict"]) == (1, "FAIL")
    a, b = (json.loads((tmp_path / "results" / "ab" / f"x-{name}" / "run.json").read_text()) for name in "ab")
    assert a["blocks"] == b["blocks"] == "x"
    shas = [run["environment"]["source_sha256"] for run in (a, b)]
    assert shas[1] == source_sha256(changed / "roseinfer") != shas[0]
    assert found["notes"][0].startswith("4 of 4 simulated requests differ")


# --- checkouts


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits: the package says old in the first, and new in the second; edited says the working tree."""
    place = package(tmp_path / "repository", "old")
    monkeypatch.chdir(place)
    who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    for text in ("old", "new"):
        (place / "roseinfer" / "__init__.py").write_text(text)
        for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", text]):
            subprocess.run(["git", *words], cwd=place, check=True, capture_output=True)
    (place / "roseinfer" / "__init__.py").write_text("edited")
    return place


def said(found: Checkout) -> str:
    return (found.folder / "roseinfer" / "__init__.py").read_text()


@pytest.mark.parametrize(("revision", "text"), [("HEAD", "new"), ("HEAD~1", "old")])
def test_a_revision_is_unpacked_aside(repository: Path, tmp_path: Path, revision: str, text: str) -> None:
    found = checkout("--a", revision, tmp_path / "aside")
    assert said(found) == text
    assert found.commit is not None
    assert len(found.commit) == 40
    assert (repository / "roseinfer" / "__init__.py").read_text() == "edited"


def test_a_folder_is_copied_with_its_edits(repository: Path, tmp_path: Path) -> None:
    found = checkout("--a", ".", tmp_path / "aside")
    (repository / "roseinfer" / "__init__.py").write_text("edited again")
    assert said(found) == "edited"
    assert found.name == "repository"
    assert found.commit is not None
    assert found.commit.endswith("-dirty")


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize("text", ["no-such-revision", "--help", "HEAD~7", ""])
def test_what_is_neither_folder_nor_revision_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"--b .*neither a folder nor a revision"):
        checkout("--b", text, tmp_path / "aside")


def test_a_revision_without_the_package_is_refused(repository: Path, tmp_path: Path) -> None:
    (repository / "README").write_text("x")
    for words in (["rm", "-rfq", "roseinfer"], ["add", "."]):
        subprocess.run(["git", *words], cwd=repository, check=True)
    who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, "commit", "-qm", "gone"], cwd=repository, check=True)
    with pytest.raises(InputError, match="holds no package"):
        checkout("--b", "HEAD", tmp_path / "aside")
