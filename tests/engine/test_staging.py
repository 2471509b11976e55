"""The one copy of a step, on a device that is the host itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from roseinfer.engine.staging import Direct, Staged, staging_for

CPU = torch.device("cpu")
ARRAYS: list[NDArray[Any]] = [
    np.arange(5),
    np.array([[1.5, 2.5], [3.5, 4.5]], np.float32),
    np.array([True, False, True]),
    np.zeros(0, np.int64),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.array([2**63 - 1]),
]


def sent(staged: Staged, arrays: list[NDArray[Any]]) -> list[torch.Tensor]:
    staged.begin()
    tensors = [staged.put(array) for array in arrays]
    staged.send()
    return tensors


def test_all_arrive_as_they_were() -> None:
    for tensor, array in zip(sent(Staged(CPU), ARRAYS), ARRAYS, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.from_numpy(array).dtype


def test_what_is_no_row_of_memory_arrives_too() -> None:
    array = np.arange(12).reshape(3, 4).T
    (tensor,) = sent(Staged(CPU), [array])
    assert tensor.tolist() == array.tolist()


def test_nothing_arrives_before_it_is_sent() -> None:
    staged = Staged(CPU)
    tensor = staged.put(np.array([1]))
    assert tensor.tolist() == [0]
    staged.send()
    assert tensor.tolist() == [1]


def test_a_step_that_is_prepared_leaves_the_last_one_alone() -> None:
    staged = Staged(CPU)
    (running,) = sent(staged, [np.array([1, 2])])
    staged.begin()
    staged.put(np.array([3, 4]))
    assert running.tolist() == [1, 2]


def test_the_same_arrays_lie_at_the_same_addresses_in_every_step() -> None:
    staged = Staged(CPU)
    first = [tensor.data_ptr() for tensor in sent(staged, ARRAYS)]
    sent(staged, ARRAYS[2:])
    assert [tensor.data_ptr() for tensor in sent(staged, ARRAYS)] == first


def test_what_finds_no_room_goes_by_itself() -> None:
    small, large = sent(Staged(CPU, num_bytes=64), [np.arange(4), np.arange(8)])
    assert (small.tolist(), large.tolist()) == ([*range(4)], [*range(8)])


def test_memory_is_pinned_for_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    empty = torch.empty

    def noted(*sizes: Any, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*sizes, **kwargs)

    monkeypatch.setattr(torch, "empty", noted)
    Staged(CPU)
    monkeypatch.setattr(torch, "zeros", lambda n, device, **kwargs: empty(n, **kwargs))
    Staged(torch.device("cuda"))
    assert asked == [False, True]


def test_a_cpu_has_no_way_to_go() -> None:
    staging = staging_for(CPU)
    assert isinstance(staging, Direct)
    array = np.arange(3)
    assert staging.put(array).data_ptr() == array.ctypes.data
