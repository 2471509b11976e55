from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import roseinfer

PUBLIC_NAMES = """
    FinishReason InferenceEngine InputError InvariantError ManagerClosedError ModelError PromptTooLongError
    RequestFailedError RequestStream RoseinferError RunError SamplingParams SchedulerManager
    SchedulerManagerOverloadedError
""".split()

PACKAGE = Path(roseinfer.__file__).parent
CORE_FILES = """
    admission.py admission_spec.py core.py errors.py executor.py kv_cache.py request.py scheduler.py sim/__init__.py
    sim/virtual.py
""".split()
CLOCKS_THREADS_AND_TENSORS = {
    *(
        "time",
        "datetime",
        "sched",
        "signal",
        "asyncio",
        "concurrent",
        "multiprocessing",
        "threading",
        "queue",
    ),
    *("torch", "transformers", "numpy"),
}


def test_the_public_names_are_exactly_these() -> None:
    assert sorted(roseinfer.__all__) == sorted(PUBLIC_NAMES)


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(roseinfer, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="InferenceMotor"):
        _ = roseinfer.InferenceMotor


@pytest.mark.parametrize("module", ["roseinfer", "roseinfer.bench.cli", "roseinfer.sim.virtual"])
def test_importing_it_brings_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print(*{{'torch', 'transformers', 'gguf'}} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("file", CORE_FILES)
def test_the_core_knows_no_clock_no_thread_and_no_tensor(file: str) -> None:
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse((PACKAGE / file).read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    allowed = {"threading"} if file == "admission.py" else set()  # its lock
    assert imported & CLOCKS_THREADS_AND_TENSORS <= allowed


def test_admission_takes_a_lock_from_threading_and_nothing_else() -> None:
    used = {
        node.attr
        for node in ast.walk(ast.parse((PACKAGE / "admission.py").read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "threading"
    }
    assert used == {"RLock"}
