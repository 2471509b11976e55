"""`ask`: the command line, in this process; and what every test of the benchmark is spared."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from roseinfer.bench import environment
from roseinfer.bench.cli import main
from tests.bench.asking import Answer, Ask

_git, _source_sha256 = cache(environment._git), cache(environment._source_sha256)


@pytest.fixture(autouse=True, scope="module")
def known_code() -> Iterator[None]:
    """Every run asks git and reads all sources, which stay as they are while the tests run: once is enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "_git", _git)
        patch.setattr(environment, "_source_sha256", _source_sha256)
        yield


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ask:
    """`roseinfer-bench` with these words, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def asked(*words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["roseinfer-bench", *words])
        with pytest.raises(SystemExit) as exit_:
            main()
        code = exit_.value.code
        assert code is None or isinstance(code, int)
        return Answer(code or 0, *capsys.readouterr())

    return asked
