"""The native watch follows a path by itself, sees what a dispatch mode sees, and calls Python only where it must."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import pooch
from pooch.errors import PlanMismatch
from pooch.executor import Run, apply_plan, mode, native_watch
from pooch.executor.cursor import FIRST_VALUE
from pooch.executor.native_watch import NativeWatch
from pooch.executor.plan_guide import PlanGuide
from pooch.executor.recording import CallRecorder
from pooch.executor.step import Step
from pooch.executor.table import ActionTable
from pooch.ground import native
from pooch.torchtools import watch
from pooch.torchtools.effects import StorageMap
from pooch.torchtools.tensors import storage_of
from tests.children import child_environment
from tests.executor.fuzz_native_watch import faults
from tests.executor.support import all_of, mixed, quick_profile, tight_plan

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def built() -> Any:
    module = watch.LIBRARY.get()
    if module is None:
        pytest.skip(f"no native watch: {watch.LIBRARY.why_not}")
    return module


def is_watching() -> bool:
    module: Any = watch.LIBRARY.get()
    return bool(module.is_watching())


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often the kernel and the hooks call Python."""
    calls: Counter[str] = Counter()

    def counting(kind: Any, name: str) -> None:
        real = getattr(kind, name)

        def call(self: Any, *given: Any) -> Any:
            calls[name] += 1
            return real(self, *given)

        monkeypatch.setattr(kind, name, call)

    with monkeypatch.context() as monkeypatch:
        for name in ("act", "before", "after", "written_over", "look", "unseen"):
            counting(NativeWatch, name)
        for name in ("pack", "unpack"):
            counting(Step, name)
        yield calls


class Tanh(nn.Module):
    """Twenty small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(20))
        self.between: Callable[[Tensor], Tensor] = lambda rows: rows

    def forward(self, rows: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            rows = layer(rows).tanh()
            if number == 10:
                rows = self.between(rows)
        return rows.square().mean()


def gradients(model: nn.Module, rows: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    model(rows).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def planned(model: nn.Module, rows: Tensor, decide: Any = mixed) -> pooch.Plan:
    profile = quick_profile(lambda: model(rows), model)
    return tight_plan(profile, decide(profile, "model"), "model")


def trained(
    model: nn.Module, rows: Tensor, monkeypatch: pytest.MonkeyPatch, *, plan: pooch.Plan | None = None, steps: int = 3
) -> tuple[Run, Counter[str]]:
    """Train under a plan: each step has the bits of plain training, and is watched natively."""
    plan = planned(model, rows) if plan is None else plan
    expected = gradients(model, rows)
    with apply_plan(plan, model) as run, counted(monkeypatch) as calls:
        for _ in range(steps):
            calls.clear()
            assert equal(gradients(model, rows), expected)
            assert run.stats.mismatches == 0
            assert run.stats.swapped_in_bytes + run.stats.recomputed_ops > 0
    return run, calls


def test_python_is_called_only_where_the_plan_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = Tanh(), torch.rand(64, 32)
    profile = quick_profile(lambda: model(rows), model)
    kept = all_of(profile, "keep", "model")
    plan = tight_plan(profile, kept | {min(kept): "swap"}, "model")
    _, calls = trained(model, rows, monkeypatch, plan=plan, steps=6)  # what moves is looked at until it is proven
    due = {action.slot for action in plan.schedule.actions if action.slot < plan.first_slot + len(plan.expected)}
    assert len(plan.expected) > 40
    assert calls["act"] + calls["before"] == len(due | {plan.first_slot})
    assert calls["before"] == 1  # the first op finds out whether anything has to be looked at
    assert calls["after"] <= calls["before"] + 1  # what makes the value that moves
    assert calls["pack"] <= 2
    assert calls["unpack"] <= 4


def test_another_plan_of_the_same_ops_knows_them_from_its_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is made again while training runs would otherwise have all of its ops pass through Python once."""
    model, rows = Tanh(), torch.rand(64, 32)
    profile = quick_profile(lambda: model(rows), model)
    kept = all_of(profile, "keep", "model")
    plans = [tight_plan(profile, kept | {value: "swap"}, "model") for value in sorted(kept)[:2]]
    first, second = map(ActionTable.of, plans)
    assert second.after(ActionTable.of(replace(plans[0], expected=plans[0].expected[1:]))) is second
    expected, told = gradients(model, rows), list[int]()
    for plan, following in zip([*plans, plans[1]], (lambda: first, lambda: second.after(first), None), strict=True):
        with monkeypatch.context() as patched:
            if following is not None:
                patched.setattr(ActionTable, "of", lambda _, following=following: following())
            with apply_plan(plan, model), counted(patched) as calls:
                assert equal(gradients(model, rows), expected)
                told.append(calls["before"])
    ops = len(plans[0].expected)
    assert told[0] >= ops
    assert told[1] < ops / 2
    assert told[2] >= ops, "of a plan that stands alone"


