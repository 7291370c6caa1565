"""Replays from the parameters that FSDP gathers: same bits, no collective more, and a lower peak than without."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pooch
from benchmarks.sharded_cases import CASES, Block, Case, collectives, shard_blocks, texts
from pooch.analysis.dataflow import Dataflow
from pooch.errors import PlanMismatch
from pooch.ir import Plan, Profile
from pooch.torchtools.memory_meter import MemoryMeter
from pooch.torchtools.memory_trace import live_bytes
from tests.executor.support import all_of, applied, assert_same, planned_replays, quick_profile, region_of, tight_plan
from tests.executor.test_ranks import on_ranks

WIDTH, BLOCKS, LENGTH = 32, 3, 16
DEVICE = torch.device("cpu")
MEASURED_STEPS = 4


def gathered_values(profile: Profile) -> set[int]:
    return {value for unit in profile.gathered for value in unit.values}


def replays_that_read_gathered(plan: Plan, profile: Profile) -> int:
    gathered = gathered_values(profile)
    replayed = [action.target for action in plan.schedule.actions if action.kind == "replay"]
    return sum(not gathered.isdisjoint(profile.ops[op].reads) for op in replayed)


def profile_of(case: Case, rank: int) -> Profile:
    model, words = case.model(WIDTH, BLOCKS, LENGTH), texts(rank, LENGTH)
    return quick_profile(lambda: model(words), model)


def trained(case: Case, rank: int, plan: Plan | None) -> tuple[dict[str, Tensor], Counter[str], int]:
    """Two steps of a model of its own: everything that must be equal, the collectives, and the lowest peak of the steps
    after them beyond what lived before each. Threads of gloo's that let go late can only raise a peak.
    """
    model, found, counted = case.model(WIDTH, BLOCKS, LENGTH), dict[str, Tensor](), Counter[str]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with applied(plan, model) as run:
        for number in range(2):
            optimizer.zero_grad()
            words = texts(10 * number + rank, LENGTH)
            with collectives(counted):
                with region_of(run):
                    loss = model(words)
                loss.backward()
            found |= {f"{number} {n}.grad": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            found[f"{number} loss"] = loss.detach().clone()
            optimizer.step()
        peaks_bytes = []
        for _ in range(MEASURED_STEPS):
            optimizer.zero_grad()
            del loss
            gc.collect()
            before_bytes = live_bytes(DEVICE)
            with MemoryMeter(DEVICE) as meter:
                with region_of(run):
                    loss = model(words)
                loss.backward()
            peaks_bytes.append(meter.peak_bytes - before_bytes)
        if run is not None and plan is not None:
            assert (run.stats.mismatches, run.stats.late_swaps) == (0, 0)
            assert run.stats.recomputed_ops == planned_replays(plan)
    found |= {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return found, counted, min(peaks_bytes)


def smallest_without_tier(profile: Profile) -> int:
    return pooch.smallest_budget(profile, region="step", host_budget=1)


def check(case: Case, rank: int) -> None:
    profile = profile_of(case, rank)
    assert smallest_without_tier(profile) < smallest_without_tier(replace(profile, gathered=()))
    plan = tight_plan(profile, all_of(profile, "recompute"))
    assert replays_that_read_gathered(plan, profile) >= BLOCKS

    plain, expected, in_core_bytes = trained(case, rank, None)
    found, counted, peak_bytes = trained(case, rank, plan)
    assert_same(plain, found)
    assert counted == expected
    assert counted["all_gather"] > BLOCKS
    # Each of gloo's two threads lets go of what a collective gathered or reduced, sooner or later, with a plan and
    # without; both being late in all of the steps is not to be expected.
    late_bytes = max(sum(profile.values[value].size_bytes for value in unit.values) for unit in profile.gathered)
    assert peak_bytes <= plan.predicted_peak_bytes - plan.persistent_bytes + late_bytes
    assert in_core_bytes <= profile.peak_bytes - profile.persistent_bytes + late_bytes


def _check_all(names: list[str], rank: int) -> None:
    for name in names:
        check(CASES[name], rank)


@pytest.mark.parametrize(
    "names",
    [
        ["blocks", "no reshard after forward"],
        ["explicit prefetching", "nested units"],
        ["bf16 parameters", "tied embedding", "each block twice"],
    ],
    ids=", ".join,
)
def test_replays_of_sharded_layers(names: list[str], tmp_path: Path) -> None:
    on_ranks(partial(_check_all, names), tmp_path)


def _check_four(rank: int) -> None:
    check(CASES["blocks"], rank)
    check(Case("reshard to two", lambda model: shard_blocks(model, reshard=2)), rank)


def test_replays_of_sharded_layers_on_four_ranks(tmp_path: Path) -> None:
    """Also where a forward pass leaves the parameters in pieces for two of the ranks."""
    on_ranks(_check_four, tmp_path, ranks=4)


def _in_core_peak(rank: int) -> None:
    case = CASES["blocks"]
    profile = profile_of(case, rank)
    assert profile.fault() is None
    _, _, peak_bytes = trained(case, rank, None)
    late_bytes = max(sum(profile.values[value].size_bytes for value in unit.values) for unit in profile.gathered)
    assert profile.peak_bytes - profile.persistent_bytes <= peak_bytes + late_bytes


def test_gathered_parameters_are_not_counted_while_they_are_away(tmp_path: Path) -> None:
    on_ranks(_in_core_peak, tmp_path)


class Clamping(Block):
    """Its forward pass writes to gathered parameters, which is undone when they are gathered for the backward pass."""

    def forward(self, rows: Tensor) -> Tensor:
        self.feedforward.up.weight.data.clamp_(-0.05, 0.05)
        return super().forward(rows)


def _clamped(model: Any) -> None:
    model.blocks[1].__class__ = Clamping
    shard_blocks(model)


def _check_clamped(rank: int) -> None:
    case = Case("clamped", _clamped)
    profile = profile_of(case, rank)
    plan = tight_plan(profile, all_of(profile, "recompute"))
    assert replays_that_read_gathered(plan, profile) >= BLOCKS
    dataflow = Dataflow(profile)
    read = {v.label: dataflow.refusal(v.id) for v in dataflow.activations if v.label.endswith("feedforward.up.addmm")}
    assert [label for label, refusal in read.items() if refusal] == ["blocks.1.feedforward.up.addmm"]
    assert_same(trained(case, rank, None)[0], trained(case, rank, plan)[0])


def test_parameters_that_the_forward_pass_changes_are_not_replayed_from(tmp_path: Path) -> None:
    on_ranks(_check_clamped, tmp_path)


def nodes(loss: Tensor, name: str) -> Iterator[Any]:
    """The nodes of a graph of this name, nearest to the loss first."""
    pending, seen = [loss.grad_fn], set[Any]()
    while pending:
        node = pending.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == name:
            yield node
        pending += [following for following, _ in node.next_functions]


def _one_step(
    case: Case, rank: int, plan: Plan | None, change: Callable[[nn.Module, Tensor | None], Any], **options: Any
) -> Any:
    """A step of a model that something is done to before its forward pass and before its backward pass."""
    model, words = case.model(WIDTH, BLOCKS, LENGTH), texts(rank, LENGTH)
    change(model, None)
    with applied(plan, model, **options) as run:
        with region_of(run):
            loss = model(words)
        change(model, loss)
        loss.backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {**found, "loss": loss.detach().clone()}, run.stats if run is not None else None


def _read_too_early(rank: int) -> None:
    case = CASES["blocks"]
    profile = profile_of(case, rank)
    plan = tight_plan(profile, all_of(profile, "recompute"))

    def read(model: nn.Module, loss: Tensor | None) -> None:
        if loss is not None:
            *_, first = nodes(loss, "GeluBackward0")
            with pytest.raises(PlanMismatch, match="whose storage is empty, such as a parameter that FSDP has not"):
                _ = first._saved_self

    plain, _ = _one_step(case, rank, None, lambda model, loss: None)
    found, stats = _one_step(case, rank, plan, read, verify="off")  # with a copy, there is no need to replay it
    assert_same(plain, found)  # what could not be replayed then is replayed when it is read again
    assert stats.late_swaps > 0
    assert stats.mismatches == 0


def test_a_read_before_parameters_are_gathered_is_an_error_and_never_wrong_numbers(tmp_path: Path) -> None:
    on_ranks(_read_too_early, tmp_path)


def _leaves_path(rank: int) -> None:
    case = CASES["blocks"]
    profile = profile_of(case, rank)
    plan = tight_plan(profile, all_of(profile, "recompute"))

    def turn(model: Any, loss: Tensor | None) -> None:
        """The root reads what the last block makes inside, so the backward pass does so before that block's own."""
        if loss is not None:
            return
        feedforward, norm, made = model.blocks[-1].feedforward, model.norm, list[Tensor]()

        def inner(rows: Tensor) -> Tensor:
            made.append(feedforward.up(rows))
            return feedforward.down(torch.nn.functional.gelu(made[-1]))  # type: ignore[no-any-return]

        def outer(rows: Tensor) -> Tensor:
            bound = made.pop().square().mean()
            return torch.nn.functional.layer_norm(rows, (WIDTH,), norm.weight, norm.bias) + bound

        feedforward.forward, norm.forward = inner, outer

    plain, _ = _one_step(case, rank, None, turn)
    with pytest.warns(UserWarning, match="left the planned path"):
        found, stats = _one_step(case, rank, plan, turn)
    assert_same(plain, found)
    assert stats.mismatches == 1


def test_a_sharded_step_that_leaves_the_path(tmp_path: Path) -> None:
    on_ranks(_leaves_path, tmp_path)
