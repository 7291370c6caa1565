"""Profiling, planning and training of small jobs, and comparing bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pooch.analysis.dataflow import Dataflow
from pooch.api.evaluation import StageEvaluator
from pooch.api.hooked import dataflow_of
from pooch.api.manual import manual_plan
from pooch.executor import Run, RunStats, apply_plan
from pooch.ir import Choice, Decisions, Link, Plan, Profile, Region
from pooch.profiler import ProfileOptions, profile_step
from tests.executor.nets import Job

LINK = Link("a fast tier", 0.01, 0.01, 1e6, 1e6)


def quick_profile(
    forward: Callable[[], Tensor], model: torch.nn.Module, optimizer: Any = None, mode: Any = "run"
) -> Profile:
    """A profile without measuring a link, from as few runs as possible."""
    return profile_step(forward, model, optimizer, LINK, ProfileOptions(warmup=0, repeats=1, mode=mode)).profile


def profile_job(job: Job, mode: Any = "run") -> Profile:
    return quick_profile(job.forward, job.model, job.optimizer, mode)


def budget_at(profile: Profile, share: float) -> int:
    """A budget with room for a share of the bytes that come and go in the step, and for all that stays.

    On CUDA what stays includes cuBLAS's workspaces, which can be several times the rest of a small step.
    """
    return profile.persistent_bytes + int(share * (profile.peak_bytes - profile.persistent_bytes))


def all_of(profile: Profile, choice: Choice, region: Region = "step") -> dict[int, Choice]:
    """The decision for every activation; keeps what cannot be recomputed."""
    dataflow = Dataflow(profile, region)
    possible = [v.id for v in dataflow.activations if choice != "recompute" or dataflow.refusal(v.id) is None]
    return dict.fromkeys(possible, choice)


def mixed(profile: Profile, region: Region = "step") -> dict[int, Choice]:
    """Keep, swap and recompute in turns."""
    recomputable = all_of(profile, "recompute", region)
    turns: tuple[Choice, ...] = ("swap", "recompute", "keep", "recompute")
    ids = sorted(all_of(profile, "keep", region))
    wanted = {value: turns[i % 4] for i, value in enumerate(ids)}
    return {v: c if c != "recompute" or v in recomputable else "swap" for v, c in wanted.items()}


def tight_plan(profile: Profile, decisions: Decisions, region: Region = "step") -> Plan:
    """A plan under which everything leaves as early and returns as late as it can, so that every mechanism fires."""
    dataflow = dataflow_of(profile, region, hooked=True)
    evaluation = StageEvaluator(dataflow).evaluate(decisions, 0)
    return manual_plan(dataflow, evaluation, decisions)


def without_reads(plan: Plan) -> Plan:
    """The plan as older files have it, which do not say what ops read: a step on other values follows it too."""
    return replace(plan, expected=tuple(replace(op, reads=None) for op in plan.expected))


def planned_replays(plan: Plan) -> int:
    return sum(action.kind == "replay" for action in plan.schedule.actions)


def moved_bytes(plan: Plan, profile: Profile, *kinds: str) -> int:
    """Bytes of what the plan's actions of these kinds move, each as often as it is moved."""
    return sum(profile.values[a.target].size_bytes for a in plan.schedule.actions if a.kind in kinds)


def region_of(run: Run | None) -> Any:
    return run.forward_region() if run is not None else nullcontext()


@contextmanager
def applied(plan: Plan | None, model: torch.nn.Module, **options: Any) -> Iterator[Run | None]:
    if plan is None:
        yield None
        return
    with apply_plan(plan, model, **options) as run:
        yield run


def train(job: Job, plan: Plan | None, steps: int = 3, **options: Any) -> tuple[dict[str, Tensor], RunStats | None]:
    """Train, with an optimizer and fresh data each step; everything that must be equal, by name, and the last stats."""
    torch.manual_seed(11)
    found: dict[str, Tensor] = {}
    with applied(plan, job.model, **options) as run:
        for number in range(steps):
            job.optimizer.zero_grad()
            with region_of(run):
                loss = job.forward()
            loss.backward()
            found[f"step {number}: loss"] = loss.detach().clone()
            found |= {
                f"step {number}: {name}.grad": p.grad.clone()
                for name, p in job.model.named_parameters()
                if p.grad is not None
            }
            job.optimizer.step()
            job.next_batch()
        stats = run.stats if run is not None else None
    found |= {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    found["random state"] = torch.get_rng_state()
    if job.device.type == "cuda":
        found["random state of the GPU"] = torch.cuda.get_rng_state()
    return found, stats


def is_same(left: Tensor, right: Tensor) -> bool:
    """Bitwise equal, so that nan is equal to itself and 0.0 is not -0.0; of sharded tensors, this rank's part."""
    left, right = (getattr(t, "to_local", t.detach)() for t in (left, right))
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.is_complex:
        left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj())
    left, right = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return bool(torch.equal(left, right))


def assert_same(plain: dict[str, Tensor], planned: dict[str, Tensor]) -> None:
    assert plain.keys() == planned.keys()
    different = [name for name, tensor in plain.items() if not is_same(tensor, planned[name])]
    assert different == []