def test_a_model_is_watched_by_a_dispatch_mode_where_there_is_no_native_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "is_native", lambda _: False)
    model, rows = Tanh(), torch.rand(64, 32)
    _, calls = trained(model, rows, monkeypatch)
    assert calls["before"] == 0
    assert calls["pack"] > 20


def test_without_a_compiler_training_goes_on_and_one_line_says_so(tmp_path: Any) -> None:
    environment = child_environment(CXX="/nonexistent/c++", POOCH_CACHE_DIRECTORY=str(tmp_path))
    done = run(TRAIN, environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False True"
    told = [line for line in done.stderr.splitlines() if "natively" in line]
    assert len(told) == 1
    assert "there is no /nonexistent/c++" in told[0]


def test_building_is_told_once(tmp_path: Any) -> None:
    """With a compiler that takes no half a minute: it gives what the real one has made for these tests."""
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    built = watch.built_library()
    compiler.write_text(STAND_IN.format(calls=calls, built=built, real=" ".join(native.compiler())))
    compiler.chmod(0o700)
    environment = child_environment(POOCH_CACHE_DIRECTORY=str(tmp_path / "cache"), CXX=str(compiler))
    first, second = run(TRAIN, environment), run(TRAIN, environment)
    assert first.stdout.strip() == second.stdout.strip() == "True True", first.stderr + second.stderr
    assert sum("building" in line for line in first.stderr.splitlines()) == 1
    assert "building" not in second.stderr
    assert calls.read_text().split() == [built.name]


STAND_IN = """#!/bin/sh
previous=
for word in "$@"; do [ "$previous" = -o ] && made="$word"; previous="$word"; done
case "${{made##*/}}" in
  watch-*) echo "${{made##*/}}" >> "{calls}"; exec cp "{built}" "$made" ;;
  *) exec {real} "$@" ;;
esac
"""


def run(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)


TRAIN = """
import torch, pooch
from pooch.torchtools import watch
model, rows = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Tanh()), torch.rand(4, 8)
def step():
    model.zero_grad()
    model(rows).sum().backward()
    return model[0].weight.grad.clone()
plain = step()
profile = pooch.profile(lambda: model(rows).sum(), model)
plan = pooch.plan_from_decisions(profile, dict.fromkeys([v.id for v in profile.activations], "swap"), region="model")
with pooch.apply(plan, model) as run:
    print(watch.LIBRARY.get() is not None, torch.equal(step(), plain))
"""


# What PyTorch does otherwise without a mode ---------------------------------------------------------------------------


class Masked(nn.Module):
    """Attention adds its mask in place unless a dispatch mode is there."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 48)
        self.register_buffer("mask", torch.rand(6, 6))

    def forward(self, rows: Tensor) -> Tensor:
        query, key, value = self.mix(rows).chunk(3, -1)
        mixed = functional.scaled_dot_product_attention(query, key, value, self.mask, dropout_p=0.2)
        return mixed.tanh().exp().sum()


@pytest.mark.parametrize("decide", [mixed, lambda p, r: all_of(p, "recompute", r), lambda p, r: all_of(p, "swap", r)])
def test_ops_in_place_stand_for_those_that_a_mode_sees(decide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, rows = Masked(), torch.rand(2, 6, 16)
    plan = planned(model, rows, decide)
    assert any(op.name == "aten.add.Tensor" for op in plan.expected)
    run, _ = trained(model, rows, monkeypatch, plan=plan)
    assert not run._table.native_use.is_refused


class Aligned(nn.Module):
    """The loss of speech recognition runs other ops if a dispatch mode is there, beside an overload of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 12)
        self.register_buffer("targets", torch.randint(1, 12, (2, 3)))

    def forward(self, rows: Tensor) -> Tensor:
        steps, samples = rows.shape[:2]
        scores = self.mix(rows).tanh().sin().log_softmax(-1)
        return functional.ctc_loss(scores, self.targets, torch.full((samples,), steps), torch.tensor([3, 2]))


