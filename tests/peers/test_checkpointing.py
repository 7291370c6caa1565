"""What PyTorch's own tests of `torch.utils.checkpoint` show, within a budget.

Each program does what one or several of them do (`TestCheckpoint`, `TestAutograd`), on tensors that are large enough to
leave, inside of a model that `pooch.auto` or a plan governs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from tests.peers.under import Net, assert_as_plain, held

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore::UserWarning")]
BOTH = pytest.mark.parametrize("use_reentrant", [False, True])


def body(net: Net) -> Any:
    return lambda x: dropout(net.second(net.first(x).sigmoid()).tanh(), 0.2)


@BOTH
def test_dropout_repeats(use_reentrant: bool) -> None:
    def program(net: Net) -> Tensor:
        inner = checkpoint(body(net), net.inputs.clone().requires_grad_(), use_reentrant=use_reentrant)
        return (dropout(inner, 0.1) * inner).mean()

    assert_as_plain(program)


@BOTH
def test_without_keeping_the_random_state(use_reentrant: bool) -> None:
    def program(net: Net) -> Tensor:
        inner = net.first(net.inputs)
        out = checkpoint(net.second, inner, use_reentrant=use_reentrant, preserve_rng_state=False)
        return (out.sigmoid() * inner).mean()

    assert_as_plain(program)


@BOTH
def test_several_in_a_row(use_reentrant: bool) -> None:
    def program(net: Net) -> Tensor:
        layers = nn.Sequential(net.first, nn.GELU(), net.second, nn.Tanh(), net.first, nn.Sigmoid())
        given = net.inputs.clone().requires_grad_()
        return checkpoint_sequential(layers, 3, given, use_reentrant=use_reentrant).square().mean()

    assert_as_plain(program)


@BOTH
def test_inputs_and_outputs_that_are_no_tensors(use_reentrant: bool) -> None:
    def program(net: Net) -> Tensor:
        def function(flag: bool, x: Tensor, scale: float, nothing: None) -> tuple[Any, ...]:
            assert flag
            assert nothing is None
            return (net.first(x).sigmoid() * scale).sin(), "text", None

        given = net.inputs.clone().requires_grad_()
        out, text, nothing = checkpoint(function, True, given, 2.0, None, use_reentrant=use_reentrant)
        assert (text, nothing) == ("text", None)
        return net.second(out).square().mean()

    assert_as_plain(program)


@BOTH
def test_part_of_the_outputs_needs_no_gradient(use_reentrant: bool) -> None:
    def program(net: Net) -> Tensor:
        def function(x: Tensor) -> tuple[Tensor, Tensor]:
            return net.first(x).sigmoid(), x.detach() * 2

        one, other = checkpoint(function, net.inputs.clone().requires_grad_(), use_reentrant=use_reentrant)
        assert other.requires_grad is use_reentrant, "whose function has all of its outputs require gradients"
        return (net.second(one).tanh() * other).mean()

    assert_as_plain(program)


def test_names_and_nested_structures() -> None:
    def program(net: Net) -> Tensor:
        def function(x: Tensor, *, more: dict[str, Any]) -> dict[str, Tensor]:
            return {"it": net.first(x).sigmoid() * more["a"][0].sin()}

        found = checkpoint(function, net.inputs, more={"a": [net.second.weight]}, use_reentrant=False)
        return found["it"].square().mean()

    assert_as_plain(program)


@pytest.mark.parametrize("stops", [True, False])
def test_nested_with_and_without_stopping_early(stops: bool) -> None:
    def program(net: Net) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return checkpoint(lambda y: net.second(y.sin()).exp().sin(), x, use_reentrant=False)

        def outer(x: Tensor) -> Tensor:
            return checkpoint(lambda y: inner(inner(net.first(y).tanh())), x, use_reentrant=False)

        with set_checkpoint_early_stop(stops):
            return outer(net.inputs).cos().mean()

    assert_as_plain(program)


@pytest.mark.parametrize("stops", [True, False])
def test_it_is_computed_as_often_as_without_a_budget(stops: bool) -> None:
    calls = []

    def function(net: Net, x: Tensor) -> Tensor:
        calls.append(1)
        return net.second(net.first(x).sigmoid()).sin()

    def program(net: Net) -> Tensor:
        with set_checkpoint_early_stop(stops):
            return checkpoint(function, net, net.inputs, use_reentrant=False).square().mean()

    net = Net(program)
    net().backward()
    plain = len(calls)
    with held(net):
        for _ in range(3):
            calls.clear()
            net().backward()
            assert len(calls) == plain


def test_saved_tensors_that_are_looked_at_are_computed_once() -> None:
    calls = []

    def program(net: Net) -> Tensor:
        def function(x: Tensor) -> Tensor:
            calls.append(1)
            return net.first(x).exp().sin()

        out = checkpoint(function, net.inputs, use_reentrant=False)
        node: Any = out.grad_fn
        calls.clear()
        first, second = node._saved_self, node._saved_self
        assert torch.equal(first, second)
        assert len(calls) <= 2
        return net.second(out).square().mean()

    assert_as_plain(program)


def test_retained_graphs() -> None:
    def program(net: Net) -> Tensor:
        loss = checkpoint(body(net), net.inputs, use_reentrant=False).square().mean()
        loss.backward(retain_graph=True)
        return loss

    assert_as_plain(program)


def test_double_backward() -> None:
    def program(net: Net) -> Tensor:
        inner = checkpoint(lambda x: net.second(net.first(x).sigmoid()).tanh(), net.inputs, use_reentrant=False)
        (gradient,) = torch.autograd.grad(inner.pow(3).mean(), net.first.weight, create_graph=True)
        return gradient.square().sum()

    assert_as_plain(program)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        out = x * scale
        ctx.save_for_backward(x, scale, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale, out = ctx.saved_tensors
        return gradient * scale + 0 * out, (gradient * x).sum().expand_as(scale)


@BOTH
def test_functions_of_ones_own(use_reentrant: bool) -> None:
    def program(net: Net) -> Tensor:
        given = net.inputs.clone().requires_grad_()
        out = checkpoint(lambda x: Scaled.apply(net.first(x), net.second.weight), given, use_reentrant=use_reentrant)
        return out.sin().square().mean()

    assert_as_plain(program)


def test_parameters_that_are_used_inside_and_outside() -> None:
    def program(net: Net) -> Tensor:
        weight = net.first.weight
        out = checkpoint(lambda x: (x @ weight).sin() @ weight, net.inputs, use_reentrant=False)
        return (out * weight).exp().clamp(max=2).mean()

    assert_as_plain(program)


def test_some_operators_are_kept_and_others_computed_again() -> None:
    def kept(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def program(net: Net) -> Tensor:
        out = checkpoint(
            lambda x: net.second(net.first(x).sigmoid()).tanh().exp(), net.inputs, use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(kept),
        )  # fmt: skip
        return out.square().mean()

    assert_as_plain(program)


def test_autocast_is_in_effect_again() -> None:
    def program(net: Net) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(body(net), net.inputs, use_reentrant=False)
        return out.float().square().mean()

    assert_as_plain(program)


def test_a_function_that_saves_other_tensors_the_second_time_is_refused() -> None:
    def program(net: Net) -> Tensor:
        calls = iter(range(10))

        def function(x: Tensor) -> Tensor:
            inner = net.first(x).sigmoid()
            return inner.sin().cos() if next(calls) else inner.sin()

        with set_checkpoint_early_stop(False):
            return checkpoint(function, net.inputs, use_reentrant=False).square().mean()

    net = Net(program)
    with (
        held(net),
        pytest.raises(RuntimeError, match="more tensors during recomputation"),
    ):
        net().backward()


def test_an_error_in_the_second_computation_ends_the_backward_pass_alone() -> None:
    def program(net: Net) -> Tensor:
        calls = iter(range(10))

        def function(x: Tensor) -> Tensor:
            if next(calls):
                raise ZeroDivisionError
            return net.first(x).sigmoid().sin()

        return checkpoint(function, net.inputs, use_reentrant=False).square().mean()

    def good(net: Net) -> Tensor:
        return net.second(net.first(net.inputs).sigmoid()).square().mean()

    net, expected = Net(program), Net(good)
    expected().backward()
    with held(net):
        with pytest.raises(ZeroDivisionError):
            net().backward()
        net.zero_grad()
        net.program = good
        net().backward()
    for one, other in zip(net.parameters(), expected.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_hooks_of_the_program_around_and_inside_of_it() -> None:
    hooks: Any = torch.autograd.graph.saved_tensors_hooks

    def program(net: Net) -> Tensor:
        def function(x: Tensor) -> Tensor:
            with hooks(lambda y: y * 2, lambda y: y / 2):
                return net.first(x).sigmoid().sin()

        with hooks(lambda y: y.clone(), lambda y: y):
            return net.second(checkpoint(function, net.inputs, use_reentrant=False)).square().mean()

    assert_as_plain(program)
