from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.invariants import Watched, check_drained, watch_all

# The same examples in every run, and no verdict on a machine that is busy.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def invariants() -> Iterator[Watched]:
    """Every core and every manager of every test keeps its invariants."""
    # A patch of its own: a test may undo the one that it shares with others.
    with pytest.MonkeyPatch.context() as patch:
        found = watch_all(patch)
        yield found
    assert found.violations == []
    for manager in found.managers:
        if manager._died_of is None and manager._ended:
            check_drained(manager)