@pytest.mark.cpu
def test_a_loss_that_runs_other_ops_under_a_mode_follows_its_plan_from_the_first_step_on() -> None:
    torch.manual_seed(0)
    model, rows = Aligned(), torch.rand(8, 2, 16)
    expected = torch.autograd.grad(model(rows), list(model.parameters()))
    with apply_plan(planned(model, rows, mixed), model, on_mismatch="error") as run:
        for _ in range(3):
            found = torch.autograd.grad(model(rows), list(model.parameters()))
            assert all(map(torch.equal, found, expected))
    assert run.totals.steps == 3
    assert run.totals.steps_off_path == 0


class AddsEitherWay(nn.Module):
    """Adds in place when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.in_place = False

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.second(self.first(rows).tanh().cos())
        rows = rows.add_(1) if self.in_place else rows.add(1)
        return rows.exp().sin().tanh().sum()


def test_what_is_due_before_an_op_is_done_before_one_in_place_that_stands_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, rows = AddsEitherWay(), torch.rand(8, 16)
    plan = planned(model, rows, lambda p, r: all_of(p, "swap", r))
    (added,) = [plan.first_slot + at for at, op in enumerate(plan.expected) if op.name == "aten.add.Tensor"]
    slots = sorted({action.slot for action in plan.schedule.actions})
    assert added in slots
    guides: list[PlanGuide] = []
    of_step = native_watch.native_actions
    monkeypatch.setattr(native_watch, "native_actions", lambda step: guides.append(step.guide) or of_step(step))
    with apply_plan(plan, model) as run:
        for in_place in (False, False, True, False, True):
            model.in_place = in_place
            model(rows).backward()
            assert run.stats.mismatches == 0
            assert sorted(guides.pop().acted) == slots


def to_double(rows: Tensor) -> Tensor:
    return rows.to(torch.float64).float()


def to_half(rows: Tensor) -> Tensor:
    return rows.to(torch.float16).float()


def writes_two(rows: Tensor) -> Tensor:
    made = [rows.detach().exp(), rows.detach().sin()]
    torch._foreach_mul_(made, 2)
    return rows * made[0]


def writes_one(rows: Tensor) -> Tensor:
    made = [rows.detach().exp(), rows.detach().sin()]
    torch._foreach_mul_(made[:1], 2)
    return rows * made[0]


def multiplies(rows: Tensor) -> Tensor:
    return rows * 1.5


def divides(rows: Tensor) -> Tensor:
    return rows / 1.5


def halves(rows: Tensor) -> Tensor:
    return torch.cat([rows[:32].sin(), rows[32:]])


def quarters(rows: Tensor) -> Tensor:
    return torch.cat([rows[:16].sin(), rows[16:]])


def dense(rows: Tensor) -> Tensor:
    return rows * (rows.detach() * 2)


def thin(rows: Tensor) -> Tensor:
    return rows * (rows.detach().to_sparse() * 2).to_dense()


@pytest.mark.usefixtures("watched_by")
@pytest.mark.parametrize(
    ("before", "after"),
    [(to_double, to_half), (writes_two, writes_one), (multiplies, divides), (halves, quarters), (dense, thin)],
)
def test_an_op_that_differs_from_the_expected_one_leaves_the_path(
    before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    model, rows = Tanh(), torch.rand(64, 32)
    model.between = before
    profile = quick_profile(lambda: model(rows), model)
    kept = all_of(profile, "keep", "model")
    with apply_plan(tight_plan(profile, kept | {min(kept): "swap"}, "model"), model) as run:
        for _ in range(2):
            gradients(model, rows)
            assert run.stats.mismatches == 0
        model.between = after
        with run.paused():
            expected = gradients(model, rows)
        with pytest.warns(UserWarning, match="left the planned path"):
            assert equal(gradients(model, rows), expected)
        assert run.stats.mismatches == 1


def test_a_result_that_is_no_value_is_not_taken_for_the_op_that_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of three dimensions ends in a view that PyTorch does not declare."""
    torch.manual_seed(0)
    model, rows = Tanh(), torch.rand(4, 16, 32)
    weight = torch.rand(32, 32)
    model.between = lambda each: (each @ weight).exp()
    profile = quick_profile(lambda: model(rows), model)
    kept = all_of(profile, "keep", "model")
    plan = tight_plan(profile, kept | {min(kept): "swap"}, "model")
    due = {action.slot for action in plan.schedule.actions if action.slot < plan.first_slot + len(plan.expected)}
    _, calls = trained(model, rows, monkeypatch, plan=plan, steps=6)
    assert calls["act"] + calls["before"] == len(due | {plan.first_slot})
    assert calls["after"] <= calls["before"] + 2  # what makes the value that moves, and the view


