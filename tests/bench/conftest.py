"""`ask`: the command line, in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from roseinfer.bench.cli import main
from tests.bench.asking import Answer, Ask


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
