from __future__ import annotations

from hypothesis import HealthCheck, settings

# The same examples in every run, and no verdict on a machine that is busy.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")