class Asking(nn.Module):
    """A program that looks for modes itself, and does something else where it finds one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.linear(rows).tanh()
        return (rows.exp() if torch._C._len_torch_dispatch_stack() else rows.sin()).tanh().sum()


def test_a_path_that_the_watch_never_followed_is_followed_under_the_mode_next() -> None:
    torch.manual_seed(0)
    model, rows = Asking(), torch.rand(4, 16)
    plan = planned(model, rows)
    with apply_plan(plan, model) as run:
        with pytest.warns(UserWarning, match="left the planned path"):
            gradients(model, rows)
        assert run.stats.mismatches == 1
        for _ in range(2):
            gradients(model, rows)
            assert run.stats.mismatches == 0


def test_a_path_stays_with_the_mode_when_a_step_leaves_it_under_the_mode() -> None:
    torch.manual_seed(0)
    model, rows = Asking(), torch.rand(4, 16)
    plan = planned(model, rows)
    with warnings.catch_warnings(record=True), apply_plan(plan, model) as run:
        warnings.simplefilter("always")
        gradients(model, rows)
        gradients(model, rows)
        assert run.stats.mismatches == 0
        gradients(model, torch.rand(5, 16))
        assert run.stats.mismatches == 1
        gradients(model, rows)
        assert run.stats.mismatches == 0


def test_a_path_that_a_mode_leaves_as_well_is_watched_natively_again() -> None:
    torch.manual_seed(0)
    model, rows = Tanh(), torch.rand(64, 32)
    plan = planned(model, rows)
    with warnings.catch_warnings(record=True), apply_plan(plan, model) as run:
        warnings.simplefilter("always")
        for _ in range(2):
            gradients(model, torch.rand(5, 32))
            assert run.stats.mismatches == 1
        gradients(model, rows)
        assert run.stats.mismatches == 0
        assert run._table.native_use.is_proven


# What else is in place ------------------------------------------------------------------------------------------------


class Doubling(TorchDispatchMode):
    """A mode of the program's that changes what an op gives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.mul(2) if func is torch.ops.aten.sin.default else result


def with_doubling(rows: Tensor) -> Tensor:
    with Doubling():
        return rows.sin()


def with_inference(rows: Tensor) -> Tensor:
    with torch.inference_mode():
        factor = torch.ones(32).cos()
    return rows * factor.clone()


def with_profiler(rows: Tensor) -> Tensor:
    with torch.profiler.profile():
        return rows.sin()


def with_vmap(rows: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.sin() * 2)(rows)


