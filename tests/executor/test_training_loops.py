"""Loops other than one forward, one backward: the plan stays right, and nothing is held longer than plain training
would.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from pooch.api.manual import plan_from_decisions
from pooch.executor import Run, apply_plan
from pooch.ir import Choice, Region
from tests.executor.nets import Job, make_job
from tests.executor.support import (
    all_of,
    assert_same,
    is_same,
    mixed,
    profile_job,
    quick_profile,
    region_of,
    tight_plan,
)

CHOICES = ["swap", "recompute", "mixed"]


@contextmanager
def planned(job: Job, choice: str = "mixed", region: Region = "model", **options: Any) -> Iterator[Run]:
    profile = profile_job(job)
    decisions = mixed(profile, region) if choice == "mixed" else all_of(profile, choice, region)  # type: ignore[arg-type]
    with apply_plan(tight_plan(profile, decisions, region), job.model, **options) as run:
        yield run


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(
    loop: Callable[[Job, Run | None], dict[str, Tensor]], kind: str, choice: str, region: Region = "model"
) -> Any:
    """Run a loop plainly and under a plan, from the same state, and compare what it returns and leaves."""
    results = []
    for is_planned in (False, True):
        job = make_job(kind)
        torch.manual_seed(5)
        if is_planned:
            with planned(job, choice, region) as run:
                torch.manual_seed(5)
                found = loop(job, run)
                stats = run.stats
                assert stats.swapped_out_bytes + stats.recomputed_ops > 0
        else:
            found = loop(job, None)
        found |= {name: t.clone() for name, t in job.model.state_dict().items()} | gradients(job.model)
        found["random state"] = torch.get_rng_state()
        results.append(found)
    assert_same(*results)
    return stats


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", ["conv", "recurrent"])
def test_retained_graph_and_second_backward(kind: str, choice: str) -> None:
    def loop(job: Job, run: Run | None) -> dict[str, Tensor]:
        loss = job.forward()
        loss.backward(retain_graph=True)
        first = gradients(job.model)
        loss.backward()
        return {f"first {name}": g for name, g in first.items()}

    compare(loop, kind, choice)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("region", ["model", "step"])
def test_several_forwards_before_one_backward(choice: str, region: Region) -> None:
    def loop(job: Job, run: Run | None) -> dict[str, Tensor]:
        losses = []
        for _ in range(3):
            with region_of(run):
                losses.append(job.forward())
            job.next_batch()
        total = losses[0] + 2 * losses[1] + losses[2]
        total.backward()
        return {"loss": total.detach()}

    compare(loop, "conv", choice, region)


@pytest.mark.parametrize("calls", [1, 2])
def test_a_plan_of_a_model_that_a_step_calls_several_times_says_what_its_prediction_leaves_out(calls: int) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))
    batches = [torch.rand(64, 16) for _ in range(calls)]
    profile = quick_profile(lambda: torch.stack([model(rows).sum() for rows in batches]).sum(), model)
    told: dict[Region, list[str]] = {}
    regions: list[Region] = ["model", "step"]
    for region in regions:
        plan = plan_from_decisions(profile, all_of(profile, "swap", region), region=region)
        told[region] = [note for note in plan.notes if "calls the model several times" in note]
    assert len(told["model"]) == (calls > 1)
    assert told["step"] == []


@pytest.mark.parametrize("choice", CHOICES)
def test_gradient_accumulation(choice: str) -> None:
    def loop(job: Job, run: Run | None) -> dict[str, Tensor]:
        for _ in range(3):
            for _ in range(2):
                (job.forward() / 2).backward()
                job.next_batch()
            job.optimizer.step()
            job.optimizer.zero_grad()
        return {}

    compare(loop, "transformer", choice)


@pytest.mark.parametrize("choice", CHOICES)
def test_evaluation_and_other_forwards_in_between(choice: str) -> None:
    def loop(job: Job, run: Run | None) -> dict[str, Tensor]:
        found = {}
        for number in range(2):
            job.optimizer.zero_grad()
            loss = job.forward()
            with torch.no_grad():
                found[f"no_grad {number}"] = job.forward()
            job.model.eval()
            with torch.inference_mode():
                found[f"evaluation {number}"] = job.forward().clone()
            job.model.train()
            loss.backward()
            job.optimizer.step()
        return found

    compare(loop, "conv", choice)


@pytest.mark.parametrize("choice", CHOICES)
def test_an_exception_inside_the_step(choice: str) -> None:
    def loop(job: Job, run: Run | None) -> dict[str, Tensor]:
        handle = job.model.head.register_forward_pre_hook(_raise)  # type: ignore[union-attr]
        with pytest.raises(ZeroDivisionError):
            job.forward()
        handle.remove()
        assert _get_current_dispatch_mode() is None
        job.forward().backward()
        return {}

    compare(loop, "conv", choice)


def _raise(module: nn.Module, args: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("choice", CHOICES)
def test_a_forward_without_backward_leaves_nothing(choice: str) -> None:
    job = make_job("unet")
    with planned(job, choice) as run:
        steps: list[weakref.ref[Any]] = []
        original = run._planned_step

        @contextmanager
        def watched() -> Iterator[None]:
            from pooch.executor import step as step_module

            before = {id(o) for o in gc.get_objects() if isinstance(o, step_module.Step)}
            with original():
                yield
            steps.extend(
                weakref.ref(o) for o in gc.get_objects() if isinstance(o, step_module.Step) and id(o) not in before
            )

        run._planned_step = watched  # type: ignore[method-assign]
        gc.disable()
        try:
            loss = job.forward()
            assert [ref() is None for ref in steps] == [False]
            del loss
            assert [ref() is None for ref in steps] == [True]  # by reference counts alone, without the collector
        finally:
            gc.enable()


def test_removing_a_run_while_a_step_is_under_way() -> None:
    def loop(job: Job, run: Run | None) -> dict[str, Tensor]:
        loss = job.forward()
        if run is not None:
            run.remove()
            assert "forward" not in vars(job.model)
        loss.backward()
        first = gradients(job.model)
        job.forward().backward()
        return {f"first {name}": g for name, g in first.items()}

    compare(loop, "conv", "swap")


def test_the_mode_is_gone_after_the_region() -> None:
    job = make_job("conv")
    with planned(job, "recompute"):
        loss = job.forward()
        assert _get_current_dispatch_mode() is None
        loss.backward()
        assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_of_parts_in_an_order_never_profiled(choice: str) -> None:
    """Backward passes over parts of the graph read saved values in another order than the schedule foresaw."""

    def loop(job: Job, run: Run | None) -> dict[str, Tensor]:
        loss = job.forward()
        names, parameters = zip(*job.model.named_parameters(), strict=True)
        found = {}
        for name, parameter in zip(names, parameters, strict=True):
            (found[f"alone {name}"],) = torch.autograd.grad(loss, parameter, retain_graph=True)
        loss.backward()
        return found

    compare(loop, "transformer", choice)


class TwoHeads(nn.Module):
    """Two branches over one trunk; each branch can be run backward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        shared = torch.tanh(self.trunk(rows)).sin()
        return torch.tanh(self.left(shared)).exp().sum(), torch.tanh(self.right(shared)).cos().sum()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("choice", CHOICES)
