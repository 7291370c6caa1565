"""Memory runs out, or the peak is over the budget, or the path changes: training goes on, and the numbers stay."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pooch
from pooch.api import guarding
from pooch.api.guarding import Guard
from pooch.api.measure.measuring import optimize
from pooch.errors import InfeasibleBudget, PoochError, UsageError
from pooch.executor.engines import make_engine
from pooch.executor.snapshot import StepSnapshot
from pooch.ir import Profile
from pooch.torchtools.out_of_memory import is_out_of_memory, missing_bytes
from pooch.workloads import WorkloadFactory
from tests.children import child_environment
from tests.chosen_device import chosen_device
from tests.executor.nets import Job, make_job
from tests.executor.support import assert_same, budget_at, profile_job
from tests.measure.test_training import WIDE
from tests.moved_along import MovedAlong
from tests.simulated_cuda.mistakes import is_simulated

MIB = 2**20
CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 1048576 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 3.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which "
    "1.00 MiB is free. Process 1 has 79.00 GiB memory in use."
)
ERRORS: dict[str, Callable[[], BaseException]] = {
    "cpu": lambda: RuntimeError(CPU_TEXT),
    "cuda": lambda: torch.OutOfMemoryError(CUDA_TEXT),
    "python": MemoryError,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    gc.collect()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def profile() -> Profile:
    gc.collect()  # tensors that earlier tests left would count in the profile, and be gone when a step is measured
    return profile_job(make_job("conv", 2, chosen_device()))


PLANNING = {"time_limit_s": 3}


class Trouble:
    """Raises an error in the forward or the backward pass of a step, so many times."""

    def __init__(self, job: Job, step: int, where: str, error: Callable[[], BaseException], times: int = 1) -> None:
        self.job, self.step, self.where, self.error, self.left = job, step, where, error, times
        self.now = 0

    def forward(self) -> Tensor:
        loss = self.job.forward()
        if self.now != self.step or self.left == 0:
            return loss
        self.left -= 1
        if self.where == "forward":
            raise self.error()
        loss.register_hook(self._in_backward)
        if self.where == "late in backward":
            first = next(self.job.model.parameters())
            handle = first.register_hook(lambda grad: (handle.remove(), self._in_backward(grad)))
            loss._backward_hooks.clear()  # type: ignore[union-attr]
        return loss

    def _in_backward(self, gradient: Tensor) -> None:
        raise self.error()


def train(job: Job, step: Callable[[], Tensor], steps: int = 3, accumulate: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(11)
    found: dict[str, Tensor] = {}
    for number in range(steps):
        if not accumulate:
            job.optimizer.zero_grad()
        found[f"{number}: loss"] = step().clone()
        found |= {f"{number}: {n}": p.grad.clone() for n, p in job.model.named_parameters() if p.grad is not None}
        job.optimizer.step()
        job.next_batch()
    found |= {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    found = {name: tensor.cpu() for name, tensor in found.items()}  # the device has room for what is planned, no more
    return found | {"random state": torch.get_rng_state(), "numbers of Python": torch.tensor(_python_random())}


def _python_random() -> float:
    import random

    return random.random()


def plain_step(job: Job) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = job.forward()
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize(
    ("where", "kind", "accumulate"),
    [
        ("forward", "cpu", False),
        ("backward", "cuda", False),
        ("late in backward", "python", True),
        ("late in backward", "cpu", False),
    ],
)
def test_a_step_that_runs_out_of_memory_is_repeated_as_if_nothing_had_happened(
    profile: Profile, where: str, kind: str, accumulate: bool
) -> None:
    import random

    random.seed(5)
    expected_job = make_job("conv", 2)
    expected = train(expected_job, plain_step(expected_job), accumulate=accumulate)
    del expected_job  # all tensors of the process count
    gc.collect()
    random.seed(5)
    job = make_job("conv", 2)
    trouble = Trouble(job, 1, where, ERRORS[kind])

    def step() -> Tensor:
        loss = guard.step(trouble.forward)
        trouble.now += 1
        return loss

    budget_bytes = budget_at(profile, 0.9)
    with pooch.guard(profile, budget_bytes, job.model, planning=PLANNING) as guard:
        first_peak = guard.plan.predicted_peak_bytes
        with pytest.warns(UserWarning, match="out of memory in step 2") as told:
            actual = train(job, step, accumulate=accumulate)
        assert len([one for one in told if "planning again" in str(one.message)]) == 1
        (repair,) = guard.repairs
        assert (repair.step, repair.reason) == (2, "out of memory")
        missing = {"cpu": MIB, "cuda": 2 * MIB, "python": int(0.05 * first_peak)}[kind]
        assert repair.missing_bytes == missing
        least = pooch.smallest_budget(profile, region="step")
        assert guard.plan.predicted_peak_bytes == repair.predicted_peak_bytes <= max(first_peak - missing, least)
        assert guard.plan.budget_bytes == budget_bytes
        stats = guard.run.stats
        assert stats.swapped_in_bytes + stats.recomputed_ops > 0
        assert stats.mismatches == 0
    assert trouble.left == 0
    assert_same(expected, actual)
    assert "forward" not in vars(job.model)


def test_each_time_in_a_row_takes_off_twice_as_much_until_no_plan_is_left(profile: Profile) -> None:
    job = make_job("conv", 2)
    trouble = Trouble(job, 0, "forward", ERRORS["cpu"], times=1000)
    with pooch.guard(profile, "100%", job.model, planning=PLANNING) as guard, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InfeasibleBudget):
            guard.step(trouble.forward)
        missing = [repair.missing_bytes for repair in guard.repairs]
        assert len(missing) >= 2
        assert missing == [MIB << number for number in range(len(missing))]
        peaks = [repair.predicted_peak_bytes for repair in guard.repairs]
        assert peaks == sorted(peaks, reverse=True)
        trouble.left = 0
        guard.step(trouble.forward)  # the tightest plan is still in force
        assert guard.run.stats.swapped_in_bytes + guard.run.stats.recomputed_ops > 0


def test_another_error_passes_and_nothing_is_planned_again(profile: Profile) -> None:
    job = make_job("conv", 2)
    trouble = Trouble(job, 0, "backward", lambda: RuntimeError("a shape is wrong"))
    with pooch.guard(profile, budget_at(profile, 0.8), job.model, planning=PLANNING) as guard:
        with pytest.raises(RuntimeError, match="a shape is wrong"):
            guard.step(trouble.forward)
        assert guard.repairs == []
        guard.step(trouble.forward)


@pytest.mark.usefixtures("without_floor")
def test_a_peak_over_the_budget_gives_the_next_step_a_tighter_plan(profile: Profile) -> None:
    job = make_job("conv", 2)
    loose = pooch.plan(profile, budget_at(profile, 0.9), region="step", **PLANNING)
    budget_bytes = budget_at(profile, 0.8)
    lying = replace(loose, budget_bytes=budget_bytes)
    with pooch.guard(profile, budget_bytes, job.model, plan=lying, planning=PLANNING) as guard:
        with pytest.warns(UserWarning, match="peak over the budget in step 1"):
            guard.step(job.forward)
        assert [repair.reason for repair in guard.repairs] == ["peak over the budget"]
        job.model.zero_grad()
        guard.step(job.forward)
        assert guard.run.stats.peak_bytes is not None
        assert guard.run.stats.peak_bytes <= budget_bytes
        assert len(guard.repairs) == 1
        status = guard.status()
        assert (status.steps, status.mode) == (2, "plan")
        assert status.budget_mib == round(budget_bytes / 2**20, 2)
        assert status.peak_mib == round(guard.run.stats.peak_bytes / 2**20, 2)
        assert repr(guard).startswith("Guard(")
        assert repr(guard).endswith("2 steps, 1 repair)")
        assert repr(guard.run).endswith("1 step)")


@pytest.mark.usefixtures("without_floor")
def test_a_peak_over_the_budget_is_found_in_a_later_step_too() -> None:
    plain = make_job("conv", 2)
    expected = _train_with_ballast(plain, plain_step(plain))
    del plain
    gc.collect()
    job = make_job("conv", 2)
    profile = profile_job(job)
    plan = pooch.plan(profile, budget_at(profile, 0.8), region="step", **PLANNING)
    plan = replace(plan, budget_bytes=plan.predicted_peak_bytes + MIB // 2)  # half of what will be too much
    step, measured = (5, 2) if job.device.type == "cpu" else (4, 3)  # a GPU's allocator counts in every step
    with pooch.guard(profile, plan.budget_bytes, job.model, plan=plan, planning=PLANNING, measure_every=5) as guard:
        with pytest.warns(UserWarning, match=f"peak over the budget in step {step}, .* alive before the step") as told:
            actual = _train_with_ballast(job, lambda: guard.step(job.forward))
        assert len(told) == 1
        (repair,) = guard.repairs
        assert (repair.step, repair.reason) == (step, "peak over the budget")
        assert guard.plan.predicted_peak_bytes <= plan.predicted_peak_bytes - repair.missing_bytes
        assert guard.run.stats.peak_bytes is not None
        assert guard.run.stats.peak_bytes <= plan.budget_bytes
        assert guard.run.totals.steps_measured == measured
        assert guard.run.totals.steps_over_budget == 0
    assert_same(expected, actual)


def _train_with_ballast(job: Job, step: Callable[[], Tensor]) -> dict[str, Tensor]:
    """From the fourth step on there is a tensor that nobody has profiled."""
    torch.manual_seed(11)
    ballast = None
    for number in range(1, 8):
        if number == 4:
            ballast = torch.zeros(MIB, dtype=torch.uint8)
        job.optimizer.zero_grad()
        step()
        job.optimizer.step()
        job.next_batch()
    assert ballast is not None
    return {name: tensor.clone() for name, tensor in job.model.state_dict().items()}


@pytest.mark.usefixtures("without_floor")
def test_layers_that_are_unfrozen_under_a_guard_lead_to_a_tighter_plan() -> None:
    from tests.executor.support import quick_profile

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(8)])
    model[:4].requires_grad_(False)
    rows = torch.rand(1024, 256)
    profile = quick_profile(lambda: model(rows).square().mean(), model)
    plan = pooch.plan(profile, budget_at(profile, 0.8), region="step", **PLANNING)
    plan = replace(plan, budget_bytes=plan.predicted_peak_bytes + 2**14)
    with pooch.guard(profile, plan.budget_bytes, model, plan=plan, planning=PLANNING) as guard:
        guard.step(lambda: model(rows).square().mean())
        model.zero_grad()
        model.requires_grad_(True)
        with pytest.warns(UserWarning, match=r"over the budget in step 2, .*8 parameters \(0.0.weight"):
            guard.step(lambda: model(rows).square().mean())
        assert guard.repairs[0].reason == "peak over the budget"


class Picky(torch.nn.Module):
    """Its path depends on the rows that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows).tanh() if len(rows) % 2 else layer(rows).sigmoid()
        return rows.square().sum()


