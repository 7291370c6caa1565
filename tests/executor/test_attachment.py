"""A plan on a model: copies are plain models, wrappers stay, and what goes past the plan is refused or told."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pooch
from pooch.api.manual import plan_from_decisions
from pooch.api.smallest import smallest_budget
from pooch.errors import UsageError
from pooch.executor import Run, apply_plan
from pooch.ir import Plan, Region
from pooch.torchtools.calls import PLACE
from tests.executor.support import (
    all_of,
    assert_same,
    is_same,
    mixed,
    quick_profile,
    region_of,
    tight_plan,
)

REGIONS: list[Region] = ["model", "step"]


class Net(nn.Module):
    """Picklable, without random ops."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.first(rows).sin()).tanh().exp()


class OwnState(Net):
    """Gives its whole `__dict__` away when it is copied."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def new_net(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def rows() -> Tensor:
    return torch.rand(4, 8, generator=torch.Generator("cpu").manual_seed(5), device="cpu").to(
        torch.get_default_device()
    )


def plan_of(model: nn.Module, region: Region = "model", choice: str = "mixed") -> Plan:
    profile = quick_profile(lambda: model(rows()).sum(), model)
    decisions = mixed(profile, region) if choice == "mixed" else all_of(profile, choice, region)  # type: ignore[arg-type]
    plan = tight_plan(profile, decisions, region)
    assert plan.schedule.actions
    return plan


def step(model: nn.Module, run: Run | None = None) -> dict[str, Tensor]:
    """One step's loss and gradients; under a plan, whatever it does was done."""
    model.zero_grad()
    with region_of(run):
        loss = model(rows()).sum()
    loss.backward()
    if run is not None:
        assert run.stats.swapped_out_bytes + run.stats.recomputed_ops > 0
        assert run.stats.mismatches == 0
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach().clone()}


def through_pickle(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


def through_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model).module


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "average": averaged,
    "pickle": through_pickle,
    "file": through_file,
}


@pytest.mark.parametrize("kind", [Net, OwnState])
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_a_plain_model_with_weights_of_its_own(way: str, region: Region, kind: type[nn.Module]) -> None:
    plain = step(new_net(kind))
    model = new_net(kind)
    with apply_plan(plan_of(model, region), model) as run:
        copied = COPIES[way](model)
        before = run.stats
        assert_same(plain, step(copied))
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(2)
        assert not is_same(plain["loss"], step(copied)["loss"])  # its own weights, not the live model's
        assert run.stats is before  # and no step of the plan's
        assert all(vars(module).get(PLACE) is None for module in copied.modules())
        assert_same(plain, step(model, run))


@pytest.mark.parametrize("region", REGIONS)
def test_a_copy_made_between_forward_and_backward_pass(region: Region) -> None:
    plain = step(new_net())
    model = new_net()
    with apply_plan(plan_of(model, region, "swap"), model) as run:
        with region_of(run):
            loss = model(rows()).sum()
        copied = copy.deepcopy(model)
        assert_same(plain, step(copied))
        loss.backward()
        assert run.stats.swapped_in_bytes > 0
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        assert_same(plain, found | {"loss": loss.detach()})


def test_a_shallow_copy_is_plain() -> None:
    model = new_net()
    with apply_plan(plan_of(model), model):
        assert PLACE not in vars(copy.copy(model))


def autocast_around(model: nn.Module) -> None:
    """What `accelerator.prepare` does to a model under mixed precision."""
    model._original_forward = model.forward  # type: ignore[assignment]
    inner = model.forward.__func__  # type: ignore[attr-defined]

    @functools.wraps(inner)
    def in_bf16(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return inner(*args, **kwargs).float()

    model.forward = types.MethodType(in_bf16, model)


def autocast_off(model: nn.Module) -> None:
    """What `accelerator.unwrap_model` does."""
    original, forward = model.__dict__.pop("_original_forward"), model.forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
        if forward == original:
            break
    model.forward = types.MethodType(forward, model)


def in_autocast() -> tuple[nn.Module, dict[str, Tensor], Plan]:
    """A model, what its step gives within autocast, and a plan of that step; the autocast is off."""
    model = new_net()
    autocast_around(model)
    plain, plan = step(model), plan_of(model)
    autocast_off(model)
    return model, plain, plan


def test_what_is_wrapped_around_a_model_after_the_plan_stays_when_the_plan_goes() -> None:
    model, plain, plan = in_autocast()
    run = apply_plan(plan, model)
    autocast_around(model)
    assert_same(plain, step(model, run))
    run.remove()
    assert PLACE not in vars(model)
    assert_same(plain, step(model))  # still in autocast


def test_unwrapping_a_model_leaves_the_plan_on_it() -> None:
    full_precision = step(new_net())
    model = new_net()
    autocast_around(model)
    with apply_plan(plan_of(new_net()), model) as run:
        autocast_off(model)
        assert_same(full_precision, step(model, run))


def test_accelerate_itself_in_any_order() -> None:
    accelerate = pytest.importorskip("accelerate")
    if next(new_net().parameters()).device.type != "cpu":
        pytest.skip("an Accelerator of the CPU moves the model there")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of another test in this process
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    profiled = accelerator.prepare(new_net())
    plain, plan = step(profiled), plan_of(profiled)
    model = new_net()
    run = apply_plan(plan, model)
    prepared = accelerator.prepare(model)
    assert_same(plain, step(prepared, run))
    run.remove()
    assert_same(plain, step(prepared))  # still in autocast
    with apply_plan(plan, prepared) as run:
        assert accelerator.unwrap_model(prepared) is model
        assert_same(plain, step(model, run))
        with pytest.warns(UserWarning, match="left the planned path"):  # the plan is on it, its autocast is off
            accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)(rows())


