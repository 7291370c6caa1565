"""Many steps leave nothing behind (`python -m benchmarks.soak` runs a thousand)."""

from __future__ import annotations

import math
from array import array
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import soak_interrupted, soak_ragged
from benchmarks.soak import draw, growth, soak
from benchmarks.soak_interrupted import InterruptedSample, Soaked
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


def test_steps_that_are_interrupted_fail_and_are_resumed_have_the_bits_of_plain_training(tmp_path: Path) -> None:
    plain, governed, budget_bytes = soak_interrupted.both(60, 20)
    assert soak_interrupted.wrong(plain, governed) == []
    assert [sample.steps for sample in governed.samples] == [20, 40, 60]
    assert sum(map(math.isnan, governed.losses)) == 2
    assert max(sample.peak_bytes for sample in plain.samples) > budget_bytes
    results = [
        {**asdict(sample), "budget_bytes": 0, "plain_process_bytes": 0, "plain_peak_bytes": 0, "plain_step_ms": 0}
        for sample in governed.samples
    ]
    soak_interrupted.draw(results, tmp_path / "curves.png")
    assert [row["steps"] for row in soak_interrupted.rows_of(results)] == [20, 40, 60]


def test_what_grows_differs_or_passes_the_budget_silently_is_noticed() -> None:
    flat = [InterruptedSample(n, 10**9, 100, 200, 10**6, 6, 19, 1, 1, 64, 5, 1.0) for n in range(100)]
    assert soak_interrupted.grown(flat) == []
    for name, size in {"process_bytes": 10**6, "blocks": 1000, "threads": 1, "files": 1}.items():
        rising = [replace(each, **{name: getattr(each, name) + size * each.steps}) for each in flat]
        assert soak_interrupted.grown(rising) != [], name
    plain = Soaked(losses=array("d", [0.0, 1.0, math.nan]), digest="a")
    assert soak_interrupted.wrong(plain, replace(plain)) == []
    assert soak_interrupted.wrong(plain, replace(plain, losses=array("d", [0.0, 1.5, math.nan]))) == ["losses differ"]
    assert soak_interrupted.wrong(plain, replace(plain, digest="b")) != []
    assert soak_interrupted.wrong(plain, replace(plain, over={3: 5})) != []
    assert soak_interrupted.wrong(plain, replace(plain, over={3: 5}, counted_over=1)) == []
