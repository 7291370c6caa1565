"""Many steps leave nothing behind (`python -m benchmarks.soak` runs a thousand)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.soak import draw, growth, soak


def test_eighty_steps_leave_nothing_behind(tmp_path: Path) -> None:
    samples = soak(80, 20)
    assert growth(samples) == []
    assert samples[-1].tier_bytes > 0
    draw(samples, tmp_path / "curves.png")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_growth_is_noticed() -> None:
    first = soak(1, 1)[0]
    assert growth([first, replace(first, descriptors=first.descriptors + 1)]) != []
    assert growth([first, replace(first, process_bytes=first.process_bytes + 2**24)]) != []
