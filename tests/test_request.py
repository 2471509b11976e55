from __future__ import annotations

import math
from typing import Any

import pytest

from roseinfer.errors import InputError
from roseinfer.request import SamplingParams


@pytest.mark.parametrize("value", [0, -1, 1.5, 8.0, "8", None, True, math.nan])
def test_max_new_tokens_must_be_a_positive_whole_number(value: Any) -> None:  # case B14
    with pytest.raises(InputError, match="max_new_tokens") as caught:
        SamplingParams(max_new_tokens=value)
    assert caught.value.name == "max_new_tokens"
    assert caught.value.value is value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-0.1, math.nan, math.inf, "1", None, True)],
        *[("top_k", value) for value in (-1, 0.5, "3", None, False)],
        *[("top_p", value) for value in (0.0, -0.1, 1.001, math.nan, "1", None, True)],
        *[("seed", value) for value in (-1, 2**63, 1.0, "7", True)],
        *[("stop", value) for value in ("end", ("",), ("a", ""), (1,), ["end"], None)],
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.name == name


def test_bad_params_are_a_value_error_for_callers_who_know_only_python() -> None:
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(top_p=2)


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": 1},
        {"temperature": 0},
        {"temperature": 100.0},
        {"top_k": 0},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"stop": ("end", "\n")},
    ],
)
def test_values_at_the_edge_of_their_range_are_taken(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


def test_params_do_not_change_under_a_running_request() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().max_new_tokens = 3  # type: ignore[misc]