def gradients_of(model: torch.nn.Module, step: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss = step()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None} | {"loss": loss}


@pytest.mark.parametrize("by_itself", [False, True])
def test_another_path_can_be_planned_again(by_itself: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.executor.support import quick_profile

    monkeypatch.setattr(
        guarding, "make_profile", lambda forward, model, optimizer, workload: quick_profile(forward, model)
    )
    torch.manual_seed(0)
    model = Picky()
    even, odd = torch.rand(1024, 64), torch.rand(1025, 64)

    def plain() -> Tensor:
        loss = model(odd)
        loss.backward()
        return loss.detach()

    expected = gradients_of(model, plain)
    model.zero_grad()
    profile = quick_profile(lambda: model(even), model)
    options: dict[str, Any] = {"replan_after": 2} if by_itself else {}
    with pooch.guard(profile, budget_at(profile, 0.8), model, planning=PLANNING, **options) as guard:
        with pytest.warns(UserWarning, match="left the planned path"):
            assert_same(expected, gradients_of(model, lambda: guard.step(lambda: model(odd))))
        assert guard.run.stats.mismatches == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # told once
            assert_same(expected, gradients_of(model, lambda: guard.step(lambda: model(odd))))
        if not by_itself:
            assert guard.repairs == []
            guard.plan_again(lambda: model(odd))
        assert [repair.reason for repair in guard.repairs] == ["another path"]
        assert_same(expected, gradients_of(model, lambda: guard.step(lambda: model(odd))))
        assert guard.run.stats.mismatches == 0
        assert guard.run.stats.swapped_in_bytes + guard.run.stats.recomputed_ops > 0


def test_a_path_that_cannot_be_planned_keeps_the_old_plan_and_says_so_once(profile: Profile) -> None:
    job = make_job("conv", 2)
    plan = pooch.plan(profile, budget_at(profile, 0.9), region="step", **PLANNING)

    def too_large(forward: Callable[[], Tensor]) -> Any:
        raise InfeasibleBudget(1, 2)

    guard = Guard(plan, job.model, lambda target: plan, reprofile=too_large, replan_after=1, measured_steps=0)
    job.batch = tuple(tensor[:4] for tensor in job.batch)
    with pytest.warns(UserWarning, match="no plan of policy"):
        guard.step(job.forward)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        guard.step(job.forward)
    assert not any("no plan of policy" in str(one.message) for one in told)
    assert guard.run.stats.mismatches == 1
    assert guard.repairs == []
    with pytest.raises(InfeasibleBudget):
        guard.plan_again(job.forward)
    guard.remove()


def test_a_guard_that_cannot_measure_says_so(profile: Profile) -> None:
    job = make_job("conv", 2)
    plan = pooch.plan(profile, budget_at(profile, 0.9), region="step", **PLANNING)
    with Guard(plan, job.model, lambda target: plan) as guard, pytest.raises(UsageError, match=r"pooch\.guard"):
        guard.plan_again(job.forward)
    with pytest.raises(UsageError, match="replan_after"):
        pooch.guard(profile, "90%", job.model, replan_after=0)


def test_optimize_repairs_what_runs_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "wide.py"
    path.write_text(WIDE)
    real, attempts = Guard._attempt, []

    def out_of_memory_at_first(self: Guard, forward: Callable[[], Tensor]) -> Any:
        attempts.append(self.plan.predicted_peak_bytes)

        def forward_that_fails() -> Tensor:
            forward()
            raise RuntimeError(CPU_TEXT)

        return real(self, forward_that_fails if len(attempts) == 1 else forward)

    monkeypatch.setattr(Guard, "_attempt", out_of_memory_at_first)
    result = optimize(WorkloadFactory(f"{path}:make"), "70%", steps=2, check=True)
    assert result.training.bitwise_equal, result.training.first_difference
    assert result.training.within_budget
    assert result.training.repairs == 1
    assert len(attempts) == 3
    assert result.plan.predicted_peak_bytes == attempts[-1] <= attempts[0] - MIB


def test_errors_say_what_was_missing() -> None:
    assert missing_bytes(RuntimeError(CPU_TEXT)) == MIB
    assert missing_bytes(torch.OutOfMemoryError(CUDA_TEXT)) == 2 * MIB
    in_pieces = CUDA_TEXT.replace("1.00 MiB is free", "5.00 MiB is free")
    assert missing_bytes(torch.OutOfMemoryError(in_pieces)) == 3 * MIB
    assert missing_bytes(torch.OutOfMemoryError(CUDA_TEXT.replace("1.00 MiB", "0.00 MiB"))) == 3 * MIB
    assert missing_bytes(MemoryError()) is None
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("a shape is wrong"))
    assert not is_out_of_memory(PoochError("no"))


