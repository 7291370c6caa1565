"""Deterministic algorithms for a while: everything is as before afterwards, and operators without one are named."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from pooch.torchtools.determinism import deterministic_algorithms

settings: Any = torch.utils.deterministic


def modes() -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        settings.fill_uninitialized_memory,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_modes_are_set_inside_and_put_back_whatever_happens(
    workspace: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if workspace is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        before = modes()
        inside: list[tuple[object, ...]] = []
        with pytest.raises(KeyError):
            fail_inside(inside)
        assert inside == [(True, True, False, True, False, workspace or ":4096:8")]
        assert modes() == before


def test_modes_are_set_where_the_flags_of_the_process_are_frozen() -> None:
    text = """
import torch
from pooch.torchtools.determinism import deterministic_algorithms
torch.backends.disable_global_flags()
before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
with deterministic_algorithms():
    assert torch.backends.cudnn.deterministic
assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == before
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def fail_inside(seen: list[tuple[object, ...]]) -> None:
    with deterministic_algorithms():
        seen.append(modes())
        raise KeyError


def test_operators_without_a_deterministic_algorithm_are_named_once_and_other_warnings_pass() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with deterministic_algorithms() as operators:
            for _ in range(2):
                torch.zeros(4).put_(torch.tensor([1]), torch.tensor([2.0]))
            warnings.warn("something else", stacklevel=1)
    assert operators == ["put_"]
    assert [str(one.message) for one in told] == ["something else"]
