from __future__ import annotations

import pytest

from roseinfer.admission_spec import AdaptiveSpec, AdmissionSpec, CoDelSpec, admission_of, parse_admission
from roseinfer.errors import InputError


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("inflight:64", AdmissionSpec(64)),
        ("tokens:16384", AdmissionSpec(None, 16384)),
        ("inflight:64+tokens:16384", AdmissionSpec(64, 16384)),
        (" tokens:16384 + inflight:064 ", AdmissionSpec(64, 16384)),
        ("none", AdmissionSpec()),
        ("slo:ttft=250ms", AdmissionSpec(slo_ttft_s=0.25)),
        ("queue-timeout:2s", AdmissionSpec(queue_timeout_s=2.0)),
        ("queue-timeout:1.5s", AdmissionSpec(queue_timeout_s=1.5)),
        ("queue-timeout:0.5ms", AdmissionSpec(queue_timeout_s=0.0005)),
        ("codel", AdmissionSpec(codel=CoDelSpec())),
        ("codel:interval=2s:target=250ms", AdmissionSpec(codel=CoDelSpec(0.25, 2.0))),
        ("codel:newest-first", AdmissionSpec(codel=CoDelSpec(newest_first=True))),
        ("aimd", AdmissionSpec(adaptive=AdaptiveSpec("aimd"))),
        (
            "gradient:slowdown=2.5:most=64:floor=2",
            AdmissionSpec(adaptive=AdaptiveSpec("gradient", 2.5, 2, 20, 64)),
        ),
        ("priority", AdmissionSpec(priority_age_s=10.0)),
        ("priority:age=500ms", AdmissionSpec(priority_age_s=0.5)),
        ("priority:age=60s+inflight:3", AdmissionSpec(3, priority_age_s=60.0)),
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
        *(
            "slo",
            "slo:250ms",
            "slo:ttft=0ms",
            "slo:ttft=250",
            "slo:e2e=2s",
            "queue-timeout",
            "queue-timeout:2",
        ),
        *(
            "queue-timeout:-1s",
            "queue-timeout:nans",
            "queue-timeout:infs",
            "queue-timeout:1s:2s",
            "codel:50ms",
        ),
        *(
            "codel:target=2s:interval=1s",
            "codel:target=1s:target=2s",
            "codel:newest",
            "aimd+gradient",
            "aimd:20",
        ),
        *("aimd:init=0", "aimd:floor=30", "aimd:init=2000", "aimd:slowdown=1", "gradient:floor=2:floor=3"),
        *(
            "priority:10s",
            "priority:age=0s",
            "priority+priority",
            "codel:target=",
            "inflight:4:5",
            "tokens:4+",
        ),
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