def test_large_gradients_wait_in_the_tier(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600))
    weight = model[0].weight
    weight.grad = torch.rand(600, 600)
    before = weight.grad.clone()
    engine = make_engine(weight.device, tmp_path)
    snapshot = StepSnapshot(model, engine, weight.device)
    assert [each.storage.nbytes() for each in snapshot._large] == [weight.grad.untyped_storage().nbytes()]
    weight.grad.add_(1)
    model[0].bias.grad = torch.ones(600)
    model(torch.rand(4, 600))
    assert float(model[1].num_batches_tracked) == 1  # type: ignore[arg-type]
    for _ in range(2):  # as often as it takes
        snapshot.restore()
        assert torch.equal(weight.grad, before)
        assert model[0].bias.grad is None
        assert float(model[1].num_batches_tracked) == 0  # type: ignore[arg-type]
        assert torch.equal(model[1].running_mean, torch.zeros(600))  # type: ignore[arg-type]
        weight.grad.zero_()
    snapshot.close()
    engine.close()


class Counting(torch.nn.Module):
    """Replaces its buffers in each step instead of changing them; looks words up with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(20, 4, sparse=True)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, words: Tensor) -> Tensor:
        found = self.words(words)
        self.steps, self.last = self.steps + 1, found.detach()
        return found.square().sum()


def test_buffers_that_a_step_replaced_are_the_old_ones_again(tmp_path: Path) -> None:
    model = Counting()
    before, device = model.steps, model.words.weight.device
    engine = make_engine(device, tmp_path)
    snapshot = StepSnapshot(model, engine, device)
    for _ in range(2):
        model(torch.arange(6))
        assert float(model.steps) == 1
        assert model.last is not None
        snapshot.restore()
        assert model.steps is before
        assert float(model.steps) == 0
        assert model.last is None
    snapshot.close()
    engine.close()


def test_parameters_and_buffers_that_got_other_data_have_the_former_again(tmp_path: Path) -> None:
    model = MovedAlong(4, "other data")
    before, device = {name: each.clone() for name, each in model.state_dict().items()}, torch.device("cpu")
    engine = make_engine(device, tmp_path)
    snapshot = StepSnapshot(model, engine, device)
    for _ in range(2):
        model(torch.ones(2, 4))
        assert not torch.equal(model.teacher.weight, before["teacher.weight"])
        snapshot.restore()
        assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    snapshot.close()
    engine.close()


def test_a_step_that_has_written_to_a_parameter_is_not_repeated(profile: Profile) -> None:
    job = make_job("conv", 2, chosen_device())
    trouble = Trouble(job, 0, "late in backward", MemoryError)
    last = list(job.model.parameters())[-1]  # its gradient is there first

    @torch.no_grad()
    def step(parameter: Tensor) -> None:
        parameter.sub_(0.1)

    last.register_post_accumulate_grad_hook(step)
    told = pytest.raises(UsageError, match="had already changed parameter")
    with pooch.guard(profile, budget_at(profile, 0.9), job.model, planning=PLANNING) as guard, told:
        guard.step(trouble.forward)


def test_gradients_without_plain_memory_are_put_back_each_time(tmp_path: Path) -> None:
    """A sparse gradient has no storage that could be copied; it accumulates all the same."""
    if is_simulated():
        pytest.skip("the simulated CUDA device has no numbers for sums of sparse tensors")
    torch.manual_seed(0)
    model = Counting()
    device = model.words.weight.device
    engine = make_engine(device, tmp_path)
    model(torch.tensor([1, 2])).backward()
    gradient = model.words.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    expected = gradient.cpu().to_dense().clone()
    snapshot = StepSnapshot(model, engine, device)
    for _ in range(2):
        model(torch.tensor([2, 3])).backward()
        assert model.words.weight.grad is not None
        model.words.weight.grad.mul_(2)
        gradient.mul_(3)  # whoever else holds it
        assert not torch.equal(model.words.weight.grad.cpu().to_dense(), expected)
        snapshot.restore()
        assert model.words.weight.grad is not None
        assert torch.equal(model.words.weight.grad.cpu().to_dense(), expected)
    snapshot.close()
    engine.close()


CHILD = """
import ctypes, resource, sys, warnings
import psutil, torch
import pooch
from pooch.ir import Link
from pooch.profiler import ProfileOptions, profile_step
from pooch.torchtools.memory_trace import live_bytes

