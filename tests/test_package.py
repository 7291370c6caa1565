"""The package itself: quick to import, and lazy."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import pooch
from tests.toys import blocks

HEAVY = ("torch", "pandas", "matplotlib", "pulp", "pydantic")


def run_python(code: str) -> str:
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return finished.stdout.strip()


def test_importing_loads_nothing_heavy() -> None:
    """Which is what makes it quick."""
    code = f"import pooch, sys; print([name for name in {HEAVY} if name in sys.modules])"
    assert run_python(code) == "[]"


def test_planning_and_simulating_a_saved_profile_does_not_import_torch(tmp_path: Path) -> None:
    blocks(3).save(tmp_path / "p.json")
    code = f"""
import pooch, sys
profile = pooch.Profile.load({str(tmp_path / "p.json")!r})
plan = pooch.plan(profile, budget="60%")
print(pooch.simulate(profile, plan).peak_bytes <= plan.budget_bytes < profile.peak_bytes, "torch" in sys.modules)
"""
    assert run_python(code) == "True False"


def test_every_public_name_is_there() -> None:
    for name in pooch.__all__:
        assert getattr(pooch, name) is not None
        assert name in dir(pooch)


def test_completion_offers_public_names_and_no_others() -> None:
    assert dir(pooch) == sorted([*pooch.__all__, "__version__"])


@pytest.mark.parametrize("name", [name for name in pooch.__all__ if name.islower() and name != "errors"])
def test_help_shows_no_addresses(name: str) -> None:
    assert " at 0x" not in str(inspect.signature(getattr(pooch, name)))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'retrieve'"):
        pooch.retrieve  # noqa: B018


def test_stage_functions_are_functions_and_no_modules() -> None:
    import pooch.profiler

    for name in ("profile", "plan", "simulate", "apply"):
        assert callable(getattr(pooch, name))