def test_branches_run_backward_one_after_the_other(choice: str, first: int) -> None:
    results = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model, rows = TwoHeads(), torch.rand(16, 8)
        profile = quick_profile(lambda m=model, r=rows: sum(m(r)), model)  # type: ignore[misc]
        decisions = mixed(profile, "model") if choice == "mixed" else all_of(profile, choice, "model")  # type: ignore[arg-type]
        with apply_plan(tight_plan(profile, decisions if is_planned else {}, "model"), model) as run:
            losses = model(rows)
            losses[first].backward(retain_graph=True)
            losses[1 - first].backward()
            assert (run.stats.swapped_out_bytes + run.stats.recomputed_ops > 0) == is_planned
        results.append(gradients(model))
    assert_same(*results)


@pytest.mark.parametrize("seed", range(20))
def test_any_decisions_survive_any_order_of_branches(seed: int) -> None:
    """A replay may come before the one that the schedule foresaw first, and must still find its sources."""
    torch.manual_seed(0)
    model, rows = TwoHeads(), torch.rand(16, 8)
    profile = quick_profile(lambda: sum(model(rows)), model)  # type: ignore[arg-type]
    random = Random(seed)
    recomputable = all_of(profile, "recompute", "model")
    decisions: dict[int, Choice] = {
        value: random.choice(("keep", "swap", "recompute") if value in recomputable else ("keep", "swap"))
        for value in all_of(profile, "keep", "model")
    }
    found = []
    for plan in (tight_plan(profile, {}, "model"), tight_plan(profile, decisions, "model")):
        with apply_plan(plan, model):
            for order in ((0, 1), (1, 0)):
                model.zero_grad()
                losses = model(rows)
                losses[order[0]].backward(retain_graph=True)
                losses[order[1]].backward(retain_graph=bool(seed % 2))
        found.append(gradients(model))
    assert_same(*found)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_part_of_the_backward_pass_that_never_comes(choice: str) -> None:
    """Only one of two branches is run backward: what the other one saved goes unread, and is let go of with the
    graph.
    """
    results = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model, rows = TwoHeads(), torch.rand(16, 8)
        profile = quick_profile(lambda m=model, r=rows: sum(m(r)), model)  # type: ignore[misc]
        decisions = mixed(profile, "model") if choice == "mixed" else all_of(profile, choice, "model")  # type: ignore[arg-type]
        with apply_plan(tight_plan(profile, decisions if is_planned else {}, "model"), model):
            for number in range(2):
                losses = model(rows)
                losses[number].backward()
        results.append(gradients(model))
    assert_same(*results)


