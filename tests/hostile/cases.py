"""All hostile cases, by name."""

from __future__ import annotations

from tests.hostile import (
    cases_memory,
    cases_modes,
    cases_operators,
    cases_random,
    cases_replaced,
    cases_settings,
    cases_state,
    cases_views,
)
from tests.hostile.case import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "cases_memory",
    "cases_modes",
    "cases_operators",
    "cases_random",
    "cases_replaced",
    "cases_settings",
    "cases_state",
    "cases_views",
]
