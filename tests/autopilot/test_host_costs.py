"""Costs that are measured beside training."""

from __future__ import annotations

import threading

import pytest

from pooch.autopilot.costs import HostCosts
from pooch.machine import CopySpeed


def test_a_thread_that_cannot_start_is_tried_again_after_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the process is given no more memory just then. Planning goes on."""
    costs, measured = HostCosts(CopySpeed("a tier")), threading.Event()
    monkeypatch.setattr(costs, "_measure", measured.set)

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        costs.begin()
    assert not measured.is_set()
    costs.begin()
    costs.close()
    assert measured.is_set()
    assert costs.is_final
