"""Experiments on toys: the same path as the published ones, with profiles that take no time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pooch.ir import Link, Profile
from pooch.published import profiles
from pooch.published.rows import Claim, Course, Experiment, Row, Saving
from tests.rescaling import rescale
from tests.toys import blocks

LINK = Link("toy tier", 0.0, 0.0, 40.0, 40.0)
METHODS = ("swap_all", "tflms", "tflms_tuned", "ilp")


class Toys:
    """Stands for the profiler: a toy at the batch size that is asked for; counts what is profiled."""

    def __init__(self) -> None:
        self.toy = blocks(5, link=LINK)
        self.asked: list[tuple[str, int]] = []

    def __call__(
        self, factory: Any, *, mode: str, progress: Callable[[str], None], device_model: Any = None
    ) -> Profile:
        self.asked.append((mode, factory.batch_size))
        scaled = rescale(self.toy, factory.batch_size, 1, LINK, 2**30, device_model.title if device_model else "here")
        return replace(scaled, device=replace(scaled.device, modelled=device_model is not None))


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Toys:
    toys = Toys()
    monkeypatch.setattr(profiles, "profile_workload", toys)
    return toys


@pytest.fixture
def experiment(toys: Toys) -> Experiment:
    peak_bytes = toys.toy.peak_bytes
    hardware = "V100-PCIe"
    return Experiment(
        name="toys",
        title="Toys",
        about="Blocks on a slow link.",
        rows=(
            Row("four", "batch 4", "slowdown", "resnet50", ("keep_all", *METHODS), "60%", hardware, 4, quick=True),
            Row("many", "many", "largest", "resnet50", ("tflms", "ilp"), str(20 * peak_bytes), hardware, start=4),
        ),
        measured=(),
        claims=(
            Claim("four", "slowdown", 50.0),
            Claim("four", "slowdown", 0.0),
            Claim("many", "multiple", 1.0),
            Claim("many", "multiple", 1.0, throughput=0.01),
            Claim("many", "largest", 1e6),
        ),
        saving=Saving("tflms", "tflms_tuned", "overhead"),
        courses=(
            Course("small steps", "four", 3_600_000, 2.0, "abstract"),
            Course("the same, half as many", "four", 1_800_000, 1.0, "read"),
        ),
    )
