"""Many steps leave nothing behind (`python -m benchmarks.soak` runs a thousand)."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import soak_ragged
from benchmarks.soak import draw, growth, soak
from benchmarks.soak_ragged import RaggedSample


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


def test_ragged_steps_are_counted_and_growth_over_their_last_half_is_noticed(tmp_path: Path) -> None:
    samples, summary = soak_ragged.soak(12, 2)
    assert "12 steps" in summary
    assert [sample.steps for sample in samples] == [2, 4, 6, 8, 10, 12]
    assert samples[-1].shapes == samples[-1].met
    soak_ragged.draw([{**asdict(sample), "plain_bytes": 0} for sample in samples], tmp_path / "curves.png")

    def made(process_bytes: int, number: int) -> RaggedSample:
        return replace(samples[0], steps=number, process_bytes=process_bytes, threads=4, descriptors=9)

    flat = [made(10**9 + 10**6 * (number % 3), number) for number in range(100)]
    assert soak_ragged.grown(flat) == []
    assert soak_ragged.grown([made(10**9 + 10**6 * number, number) for number in range(100)]) != []
    assert soak_ragged.grown([replace(each, descriptors=each.steps) for each in flat]) != []