def test_a_plan_on_a_wrapper_governs_what_is_inside_and_both_come_off_in_any_order() -> None:
    plain = step(new_net())
    model = new_net()
    inner_plan = plan_of(model)
    wrapper = nn.Sequential(model)
    outer_plan = plan_of(wrapper)
    with (
        apply_plan(inner_plan, model),
        pytest.raises(UsageError, match="module '0' of the model is under a plan already"),
    ):
        apply_plan(outer_plan, wrapper)
    outer = apply_plan(outer_plan, wrapper)
    inner = apply_plan(inner_plan, model)
    found = step(wrapper, outer)
    assert_same(plain, {name.removeprefix("0."): tensor for name, tensor in found.items()})
    assert inner.stats.swapped_out_bytes + inner.stats.recomputed_ops == 0
    outer.remove()
    assert_same(plain, step(model, inner))
    inner.remove()
    assert_same(plain, step(model))
    assert all(PLACE not in vars(module) for module in wrapper.modules())


@pytest.mark.parametrize("region", REGIONS)
def test_a_second_plan_on_a_model_is_refused_and_one_after_the_other_is_not(region: Region) -> None:
    plain = step(new_net())
    model = new_net()
    plan = plan_of(model, region)
    with apply_plan(plan, model) as run:
        with pytest.raises(UsageError, match=r"under a plan already: .*remove\(\)") as caught:
            apply_plan(plan, model)
        assert "\n" not in str(caught.value)
        assert_same(plain, step(model, run))  # the first is still in force
    with apply_plan(plan, model) as run:
        assert_same(plain, step(model, run))


def test_a_model_under_a_plan_is_not_profiled() -> None:
    model = new_net()
    with apply_plan(plan_of(model), model), pytest.raises(UsageError, match="under a plan already"):
        pooch.profile(lambda: model(rows()).sum(), model)


def test_nothing_is_left_behind_by_an_interrupt_in_the_forward_pass() -> None:
    plain = step(new_net())
    model = new_net()
    with apply_plan(plan_of(model), model) as run:
        handle = model.second.register_forward_pre_hook(_interrupt)  # type: ignore[union-attr]
        with pytest.raises(KeyboardInterrupt):
            model(rows())
        handle.remove()
        assert_same(plain, step(model, run))
    with pytest.raises(KeyboardInterrupt):
        quick_profile(lambda: (model(rows()), _interrupt(model, ()))[0].sum(), model)  # type: ignore[func-returns-value]
    assert PLACE not in vars(model)


def _interrupt(module: nn.Module, args: object) -> None:
    raise KeyboardInterrupt


def test_a_model_that_is_let_go_of_is_gone_at_once() -> None:
    """By reference counts alone, as without a plan: gigabytes do not wait for the garbage collector."""
    model = new_net()
    run = apply_plan(plan_of(model), model)
    step(model, run)
    gc.collect()
    gc.disable()
    try:
        gone, run_gone = weakref.ref(model), weakref.ref(run)
        del model
        assert gone() is None
        with pytest.raises(UsageError, match="is gone"):
            _ = run.model
        run.remove()
        del run
        assert run_gone() is None
    finally:
        gc.enable()


# Where the region begins and ends -----------------------------------------------------------------------------------


def hooked_net() -> nn.Module:
    model = new_net()
    model.register_forward_pre_hook(lambda module, args: (args[0].sin() * 2,))
    model.register_forward_hook(lambda module, args, result: result.sin().exp())
    return model


