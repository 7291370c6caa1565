"""`pooch.auto` around what it cannot watch: the same bits, the rest stays governed, and one line tells."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

import pooch
from tests.autopilot.under import Under
from tests.exotic_kinds import KINDS, ROWS, WIDTH, Sandwich
from tests.exotic_training import APART, Outcome, outcome_of

TOLD = {
    "nested_strided": "a nested tensor",
    "nested_jagged": "a NestedTensor",
    "wrapped": "a Scaled",
    "wrapped_flattened": "a Flattened",
    "backed": "a Backed",
    "sparse": "a tensor of layout sparse_coo",
    "sparse_rows": "a tensor of layout sparse_csr",
    "opaque": "a tensor of layout mkldnn",
    "func_grad": "torch.func",
    "func_vjp": "torch.func",
    "func_jacobians": "torch.func",
    "func_call": "torch.func",
    "branch": "torch.cond",
    "loop": "torch.while_loop",
    "flexible": "torch.flex_attention",
}


def check(name: str, outcome: Outcome) -> None:
    """Judge what a kind gave."""
    assert outcome.differs == ()
    assert outcome.recomputed_ops + outcome.swapped_bytes > 0, "the rest of the network is governed"
    told = [line for line in outcome.lines if "governed" in line]
    if name in TOLD:
        assert told == [f"{TOLD[name]} in module 'part' is not governed: what it saves stays on the device"]
        assert outcome.ungoverned > 0
    else:
        assert len(told) <= 1
        assert (outcome.ungoverned > 0) == bool(told)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in APART])
def test_any_part_trains_with_the_same_bits_and_the_rest_is_governed(name: str) -> None:
    check(name, outcome_of(name, "auto"))


def test_hooks_of_the_programs_own_are_refused_by_a_transform_as_in_plain_training() -> None:
    model, rows = Sandwich(KINDS["func_grad"]), torch.randn(ROWS, WIDTH)
    with pooch.auto(model, "1MiB", tell=lambda line: None):
        with (
            pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"),
            torch.autograd.graph.save_on_cpu(),
        ):
            model(rows)
        model(rows).backward()  # and the loop can go on


def test_a_line_names_the_module_once_however_often_it_runs() -> None:
    model = torch.nn.Sequential(Sandwich(KINDS["func_grad"], repeats=1), torch.nn.Identity())
    lines: list[str] = []
    with pooch.auto(model, "1MiB", tell=lines.append) as auto:
        for _ in range(3):
            model(torch.randn(ROWS, WIDTH)).backward()
        assert auto.summary().ungoverned == 3
        assert "3 saved tensors and calls" in str(auto.summary())
    told = [line for line in lines if "governed" in line]
    assert told == ["torch.func in module '0.part' is not governed: what it saves stays on the device"]


def _trained(model: nn.Module, loss_of: Callable[[nn.Module, Tensor], Tensor], budget: str | None) -> list[Tensor]:
    torch.manual_seed(1)
    found: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.nullcontext() if budget is None else pooch.auto(model, budget, tell=lambda line: None):
        for _ in range(3):
            loss = loss_of(model, torch.randn(ROWS, WIDTH))
            loss.backward()
            found += [
                loss.detach().clone(),
                *(each.grad.clone() for each in model.parameters() if each.grad is not None),
            ]
            optimizer.step()
            optimizer.zero_grad()
    return found


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def test_zeros_without_memory_that_forward_mode_differentiation_makes_are_left_alone() -> None:
    def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
        with forward_ad.dual_level():
            result, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(rows, torch.ones_like(rows))))
            loss = (result + 0.1 * tangent).square().mean()
            torch.autograd.backward(loss * 0.5, retain_graph=True)  # this makes tangents of gradients
        return loss * 0.5

    plain = _trained(_layers(), loss_of, None)
    zeros = torch._efficientzerotensor((ROWS, WIDTH))  # type: ignore[attr-defined]
    found = _trained(_layers(), loss_of, "1MiB")
    assert zeros.shape == (ROWS, WIDTH)
    assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))


def test_a_view_of_which_pytorch_refuses_to_tell_its_history_is_left_alone() -> None:
    """It was made without gradients, and its base has some since. The call of the model raised PyTorch's error."""
    weights = torch.ones(WIDTH, requires_grad=True)
    base = torch.zeros(ROWS, WIDTH)
    with torch.no_grad():
        view = base[0]
    base.mul_(weights)
    with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
        assert view.is_leaf
    plain = _trained(_layers(), lambda model, rows: model(rows).square().mean(), None)
    found = _trained(_layers(), lambda model, rows: model(rows).square().mean(), "1MiB")
    assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))


