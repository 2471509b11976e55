"""What an admission policy looks like as text: `inflight:64`, `tokens:16384+queue-timeout:2s`, `none`.

Parts are joined with `+`; a part's parameters follow it, each behind a `:`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from roseinfer.errors import QUEUE_TIMEOUT, SLO_NEVER_MET, InputError

NO_LIMIT: Final = "none"
_LARGEST: Final = 2**31 - 1
_LONGEST_S: Final = 86_400.0


class CoDelSpec(NamedTuple):
    """Sheds at dequeue once the delay stood above `target_s` for `interval_s`."""

    target_s: float = 0.05
    interval_s: float = 0.5
    newest_first: bool = False


class AdaptiveSpec(NamedTuple):
    """A limit on requests that finds itself: by `kind`, "aimd" or "gradient", kept within [floor, most].

    slowdown: what a request may take until its prefill is done, over what it takes alone.
    """

    kind: str
    slowdown: float = 3.0
    floor: int = 1
    init: int = 20
    most: int = 1000


class AdmissionSpec(NamedTuple):
    """Which requests get in, and which of them are dropped while they wait. None: not asked for.

    inflight: bound on requests in flight.
    tokens: bound on the sum over them of prompt + max_new_tokens.
    adaptive: a bound on requests that moves.
    slo_ttft_s: what is predicted to miss this TTFT is refused.
    queue_timeout_s: what has waited for so long is dropped.
    codel: sheds by standing delay.
    priority_age_s: lanes by priority; so long a wait is worth one class.
    """

    inflight: int | None = None
    tokens: int | None = None
    adaptive: AdaptiveSpec | None = None
    slo_ttft_s: float | None = None
    queue_timeout_s: float | None = None
    codel: CoDelSpec | None = None
    priority_age_s: float | None = None

    def __str__(self) -> str:
        """As `parse_admission` takes it, always the same for the same policy."""
        return "+".join(self._parts()) or NO_LIMIT

    @property
    def is_count_alone(self) -> bool:
        """Nothing but a bound on requests, or no bound: what `--max-inflight` can say."""
        return self == AdmissionSpec(self.inflight)

    @property
    def needs_cost_model(self) -> bool:
        """It weighs what a request will cost."""
        return self.adaptive is not None or self.slo_ttft_s is not None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Of the refusals that its parts beside the bounds on requests and tokens give."""
        of_parts = {
            "slo": self.slo_ttft_s,
            SLO_NEVER_MET: self.slo_ttft_s,
            QUEUE_TIMEOUT: self.queue_timeout_s,
            "codel": self.codel,
            "evicted": self.priority_age_s,
        }
        adaptive = () if self.adaptive is None else (self.adaptive.kind,)
        return (*adaptive, *(reason for reason, part in of_parts.items() if part is not None))

    @property
    def label(self) -> str:
        """What tables and figures call it: "64", "tokens 16384", "inflight 64, tokens 16384", "no limit"."""
        if self.is_count_alone:
            return "no limit" if self.inflight is None else str(self.inflight)
        return ", ".join(part.replace(":", " ") for part in self._parts())

    @property
    def slug(self) -> str:
        """What names of cells and files call it."""
        parts = self._parts() or [f"inflight:{NO_LIMIT}"]
        return "-".join(part.replace(":", "_").replace("=", "_") for part in parts)

    @property
    def place(self) -> tuple[int, int, int, str]:
        """Sorts requests alone first, then tokens alone, then both, each from the tightest, then all other policies,
        and no limit last.
        """
        if self == AdmissionSpec():
            kind = 4
        elif self != AdmissionSpec(self.inflight, self.tokens):
            kind = 3
        else:
            kind = {(True, False): 0, (False, True): 1}.get(
                (self.inflight is not None, self.tokens is not None), 2
            )
        return kind, self.inflight or 0, self.tokens or 0, str(self)

    def _parts(self) -> list[str]:
        parts = []
        if self.inflight is not None:
            parts.append(f"inflight:{self.inflight}")
        if self.tokens is not None:
            parts.append(f"tokens:{self.tokens}")
        if self.adaptive is not None:
            parts.append(_shown(self.adaptive))
        if self.slo_ttft_s is not None:
            parts.append(f"slo:ttft={duration_text(self.slo_ttft_s)}")
        if self.queue_timeout_s is not None:
            parts.append(f"queue-timeout:{duration_text(self.queue_timeout_s)}")
        if self.codel is not None:
            target_s, interval_s, newest_first = self.codel
            text = f"codel:target={duration_text(target_s)}:interval={duration_text(interval_s)}"
            parts.append(text + (":newest-first" if newest_first else ""))
        if self.priority_age_s is not None:
            parts.append(f"priority:age={duration_text(self.priority_age_s)}")
        return parts


def _shown(spec: AdaptiveSpec) -> str:
    """Its kind, and those of its parameters that are not as they are by themselves."""
    usual = AdaptiveSpec(spec.kind)._asdict()
    own = [f"{name}={value:.10g}" for name, value in spec._asdict().items() if value != usual[name]]
    return ":".join([spec.kind, *own])


