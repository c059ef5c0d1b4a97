"""Budgets of tests: `ci` (the default, small), `deep` (HYPOTHESIS_PROFILE=deep, `make fuzz`) and
`brief`, for a second pass on another megatron-core.

A test names no number of examples but a multiple of the profile's, or nothing at all. Only `deep`
draws new examples in every run: CI refuses a change for what the change does, not by chance.
"""

import os

from hypothesis import HealthCheck, settings

PROFILES = {"brief": 5, "ci": 25, "deep": 500}


def load_profile() -> None:
    """Register the profiles and load the one that HYPOTHESIS_PROFILE names."""
    for name, max_examples in PROFILES.items():
        settings.register_profile(
            name,
            max_examples=max_examples,
            derandomize=name != "deep",
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],  # of a machine that others keep busy
        )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def steps(few: int, *, deep: int) -> int:
    """Return the number of train steps of a proof: few, but for the deep profile."""
    return deep if settings.default.max_examples == PROFILES["deep"] else few


def examples(multiple: float) -> int:
    """Return a multiple of the examples of the loaded profile."""
    return max(1, round(multiple * settings.default.max_examples))
