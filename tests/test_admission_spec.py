from __future__ import annotations

import pytest

from roseinfer.admission_spec import AdmissionSpec, admission_of, parse_admission
from roseinfer.errors import InputError


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("inflight:64", AdmissionSpec(64)),
        ("tokens:16384", AdmissionSpec(None, 16384)),
        ("inflight:64+tokens:16384", AdmissionSpec(64, 16384)),
        (" tokens:16384 + inflight:064 ", AdmissionSpec(64, 16384)),
        ("none", AdmissionSpec()),
    ],
)
def test_a_limit_is_read_and_written_in_one_form(text: str, spec: AdmissionSpec) -> None:
    assert parse_admission(text) == spec
    assert parse_admission(str(spec)) == spec


@pytest.mark.parametrize(
    "text",
    [
        *("", "64", "inflight", "inflight:", "inflight:0", "inflight:-1", "inflight:1.5", "inflight:1_0"),
        *("inflights:4", "tokens:4,", "tokens:4+", "+tokens:4", "tokens:4+tokens:5", "none+tokens:4"),
        *("tokens:²", "tokens:٣", "tokens:99999999999", "tokens:" + "9" * 5000, "max_inflight:4", "NONE"),
    ],
)
def test_what_is_no_limit_is_named(text: str) -> None:  # case A10
    with pytest.raises(InputError) as caught:
        parse_admission(text, "--admission")
    assert (caught.value.name, caught.value.value) == ("--admission", text)


def test_the_short_form_is_of_requests() -> None:
    assert admission_of(64, None) == parse_admission("inflight:64")
    assert admission_of(None, None) == AdmissionSpec()
    assert admission_of(None, "tokens:5") == AdmissionSpec(None, 5)


def test_both_forms_together_are_refused_and_named() -> None:
    with pytest.raises(InputError, match=r"admission 'tokens:5'.*max_inflight_requests 64"):
        admission_of(64, "tokens:5")
