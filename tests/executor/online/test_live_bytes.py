"""Counting live bytes where no allocator counts them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pooch.executor.online import live_bytes

pytestmark = pytest.mark.cpu


def test_a_walk_over_all_tensors_is_not_made_at_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, figures = [0.0], iter((100, 200))

    def walk(_: object) -> int:
        clock[0] += 1.0  # a walk takes a second
        return next(figures)

    monkeypatch.setattr(live_bytes, "live_bytes", walk)
    monkeypatch.setattr(live_bytes, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    counter = live_bytes.WalkedBytes()
    assert [counter.recent() for _ in range(50)] == [100] * 50
    assert counter.look() is None
    clock[0] += live_bytes._TIMES_A_WALK
    assert counter.look() == (200, 0)
    assert counter.peak() == 200