def test_parts_of_torch_script_are_governed_in_a_program_that_has_loaded_dynamo() -> None:
    importlib.import_module("torch._dynamo.eval_frame")

    def made() -> nn.Sequential:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            layers = _layers()
            scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
            traced = torch.jit.trace(
                nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH)
            )  # its class refuses to tell `forward`
            return nn.Sequential(layers, scripted, traced)

    def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
        loss: Tensor = model(rows).square().mean()
        return loss

    found, plain = _trained(made(), loss_of, "1MiB"), _trained(made(), loss_of, None)
    assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))


@pytest.mark.parametrize("changed", ["parameter", "input", "made before the step", "made in the step"])
@pytest.mark.parametrize("step", ["online", "recorded", "in-core"])
def test_what_was_changed_after_autograd_saved_it_is_refused_in_every_step(changed: str, step: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    scale = torch.ones(8, requires_grad=True)

    def loss_of(is_changed: bool) -> Tensor:
        inputs = torch.randn(4, 8)
        made = inputs * scale * 2
        output = model(inputs if changed == "input" else made)
        loss = output.square().mean()
        if is_changed:
            tensors = {"parameter": model[2].weight, "input": inputs, "made in the step": output}
            tensor = tensors.get(changed, made)
            with torch.no_grad():
                tensor.add_(1.0)
        return loss

    with pooch.auto(model, 2**30, tell=lambda line: None) as auto:
        for earlier in range(["online", "recorded", "in-core"].index(step)):
            loss_of(False).backward()
            assert auto._driver.last.mode == ("online", "recorded")[earlier]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(True).backward()


@pytest.mark.parametrize("assigned", ["parameter", "input", "made before the step", "made in the step"])
def test_data_that_was_assigned_after_autograd_saved_a_tensor_is_read_as_in_plain_training(assigned: str) -> None:
    torch.manual_seed(0)
    model, scale = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.ones(8, requires_grad=True)
    batches = torch.randn(4, 4, 8)

    def gradients() -> list[Tensor]:
        found = []
        for inputs in batches.clone():
            made = inputs * scale * 2
            output = model(inputs if assigned == "input" else made)
            loss = output.square().mean()
            tensors = {"parameter": model[2].weight, "input": inputs, "made in the step": output}
            tensor = tensors.get(assigned, made)
            before, tensor.data = tensor.data, 3 * tensor.data
            found += torch.autograd.grad(loss, list(model.parameters()))
            tensor.data = before
        return found

    expected = gradients()
    with pooch.auto(model, 2**30, tell=lambda line: None):
        assert all(map(torch.equal, gradients(), expected))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_model_that_is_given_nested_tensors_of_changing_sizes(layout: torch.layout) -> None:
    class OfValues(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])

        def forward(self, nested: Tensor) -> Tensor:
            return self.layers(nested.values().view(-1, 32)).square().mean()

    def losses(around: Any) -> list[float]:
        torch.manual_seed(0)
        model, found = OfValues(), []
        with around(model):
            for rows in (100, 200, 150, 200):
                loss = model(torch.nested.nested_tensor([torch.randn(rows, 32), torch.randn(50, 32)], layout=layout))
                loss.backward()
                found.append(loss.item())
        return found

    assert losses(Under("1MiB")) == losses(lambda _: contextlib.nullcontext())
