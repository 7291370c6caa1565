"""What governs a training here: a plan made by hand, or `pooch.auto` under a tiny budget."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from unittest import mock

import torch

from benchmarks.handmade import tight_plan, tiny_profile
from pooch.analysis.dataflow import Dataflow
from pooch.autopilot import Auto
from pooch.executor import Run, apply_plan
from pooch.ground.live_objects import freeze_known, unfreeze
from pooch.ir import Choice, Decisions, Plan, Profile
from tests.copy_costs import costing
from tests.hostile.case import Hostile
from tests.hostile.settings import seed_everything, settings_kept
from tests.hostile.training import Build, built, call, quiet

Decide = Callable[[list[int], set[int]], dict[int, Choice]]
CopyCost = float | Callable[[int], float]
_WALK = "pooch.executor.live_bytes.live_tensors"
DEAR, FREE = 1e9, 0.0  # what a copied byte costs, so that everything is replayed that can be, or nothing


class Applied:
    """A plan on the model.

    Attributes:
        replayed_ops: Number of ops replayed in all steps so far.
        moved_bytes: Bytes brought back from the tier in all steps so far.
        steps_off_path: Number of steps that left the path of the plan.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._run: Run | None = None
        self.replayed_ops = self.moved_bytes = self.steps_off_path = 0

    @contextmanager
    def attached(self, model: Hostile) -> Iterator[None]:
        with apply_plan(self._plan, model, measure_every=None) as self._run:
            yield
            self.steps_off_path = self._run.totals.steps_off_path
        self._run = None

    def step_ended(self) -> None:
        assert self._run is not None
        self.replayed_ops += self._run.stats.recomputed_ops
        self.moved_bytes += self._run.stats.swapped_in_bytes


class Automatic:
    """`pooch.auto` without planning: steps run online, and the first ones are recorded.

    Args:
        copy_cost_ms: What a copied byte costs, or a function of a copy's size in bytes. It decides whether values are
            copied or replayed.
        records: Number of steps that are recorded at most.
        budget: The budget, in bytes or as a share. 1 makes everything leave that can.
        recounts: Whether each step counts what is alive from before the allocator was installed, by a walk through all
            objects. Without, the budget is for what was allocated since then.
    """

    def __init__(
        self, copy_cost_ms: CopyCost, records: int = 3, budget: int | str = 1, *, recounts: bool = True
    ) -> None:
        self._copy_cost_ms, self._records, self._budget = copy_cost_ms, records, budget
        self._counting = nullcontext() if recounts else mock.patch(_WALK, return_value=[])
        self.replayed_ops = self.moved_bytes = self.steps_off_path = 0

    @contextmanager
    def attached(self, model: Hostile) -> Iterator[None]:
        with self._counting, online_only(self._copy_cost_ms, self._records):
            with Auto([model, *model.other_models()], self._budget, tell=lambda _: None) as auto:
                yield
                summary = auto.summary()
            self.replayed_ops, self.moved_bytes = summary.recomputed_ops, summary.swapped_bytes

    def step_ended(self) -> None:
        """Nothing: the summary counts all steps."""


@contextmanager
def online_only(copy_cost_ms: CopyCost, records: int = 3) -> Iterator[None]:
    """Plan nothing, and let neither times nor passed budgets decide what is replayed: tests must not depend on them."""

    def copy_ms(size_bytes: int) -> float:
        return copy_cost_ms(size_bytes) if callable(copy_cost_ms) else size_bytes * copy_cost_ms

    with (
        mock.patch("pooch.autopilot.requests.PlanRequests.ask"),
        mock.patch("pooch.autopilot.requests.PlanRequests.warm_up"),
        mock.patch("pooch.autopilot.library.Library.replays", return_value=True),
        mock.patch("pooch.autopilot.library.MOST_RECORDED", records),
        mock.patch.multiple("pooch.machine.speed.CopySpeed", **costing(copy_ms)),
        mock.patch("pooch.profiler.assembly.SMALLEST_ACTIVATION_BYTES", 1),
        mock.patch("pooch.api.budgets.FEWEST_BYTES", 1),
    ):
        yield


def profiled(build: Build) -> Profile:
    """Profile a fresh model. What is garbage or persistent does not matter to plans made by hand."""
    with (
        quiet(),
        settings_kept(),
        mock.patch("pooch.profiler.profiler.earlier_objects_exempt", nullcontext),
        mock.patch("pooch.profiler.profiler.live_bytes", return_value=0),
    ):
        model = built(build)
        seed_everything(1)
        model.before_step()
        loss = call(model)  # what is made in the first call is there, as after a few steps of training
        with suppress(Exception):  # a case that raises here does so where it is judged as well
            model.between()
        loss.backward()
        del loss
        model.zero_grad()
        return tiny_profile(lambda: call(model), model)


def planned(profile: Profile, decide: Decide) -> Plan:
    """Plan by hand. `decide` is given all activations, and those of them that can be replayed."""
    dataflow = Dataflow(profile, "model")
    values = sorted(value.id for value in dataflow.activations)
    decisions: Decisions = decide(values, {value for value in values if dataflow.refusal(value) is None})
    return tight_plan(profile, decisions, "model")


def recompute_all(values: list[int], replayable: set[int]) -> dict[int, Choice]:
    return dict.fromkeys(sorted(replayable), "recompute")


def swap_all(values: list[int], replayable: set[int]) -> dict[int, Choice]:
    return dict.fromkeys(values, "swap")


def alternate(values: list[int], replayable: set[int]) -> dict[int, Choice]:
    """Recompute, swap and keep in turns."""
    turns: tuple[Choice, ...] = ("recompute", "swap", "recompute", "keep")
    chosen = {value: turns[number % 4] for number, value in enumerate(values)}
    return {v: "swap" if choice == "recompute" and v not in replayable else choice for v, choice in chosen.items()}


@contextmanager
def frozen_heap() -> Iterator[None]:
    """What was imported is nobody's garbage: looking through it again for every profile takes most of the time."""
    layer = torch.nn.Linear(2, 2)
    tiny_profile(lambda: layer(torch.ones(2, 2)).sum(), layer)  # the first profile imports much
    gc.collect()
    freeze_known()
    try:
        yield
    finally:
        unfreeze()
