"""What an admission limit looks like as text: `inflight:64`, `tokens:16384`, `inflight:64+tokens:16384`, `none`."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from roseinfer.errors import InputError

NO_LIMIT: Final = "none"
_FORM: Final = "must look like inflight:64, tokens:16384 or inflight:64+tokens:16384, or be none"
_LARGEST: Final = 2**31 - 1


class AdmissionSpec(NamedTuple):
    """Bounds on what is in flight, None where there is none.

    inflight: requests.
    tokens: the sum over requests of prompt + max_new_tokens.
    """

    inflight: int | None = None
    tokens: int | None = None

    def __str__(self) -> str:
        """As `parse_admission` takes it, always the same for the same bounds."""
        bounds = [f"{kind}:{bound}" for kind, bound in self._asdict().items() if bound is not None]
        return "+".join(bounds) or NO_LIMIT

    @property
    def label(self) -> str:
        """What tables and figures call it: "64", "tokens 16384", "inflight 64, tokens 16384", "no limit"."""
        if self.tokens is None:
            return "no limit" if self.inflight is None else str(self.inflight)
        return ", ".join(f"{kind} {bound}" for kind, bound in self._asdict().items() if bound is not None)

    @property
    def place(self) -> tuple[int, int, int]:
        """Sorts requests alone first, then tokens alone, then both, each from the tightest, and no limit last."""
        kinds = {(True, False): 0, (False, True): 1, (True, True): 2, (False, False): 3}
        kind = kinds[self.inflight is not None, self.tokens is not None]
        return kind, self.inflight or 0, self.tokens or 0


@lru_cache(maxsize=1024)
def parse_admission(text: str, name: str = "admission") -> AdmissionSpec:
    """Raises InputError of the flag or argument `name` for what is no admission limit."""
    bounds: dict[str, int] = {}
    for part in () if text.strip() == NO_LIMIT else text.split("+"):
        kind, _, number = part.strip().partition(":")
        if kind not in AdmissionSpec._fields:
            raise InputError(name, text, _FORM)
        if kind in bounds:
            raise InputError(name, text, f"names {kind} twice")
        if not (number.isascii() and number.isdecimal() and 1 <= int(number[:99]) <= _LARGEST):
            raise InputError(name, text, f"{number!r} is no whole number from 1 to {_LARGEST}")
        bounds[kind] = int(number)
    return AdmissionSpec(**bounds)


def admission_of(max_inflight_requests: int | None, admission: str | None) -> AdmissionSpec:
    """The limit that was asked for, in its short form or in full. Raises InputError for both together."""
    if admission is None:
        return AdmissionSpec(max_inflight_requests)
    if max_inflight_requests is not None:
        why = f"contradicts max_inflight_requests {max_inflight_requests!r}, which is short for inflight:N"
        raise InputError("admission", admission, why)
    return parse_admission(admission)