def duration_text(seconds: float) -> str:
    """ "250ms" or "2s"; what reads back as the same number."""
    in_ms = f"{seconds * 1000:.10g}"
    if seconds < 1 and float(in_ms) / 1000 == seconds:
        return f"{in_ms}ms"
    return f"{seconds!r}".removesuffix(".0") + "s"


def read_duration(text: str) -> float | None:
    """Seconds of what `duration_text` writes, up to a day; None for what is no such duration."""
    digits = text.removesuffix("ms") if text.endswith("ms") else text.removesuffix("s")
    try:
        number = float(digits)
    except ValueError:
        number = math.nan
    seconds = number / 1000 if text.endswith("ms") else number
    return None if digits == text or not 0 < seconds <= _LONGEST_S else seconds


@lru_cache(maxsize=1024)
def parse_admission(text: str, name: str = "admission") -> AdmissionSpec:
    """Raises InputError of the flag or argument `name` for what is no admission policy."""
    fields: dict[str, Any] = {}
    for part in () if text.strip() == NO_LIMIT else text.split("+"):
        kind, *parameters = part.strip().split(":")
        field, value = _Part(name, text, kind, parameters).read()
        if field in fields:
            why = "names two limits that move" if field == "adaptive" else f"names {kind} twice"
            raise InputError(name, text, why)
        fields[field] = value
    return AdmissionSpec(**fields)


def admission_of(max_inflight_requests: int | None, admission: str | None) -> AdmissionSpec:
    """The policy that was asked for, in its short form or in full. Raises InputError for both together."""
    if admission is None:
        return AdmissionSpec(max_inflight_requests)
    if max_inflight_requests is not None:
        why = f"contradicts max_inflight_requests {max_inflight_requests!r}, which is short for inflight:N"
        raise InputError("admission", admission, why)
    return parse_admission(admission)


class _Part:
    """One part of a text, and whom to blame for it."""

    def __init__(self, name: str, text: str, kind: str, parameters: list[str]) -> None:
        self.name, self.text, self.kind, self.parameters = name, text, kind, parameters

    def read(self) -> tuple[str, Any]:
        """The field of AdmissionSpec, and its value."""
        match self.kind:
            case "inflight" | "tokens":
                return self.kind, self._count(self._only("a number"))
            case "queue-timeout":
                return "queue_timeout_s", self._duration(self._only("a duration"))
            case "slo":
                given = self._given({"ttft": self._duration})
                if "ttft" not in given:
                    raise self._wrong("needs a goal, such as slo:ttft=250ms")
                return "slo_ttft_s", given["ttft"]
            case "priority":
                return "priority_age_s", self._given({"age": self._duration}).get("age", 10.0)
            case "codel":
                newest_first = "newest-first" in self.parameters
                if newest_first:
                    self.parameters.remove("newest-first")
                given = self._given({"target": self._duration, "interval": self._duration})
                spec = CoDelSpec(
                    **{f"{key}_s": value for key, value in given.items()}, newest_first=newest_first
                )
                if spec.interval_s <= spec.target_s:
                    raise self._wrong("needs an interval longer than its target")
                return "codel", spec
            case "aimd" | "gradient":
                counts = dict.fromkeys(("floor", "init", "most"), self._count)
                given = self._given({"slowdown": self._number, **counts})
                adaptive = AdaptiveSpec(self.kind, **given)
                if not adaptive.floor <= adaptive.init <= adaptive.most:
                    raise self._wrong("needs floor <= init <= most")
                if adaptive.slowdown <= 1:
                    raise self._wrong("needs a slowdown above 1, which is that of a request alone")
                return "adaptive", adaptive
        raise self._wrong(
            "must be none, or parts joined with +, of inflight:64, tokens:16384, slo:ttft=250ms, queue-timeout:2s,"
            " codel:target=50ms:interval=500ms, aimd, gradient, priority"
        )

    def _wrong(self, why: str) -> InputError:
        return InputError(self.name, self.text, why)

    def _only(self, what: str) -> str:
        if len(self.parameters) != 1:
            raise self._wrong(f"{self.kind} takes {what} behind one colon")
        return self.parameters[0]

    def _given(self, readers: Mapping[str, Callable[[str], float]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for parameter in self.parameters:
            key, equals, value = parameter.partition("=")
            if key not in readers or not equals:
                known = ", ".join(f"{one}=..." for one in readers)
                raise self._wrong(f"{parameter!r} is no parameter of {self.kind}, which takes {known}")
            if key in found:
                raise self._wrong(f"gives {key} of {self.kind} twice")
            found[key] = readers[key](value)
        return found

    def _count(self, number: str) -> int:
        if not (number.isascii() and number.isdecimal() and 1 <= int(number[:99]) <= _LARGEST):
            raise self._wrong(f"{number!r} is no whole number from 1 to {_LARGEST}")
        return int(number)

    def _number(self, text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 < number <= _LARGEST:
            raise self._wrong(f"{text!r} is no number > 0")
        return number

    def _duration(self, text: str) -> float:
        seconds = read_duration(text)
        if seconds is None:
            raise self._wrong(f"{text!r} is no duration such as 250ms or 2s")
        return seconds