def with_grad(rows: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(lambda each: each.sin().sum())(rows.detach())
    return rows * found


def with_autocast(rows: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (rows @ rows.t() @ rows).float()


def with_sparse(rows: Tensor) -> Tensor:
    return rows + torch.sparse.mm(torch.eye(64).to_sparse(), rows)


def with_complex(rows: Tensor) -> Tensor:
    return torch.view_as_real((torch.fft.fft(rows) * 1j).conj().resolve_conj()).sum(-1)


def with_meta(rows: Tensor) -> Tensor:
    return rows * float(torch.empty(3, device="meta").sin().dim())


def with_a_thread(rows: Tensor) -> Tensor:
    thread = threading.Thread(target=lambda: torch.rand(10).sin())
    thread.start()
    thread.join()
    return rows.sin()


def with_higher_order(rows: Tensor) -> Tensor:
    found: Tensor = torch.cond(rows.sum() > -1e9, lambda each: each.sin(), lambda each: each.cos(), (rows,))
    return found


def with_item(rows: Tensor) -> Tensor:
    return rows * (1.0 if rows.detach().sum().item() > 0 else 2.0)


def with_writes(rows: Tensor) -> Tensor:
    rows = rows.clone()
    rows[:, :4].mul_(2)
    torch._foreach_add_([rows[0].detach(), rows[1].detach()], 0.0)
    return torch.add(rows, 1, out=None)


INSIDE = [
    with_doubling, with_inference, with_profiler, with_vmap, with_grad, with_autocast, with_sparse,
    with_complex, with_meta, with_a_thread, with_higher_order, with_item, with_writes,
]  # fmt: skip


@pytest.mark.parametrize("between", INSIDE)
def test_what_a_step_does_inside_keeps_its_bits_and_its_path(
    between: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, rows = Tanh(), torch.rand(64, 32)
    model.between = between
    trained(model, rows, monkeypatch)


def test_a_mode_of_the_program_around_the_step_sees_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, rows = Tanh(), torch.rand(64, 32)
    model.between = torch.sin
    plan = planned(model, rows, lambda p, r: all_of(p, "swap", r))
    with Doubling():
        expected = gradients(model, rows)
    with apply_plan(plan, model) as run, counted(monkeypatch) as calls:
        for _ in range(2):
            with Doubling():
                found = gradients(model, rows)
            assert equal(found, expected)
        assert run.stats.swapped_in_bytes > 0
        assert calls["before"] == 0


class Reading(TorchDispatchMode):
    """A mode of the program's that reads, at an op, what was made long before."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None
        self.found: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.kept is not None:
            self.found.append(float(self.kept.sum()))
        return func(*args, **(kwargs or {}))


class Skipping(Tanh):
    """Holds an early value until the end. In between, a mode sees an op."""

    reads = False

    def forward(self, rows: Tensor) -> Tensor:
        self.mode = Reading()
        for number, layer in enumerate(self.layers):
            rows = layer(rows).tanh()
            if number == 2:
                held = rows
            if number == 10:
                self.mode.kept = held if self.reads else None
                with self.mode:
                    rows = rows.cos()
                self.mode.kept = None
        return (rows + held).square().mean()


def test_what_is_away_is_brought_back_for_a_mode_inside() -> None:
    """In PyTorch up to 2.12 what a mode calls is hidden from all that lies above Python, as the watch does there."""
    torch.manual_seed(0)
    model, rows = Skipping(), torch.rand(64, 32)
    plan = planned(model, rows, lambda p, r: all_of(p, "swap", r))
    model.reads = True
    expected, found = gradients(model, rows), model.mode.found
    with apply_plan(plan, model) as run, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for reads in (False, False, True):
            model.reads = reads
            assert equal(gradients(model, rows), expected)
            assert run.stats.emptied_bytes > 0
            assert run.stats.mismatches == reads
            assert model.mode.found == (found if reads else [])


def test_a_compiled_part_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, rows = Tanh(), torch.rand(64, 32)
    part = torch.compile(lambda each: each.sin() * 2, backend="aot_eager")
    model.between = part
    expected = gradients(model, rows)
    plan = planned(model, rows)
    with apply_plan(plan, model) as run:
        for _ in range(3):
            assert equal(gradients(model, rows), expected)
        assert run.stats.mismatches == 0
        assert run.stats.swapped_in_bytes + run.stats.recomputed_ops > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_odd", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_steps_have_the_bits_of_plain_training(seed: int, is_odd: bool) -> None:
    assert faults(seed, is_odd) == []


class WritesLater(nn.Module):
    """Writes over a value in place of another tensor when told to, behind autograd: the ops stay the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.other = False

    def forward(self, rows: Tensor) -> Tensor:
        value = self.first(rows).cos()
        sine, spare = value.sin(), torch.zeros_like(rows)
        wide = self.second(rows).exp()
        (value.data if self.other else spare).mul_(3)
        return (wide.sin() + sine).sum()


@pytest.mark.usefixtures("watched_by")
def test_a_value_that_is_written_over_once_it_was_copied_is_read_as_it_is_then() -> None:
    torch.manual_seed(0)
    model, rows = WritesLater(), torch.rand(8, 16)
    profile = quick_profile(lambda: model(rows), model)
    (value,) = [each.id for each in profile.values if each.label.endswith("cos")]
    plan = tight_plan(profile, all_of(profile, "keep", "model") | {value: "swap"}, "model")
    write = plan.first_slot + [op.name for op in plan.expected].index("aten.mul_.Tensor")
    actions = [replace(each, slot=write + 2) if each.kind == "empty" else each for each in plan.schedule.actions]
    actions.sort(key=lambda action: action.slot)  # stable
    plan = replace(plan, schedule=replace(plan.schedule, actions=tuple(actions)))
    assert [each.kind for each in actions[:2]] == ["copy_out", "empty"]
    assert actions[0].slot < write - 1
    with apply_plan(plan, model, verify="off") as run:
        for other in (False, False, True, True, False):
            model.other = other
            with run.paused():
                expected = gradients(model, rows)
            assert equal(gradients(model, rows), expected)
            assert run.stats.mismatches == 0


class Shifts(nn.Module):
    """Changes a buffer after it was read, in place of another one when told to: the ops stay the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.shift, self.spare = (nn.Buffer(torch.ones(16)) for _ in range(2))
        self.other = False

    def forward(self, rows: Tensor) -> Tensor:
        hidden = (self.first(rows) + self.shift).tanh()
        with torch.no_grad():
            (self.shift if self.other else self.spare).add_(0.5)
        return hidden.exp().sin().sum()


@pytest.mark.usefixtures("watched_by")
def test_a_replay_reads_a_buffer_as_it_was() -> None:
    torch.manual_seed(0)
    model, rows = Shifts(), torch.rand(8, 16)
    plan = planned(model, rows, lambda p, r: all_of(p, "recompute", r))
    with apply_plan(plan, model, verify="off") as run:
        for other in (False, False, True, True):
            model.shift.data, model.other = torch.ones(16), other
            with run.paused():
                expected = gradients(model, rows)
            model.shift.data = torch.ones(16)
            assert equal(gradients(model, rows), expected)
            assert run.stats.recomputed_ops > 3
            assert run.stats.mismatches == 0


class HoldsAway(nn.Module):
    """Reads a value that is away, when told to, by an op that makes nothing of which a plan knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.reads = ""
        self.found = self.plain = torch.zeros(())

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        places = torch.arange(hidden.numel()).unsqueeze(0)
        thin = torch.sparse_coo_tensor(places, hidden.detach().view(-1), check_invariants=False)
        sine = hidden.sin()
        wide = self.second(rows).exp().tanh().sigmoid()
        if self.reads == "sparse":
            self.found = thin * 2
        elif self.reads == "dense":
            self.found = torch.tensor(float(torch.equal(hidden, self.plain)))
        elif self.reads == "view":
            self.found = torch.tensor(float(hidden[0, 1].item() == self.plain[0, 1].item()))
        elif not self.reads:
            self.plain = hidden.detach().clone()
        return (wide.exp().sin() + sine + hidden).sum()


@pytest.mark.usefixtures("watched_by")
@pytest.mark.parametrize("reads", ["sparse", "dense", "view"])
def test_a_value_that_is_away_is_back_when_it_is_read(reads: str) -> None:
    torch.manual_seed(0)
    model, rows = HoldsAway(), torch.rand(8, 16)
    model(rows)
    model.reads = reads
    expected = gradients(model, rows)
    read = model.found.to_dense()
    model.reads = "nothing"
    profile = quick_profile(lambda: model(rows), model)
    kept = all_of(profile, "keep", "model")
    plan = tight_plan(profile, kept | {min(kept): "swap"}, "model")  # so that nothing is due where it is read
    model.reads = reads
    with apply_plan(plan, model) as run:
        for _ in range(4):
            model.found = torch.zeros(())
            assert equal(gradients(model, rows), expected)
            assert torch.equal(model.found.to_dense(), read)
            assert (run.stats.mismatches, run.stats.late_swaps) == (0, 1)


# Errors ---------------------------------------------------------------------------------------------------------------


def test_an_op_that_fails_leaves_nothing_behind() -> None:
    model, rows = Tanh(), torch.rand(64, 32)
    plan, expected = planned(model, rows), gradients(model, rows)
    with apply_plan(plan, model) as run:
        gradients(model, rows)
        model.between = lambda each: each @ torch.ones(3, 3)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(rows)
            assert not is_watching()
        model.between = lambda each: each
        assert equal(gradients(model, rows), expected)
        assert run.stats.mismatches == 0


def test_a_saved_tensor_that_was_written_over_is_pytorchs_own_error() -> None:
    model, rows = Tanh(), torch.rand(64, 32)
    profile = quick_profile(lambda: model(rows), model)
    kept = all_of(profile, "keep", "model")
    with apply_plan(tight_plan(profile, kept | {min(kept): "swap"}, "model"), model):
        gradients(model, rows)
        saved: list[Tensor] = []
        model.between = lambda each: saved.append(each) or each  # type: ignore[func-returns-value]
        loss = model(rows)
        saved[0].data.mul_(1)  # not counted
        with torch.no_grad():
            saved[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_step_that_leaves_its_path_goes_on_right_and_is_followed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = Tanh(), torch.rand(64, 32)
    plan = planned(model, rows)
    with apply_plan(plan, model) as run, counted(monkeypatch) as calls:
        gradients(model, rows)
        model.between = lambda each: each.exp().cos()
        with run.paused():
            expected = gradients(model, rows)
        with pytest.warns(UserWarning, match=r"expected aten\.addmm.*got aten\.exp"):
            assert equal(gradients(model, rows), expected)
        assert run.stats.mismatches == 1
        model.between = lambda each: each
        calls.clear()
        gradients(model, rows)
        assert run.stats.mismatches == 0
        assert calls["before"] > 0


def test_all_that_comes_off_the_path_is_numbered_and_all_that_is_saved_there_passed_to_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There pressure alone decides what leaves, and any value may have to be made again."""
    recorders, record_on = list[CallRecorder](), CallRecorder.record_on

    def noted(recorder: CallRecorder, gathered: frozenset[int]) -> None:
        recorders.append(recorder)
        assert recorder.cursor.next_number() == FIRST_VALUE, "so far all had the numbers of the plan"
        record_on(recorder, gathered)

    monkeypatch.setattr(CallRecorder, "record_on", noted)
    model, rows = Tanh(), torch.rand(64, 32)
    profile = quick_profile(lambda: model(rows), model)
    kept = all_of(profile, "keep", "model")
    with (
        apply_plan(tight_plan(profile, kept | {min(kept): "swap"}, "model"), model) as run,
        counted(monkeypatch) as calls,
    ):
        for _ in range(5):
            calls.clear()
            gradients(model, rows)
        assert calls["before"] < 10
        assert calls["pack"] < 3
        model.between = lambda each: each.exp().cos()
        calls.clear()
        with pytest.warns(UserWarning, match="left the planned path"):
            gradients(model, rows)
        assert run.stats.mismatches == 1
        ops = 2 * 9 + len(("cos", "square", "mean"))  # after the one with which it leaves
        (recorder,) = recorders
        assert recorder.cursor.next_number() - FIRST_VALUE > ops
        assert calls["before"] <= 2, "Python has to do with the op with which the step leaves, and with no other one"
        assert calls["after"] <= 3, "those of ops on the path among them"
        assert calls["pack"] >= ops


def test_a_plan_that_must_be_followed_raises_from_the_kernel() -> None:
    model, rows = Tanh(), torch.rand(64, 32)
    plan = planned(model, rows)
    with apply_plan(plan, model, on_mismatch="error"):
        gradients(model, rows)
        model.between = torch.exp
        with pytest.raises(PlanMismatch, match=r"expected aten\.addmm"):
            model(rows)
        assert not is_watching()


def test_an_allocation_that_fails_is_tried_again_once_values_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = Tanh(), torch.rand(64, 32)
    profile = quick_profile(lambda: model(rows), model)
    kept = all_of(profile, "keep", "model")
    plan = tight_plan(profile, kept | {min(kept): "swap"}, "model")
    failures: list[BaseException] = [torch.OutOfMemoryError("no memory")]
    with apply_plan(plan, model) as run:
        gradients(model, rows)
        with run.paused():
            expected = gradients(model, rows)
        calls = 0

        def failing(each: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls % 8 == 0 and failures:
                raise failures.pop(0)
            return torch.ops.aten.tanh.out(each, out=torch.empty_like(each))

        with torch.library._scoped_library("aten", "IMPL") as library:
            library.impl("tanh", failing, "CPU", allow_override=True)
            assert equal(gradients(model, rows), expected)
            assert run.stats.ran_out_bytes == 1
            assert run.stats.mismatches == 0
            failures.append(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                gradients(model, rows)
            assert not is_watching()
        assert not failures
        assert equal(gradients(model, rows), expected)


def test_what_an_op_gives_is_not_the_plans_if_the_path_is_left_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an op in another thread may have the step leave it."""
    model, rows = Tanh(), torch.rand(64, 32)
    profile = quick_profile(lambda: model(rows), model)
    kept = all_of(profile, "keep", "model")
    plan = tight_plan(profile, kept | {min(kept): "swap"}, "model")
    regions: list[Any] = []
    put = NativeWatch.put
    monkeypatch.setattr(NativeWatch, "put", lambda self: regions.append(self._region) or put(self))  # type: ignore[func-returns-value]
    positions: list[int] = []

    def leaving(each: Tensor) -> Tensor:
        positions.append(regions[-1].position)
        if len(positions) == 8:
            regions[-1].on_path = False
        return torch.ops.aten.tanh.out(each, out=torch.empty_like(each))

    with apply_plan(plan, model):
        for _ in range(3):
            gradients(model, rows)
        with torch.library._scoped_library("aten", "IMPL") as library:
            library.impl("tanh", leaving, "CPU", allow_override=True)
            model(rows)
    assert positions[:8] == sorted(set(positions[:8]))
    assert set(positions[8:]) == {positions[7]} == {regions[-1].position}


# What storages hold ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [StorageMap, watch.storage_map])
def test_a_storage_map_forgets_what_is_gone_and_mistakes_nothing(kind: Callable[[], Any]) -> None:
    values, tensors = kind(), [torch.rand(4) for _ in range(100)]
    for number, tensor in enumerate(tensors):
        values.bind(storage_of(tensor), number)
    keys = [storage_of(tensor)._cdata for tensor in tensors]
    assert [values.get(key) for key in keys] == list(range(100))
    values.bind(storage_of(tensors[3]), -1)
    assert values.get(keys[3]) == -1
    assert values.get(keys[3] + 8) is None
    kept = tensors[50]
    del tensor, tensors
    others = [torch.rand(4) for _ in range(1000)]  # some come to the same addresses
    assert values.get(storage_of(kept)._cdata) == 50
    assert all(values.get(storage_of(other)._cdata) is None for other in others)


def test_a_native_map_does_not_grow_with_storages_that_are_gone() -> None:
    values = watch.storage_map()
    for number in range(50_000):
        values.bind(storage_of(torch.empty(1)), number)
    assert values.get(storage_of(torch.empty(1))._cdata) is None


def test_threads_have_regions_of_their_own() -> None:
    """The region of one never shows ops of another."""
    found: list[bool] = []
    models, rows = [Tanh() for _ in range(3)], torch.rand(64, 32)
    # Before there are threads: profiling looks at all objects, also at what another thread is just making.
    plans = [(planned(model, rows), gradients(model, rows)) for model in models]

    def train(model: nn.Module, plan: pooch.Plan, expected: list[Tensor]) -> None:
        with apply_plan(plan, model) as run:
            for _ in range(5):
                found.append(equal(gradients(model, rows), expected) and run.stats.mismatches == 0)

    threads = [threading.Thread(target=train, args=(model, *known)) for model, known in zip(models, plans, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [True] * 15