@pytest.mark.parametrize("choice", ["swap", "recompute", "mixed"])
@pytest.mark.parametrize("mode", ["run", "fake"])
def test_hooks_of_the_model_that_compute_are_within_the_region(mode: Any, choice: str) -> None:
    plain = step(hooked_net())
    model = hooked_net()
    if mode == "fake":
        profile = pooch.profile(lambda: model(rows()).sum(), model, mode="fake")
    else:
        profile = quick_profile(lambda: model(rows()).sum(), model)
    assert profile.ops[profile.model_begin].name == "aten.sin.default"
    assert profile.ops[profile.model_end - 1].name == "aten.exp.default"
    decisions = mixed(profile, "model") if choice == "mixed" else all_of(profile, choice, "model")  # type: ignore[arg-type]
    with apply_plan(tight_plan(profile, decisions, "model"), model) as run:
        assert_same(plain, step(model, run))


# What goes past the plan --------------------------------------------------------------------------------------------


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def with_compiled_part(model: nn.Module) -> nn.Module:
    model.second = compiled(model.second)  # type: ignore[arg-type]
    return model


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def with_part_compiled_in_place(model: nn.Module) -> nn.Module:
    model.second.compile(backend="eager")  # type: ignore[operator]
    return model


def with_compiled_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


WAYS_TO_COMPILE = [compiled, with_compiled_part, compiled_in_place, with_part_compiled_in_place, with_compiled_forward]


@pytest.mark.parametrize("way", WAYS_TO_COMPILE)
def test_a_model_that_was_compiled_since_it_was_planned_is_refused(way: Callable[[nn.Module], nn.Module]) -> None:
    plan = plan_of(new_net())
    model = way(new_net())

    def profiled() -> None:
        pooch.profile(lambda: model(rows()).sum(), model, mode="fake")

    for refused in (lambda: apply_plan(plan, model), profiled):
        with pytest.raises(UsageError, match=r"compiled by torch\.compile") as caught:
            refused()  # type: ignore[no-untyped-call]
        assert "\n" not in str(caught.value)
    assert PLACE not in vars(getattr(model, "_orig_mod", model)) or way is compiled_in_place


@pytest.mark.parametrize("way", [with_compiled_part, with_part_compiled_in_place, with_compiled_forward])
@pytest.mark.parametrize("region", REGIONS)
def test_a_model_that_is_compiled_under_its_plan_is_refused(region: Region, way: Callable[[Any], Any]) -> None:
    model = new_net()
    with apply_plan(plan_of(model, region), model) as run:
        way(model)
        with pytest.raises(UsageError, match="compile") as caught:
            step(model, run)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("whole", [True, False])
def test_a_planned_model_that_is_called_by_compiled_code_is_refused(whole: bool, region: Region) -> None:
    model = new_net()
    with apply_plan(plan_of(model, region), model) as run:
        call = torch.compile(model, backend="eager", fullgraph=whole)
        for _ in range(2):
            with (
                pytest.raises(Exception, match=r"compiled while it is under a plan|_planned_model") as caught,
                region_of(run),
            ):
                call(rows())
            if not whole:  # else the words are Dynamo's own
                assert isinstance(caught.value, UsageError)
                assert "\n" not in str(caught.value)


def test_a_model_whose_own_call_is_compiled_under_a_plan_of_the_step_is_refused() -> None:
    model = new_net()
    with apply_plan(plan_of(model, "step"), model) as run:
        compiled_in_place(model)
        with pytest.raises(UsageError, match="the model is compiled"):
            step(model, run)