ctypes.CDLL(None).mallopt(-3, 256 * 1024)  # large blocks are given back at once
torch.set_num_threads(1)
torch.manual_seed(0)

class Waves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = torch.nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.start = torch.nn.Parameter(torch.linspace(-1, 1, 6 * 2**20))

    def forward(self):
        hidden = self.start * 2
        for scale in self.scales:
            hidden = torch.sin(hidden * scale)
        return hidden.square().mean()

model = Waves()
link = Link("a fast tier", 0.01, 0.01, 1e6, 1e6)
profile = profile_step(model, model, None, link, ProfileOptions(warmup=0, repeats=1, mode="run")).profile
loose = pooch.plan(profile, "95%", region="step", time_limit_s=3)
tight = pooch.plan(profile, "60%", region="step", time_limit_s=3)  # whatever planning loads is loaded before the limit

def plain():
    model.zero_grad()
    loss = model()
    loss.backward()
    return [loss.detach(), model.scales.grad.clone(), model.start.grad.clone()]

expected = plain()
model.zero_grad()
with pooch.guard(profile, "95%", model, plan=loose, planning={"time_limit_s": 3}, measured_steps=0) as guard:
    room = int(0.7 * profile.peak_bytes) - live_bytes(torch.device("cpu")) + 64 * 2**20
    limit = psutil.Process().memory_info().vms + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        plain()
        print("plain training fits, so the limit says nothing")
    except RuntimeError as error:
        assert "can't allocate memory" in str(error), error
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = guard.step(model)
    actual = [loss, model.scales.grad, model.start.grad]
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    same = all(torch.equal(a, b) for a, b in zip(expected, actual))
    print("same" if same else "different", len(guard.repairs), {repair.reason for repair in guard.repairs})