@pytest.mark.parametrize("choice", CHOICES)
def test_two_planned_models_in_turn(choice: str) -> None:
    first, second = make_job("conv"), make_job("conv")
    expected, _ = _two_models(first, second)
    first, second = make_job("conv"), make_job("conv")
    with planned(first, choice) as one, planned(second, choice) as other:
        actual, _ = _two_models(first, second)
        for run in (one, other):
            assert run.stats.swapped_out_bytes + run.stats.recomputed_ops > 0
    assert_same(expected, actual)


def _two_models(first: Job, second: Job) -> tuple[dict[str, Tensor], None]:
    torch.manual_seed(1)
    found: dict[str, Tensor] = {}
    for number in range(2):
        one, other = first.forward(), second.forward()
        (one * other).backward()
        for job in (first, second):
            job.optimizer.step()
            job.optimizer.zero_grad()
        found |= {f"one {number}": one.detach(), f"other {number}": other.detach()}
    return found, None


def test_models_train_in_threads_of_their_own() -> None:
    """Each thread has its own region; the mode of one never shows ops of the other."""
    jobs = [make_job("recurrent") for _ in range(2)]
    for job in jobs:
        job.model.eval()  # without dropout, since all threads draw from one generator
    expected = _one_step(make_job("recurrent"))
    runs = []
    for job in jobs:
        profile = profile_job(job)
        runs.append(apply_plan(tight_plan(profile, mixed(profile, "model"), "model"), job.model))
    found: list[dict[str, Tensor]] = []
    threads = [threading.Thread(target=lambda j=job: found.append(_one_step(j))) for job in jobs]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for run in runs:
        assert run.stats.recomputed_ops > 0
        assert run.stats.mismatches == 0
        run.remove()
    assert len(found) == 2
    for one in found:
        assert_same(expected, one)


def _one_step(job: Job) -> dict[str, Tensor]:
    job.model.eval()
    job.forward().backward()
    return gradients(job.model)


def test_one_model_in_two_threads_at_once() -> None:
    job = make_job("recurrent")
    job.model.eval()
    plain = make_job("recurrent")
    plain.model.eval()
    for _ in range(2):
        plain.forward().backward()
    barrier = threading.Barrier(2)
    profile = profile_job(job)
    with apply_plan(tight_plan(profile, mixed(profile, "model"), "model"), job.model):
        losses: list[Tensor] = []

        def forward() -> None:
            barrier.wait(30)
            losses.append(job.forward())

        threads = [threading.Thread(target=forward) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for loss in losses:
            loss.backward()
    assert_same(gradients(plain.model), gradients(job.model))


@pytest.mark.parametrize("choice", ["swap", "recompute"])
def test_shared_weights(choice: Choice) -> None:
    job = make_job("transformer")
    assert job.model.head.weight is job.model.embed.weight  # type: ignore[union-attr]
    fired = []
    with planned(job, choice):
        job.model.embed.weight.register_hook(lambda grad: fired.append(1))  # type: ignore[union-attr]
        job.forward().backward()
    assert len(fired) == 1


def test_loss_stays_equal_under_is_same() -> None:
    assert is_same(torch.tensor(float("nan")), torch.tensor(float("nan")))
    assert not is_same(torch.tensor(0.0), torch.tensor(-0.0))