def trained_once(model: nn.Module, forward: Callable[[], Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward().sum().backward()
    optimizer.step()


def test_training_that_never_met_the_plan_is_told_at_the_end() -> None:
    """`model.compile()` takes the call away from the plan without a trace; the new parameters give it away."""
    model = new_net()
    run = apply_plan(plan_of(model), model)
    compiled_in_place(model)
    trained_once(model, lambda: model(rows()))
    with pytest.warns(UserWarning, match="the plan was never used"):
        run.remove()
    assert PLACE in vars(model)  # the compiled call is the user's
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        untrained = new_net()
        apply_plan(plan_of(untrained), untrained).remove()


def test_calling_forward_directly_is_told_once_and_right() -> None:
    plain = new_net()
    (plain(rows()) + 0 * plain(rows())).sum().backward()
    model = new_net()
    with apply_plan(plan_of(model), model) as run:
        with torch.no_grad():
            model.forward(rows())  # no training: nothing to be told
        with pytest.warns(UserWarning, match=r"module 'first' runs outside of a call of the model.*'step'") as told:
            loss = (model.forward(rows()) + 0 * model.forward(rows())).sum()
        assert len(told) == 1
        loss.backward()
        assert run.stats.swapped_out_bytes + run.stats.recomputed_ops == 0
    for left, right in zip(plain.parameters(), model.parameters(), strict=True):
        assert is_same(left.grad, right.grad)  # type: ignore[arg-type]


class Checkpointed(nn.Module):
    """Computes a part again in the backward pass, where no call of the model is running."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Net(), Net()])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers[1](inputs)
        outputs: Tensor = checkpoint(self.layers[0], hidden, use_reentrant=True)  # type: ignore[no-untyped-call]
        return outputs


def test_what_a_checkpoint_computes_again_is_told_to_nobody() -> None:
    torch.manual_seed(0)
    model = Checkpointed()
    profile = quick_profile(lambda: model(rows()).sum(), model)
    with apply_plan(plan_from_decisions(profile, all_of(profile, "swap", "model")), model) as run:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(rows()).sum().backward()
        assert run.stats.swapped_out_bytes > 0


class TrainsItself(nn.Module):
    """As Lightning's modules: nobody calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Net(), Net()])

    def training_step(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.sum()


@pytest.mark.parametrize("mode", ["run", "fake"])
def test_a_step_that_never_calls_the_model_needs_the_region_of_the_step(mode: Any) -> None:
    torch.manual_seed(0)
    model = TrainsItself()
    plain_loss = model.training_step(rows())
    plain = torch.autograd.grad(plain_loss, list(model.parameters()))
    if mode == "fake":
        profile = pooch.profile(lambda: model.training_step(rows()), model, mode="fake")
    else:
        profile = quick_profile(lambda: model.training_step(rows()), model)
    assert profile.model_begin == profile.model_end
    for refused in (
        lambda: pooch.plan(profile, "60%", region="model"),
        lambda: plan_from_decisions(profile, {}, region="model"),
        lambda: smallest_budget(profile, region="model"),
    ):
        with pytest.raises(UsageError, match=r"never calls the model.*region 'step'") as caught:
            refused()  # type: ignore[no-untyped-call]
        assert "\n" not in str(caught.value)
    with apply_plan(tight_plan(profile, mixed(profile)), model) as run:
        with run.step():
            loss = model.training_step(rows())
        planned = torch.autograd.grad(loss, list(model.parameters()))
        assert run.stats.swapped_out_bytes + run.stats.recomputed_ops > 0
        assert run.stats.mismatches == 0
    assert is_same(plain_loss, loss)
    assert all(is_same(*pair) for pair in zip(plain, planned, strict=True))


def functional_gradients(model: nn.Module) -> dict[str, Tensor]:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: dict[str, Tensor], row: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(model, given, (row,)).sum()
        return result

    whole = torch.func.grad(loss)(parameters, rows())
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, rows())
    jacobian = torch.func.jacrev(loss, argnums=1)(parameters, rows())
    return {**whole, **{f"each {name}": g for name, g in each.items()}, "jacobian": jacobian}


@pytest.mark.parametrize("region", REGIONS)
def test_function_transforms_of_a_planned_model_go_without_the_plan_and_say_so_once(region: Region) -> None:
    plain, plain_step = functional_gradients(new_net()), step(new_net())
    model = new_net()
    with apply_plan(plan_of(model, region), model) as run:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with torch.autograd.graph.disable_saved_tensors_hooks("there are none"), region_of(run):
                model(rows())
            found = functional_gradients(model)
        assert ["so the plan does not apply" in str(each.message) for each in told].count(True) == 1
        assert_same(plain, found)
        assert_same(plain_step, step(model, run))


def test_tracing_and_exporting_a_planned_model_see_a_plain_one() -> None:
    model = new_net()
    with apply_plan(plan_of(model), model) as run, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        expected = model(rows())
        for made in (torch.jit.trace(model, rows()), torch.export.export(model, (rows(),)).module()):
            assert torch.allclose(expected, made(rows()))
        step(model, run)


@pytest.mark.parametrize("region", REGIONS)
def test_the_class_of_tensors_changes_once_in_the_life_of_a_plan(region: Region) -> None:
    model, before = new_net(), vars(Tensor).get("tolist")
    with apply_plan(plan_of(model, region, "swap"), model) as run:
        assert vars(Tensor).get("tolist") is before
        step(model, run)
        stands_in = vars(Tensor)["tolist"]
        assert stands_in is not before
        step(model, run)
        assert run.stats.swapped_in_bytes > 0
        assert vars(Tensor)["tolist"] is stands_in
    assert vars(Tensor).get("tolist") is before