"""


@pytest.mark.cpu
@pytest.mark.slow
def test_a_process_whose_memory_really_runs_out_goes_on_with_a_tighter_plan() -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=300, env=child_environment(), check=False
    )
    assert child.returncode == 0, child.stderr
    said, repairs, reasons = child.stdout.strip().splitlines()[-1].split(maxsplit=2)
    assert said == "same", child.stdout
    assert int(repairs) >= 1
    assert reasons == "{'out of memory'}"


# What is no reason to plan again, and how often there is one ----------------------------------------------------------


def lying(profile: Profile, share: float = 0.8) -> Any:
    """A plan whose peak is over what it says its budget is."""
    loose = pooch.plan(profile, budget_at(profile, 0.9), region="step", **PLANNING)
    return replace(loose, budget_bytes=budget_at(profile, share))


@pytest.mark.usefixtures("without_floor")
@pytest.mark.parametrize("is_explained", [True, False])
def test_a_peak_that_the_allocators_rounding_explains_is_told_once_and_planned_no_tighter(
    profile: Profile, is_explained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pooch.executor import watch

    job = make_job("conv", 2)
    chosen = lying(profile)
    monkeypatch.setattr(watch, "rounding_bytes", lambda device: 2**40 if is_explained else 1)
    with (
        pooch.guard(profile, chosen.budget_bytes, job.model, plan=chosen, planning=PLANNING, measured_steps=2) as guard,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            job.model.zero_grad()
            guard.step(job.forward)
        texts = [str(one.message) for one in told if "over the budget" in str(one.message)]
        assert len(texts) == 1, texts
        if is_explained:
            assert "PyTorch's allocator rounds" in texts[0]
            assert guard.run.totals.steps_over_budget == 0
        assert len(guard.repairs) == (0 if is_explained else 1)


@pytest.mark.usefixtures("without_floor")
def test_plans_are_made_again_for_measured_peaks_a_few_times_and_no_more(profile: Profile) -> None:
    """Plans that never help: whatever is asked for, the same comes back."""
    job = make_job("conv", 2)
    chosen = lying(profile)
    asked: list[int] = []

    def no_better(target_bytes: int) -> Any:
        asked.append(target_bytes)
        return chosen

    told: list[str] = []
    steps = guarding.MOST_TIGHTENED + 3
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with Guard(chosen, job.model, no_better, measured_steps=steps, tell=told.append) as guard:
            for _ in range(steps):
                job.model.zero_grad()
                guard.step(job.forward)
            assert guard.run.totals.steps_over_budget == 3
            assert len(guard.repairs) == len(asked) == guarding.MOST_TIGHTENED
    assert told[-1].startswith(f"planned again {guarding.MOST_TIGHTENED} times")
    # THEN later peaks are still told, by the run itself and once
    assert len([one for one in warned if "over the budget of" in str(one.message)]) == 1
