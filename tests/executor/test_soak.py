"""Many steps leave nothing behind (`python -m benchmarks.soak` runs a thousand)."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.soak import growth, soak


def test_eighty_steps_leave_nothing_behind() -> None:
    samples = soak(80, 20)
    assert growth(samples) == []


def test_growth_is_noticed() -> None:
    first = soak(1, 1)[0]
    assert growth([first, replace(first, descriptors=first.descriptors + 1)]) != []
    assert growth([first, replace(first, process_bytes=first.process_bytes + 2**24)]) != []
