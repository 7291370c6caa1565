"""What PyTorch's own tests of `torch.autograd.graph` show, within a budget.

Each program does what one or several of them do (`TestAutograd`, `TestAllowMutationOnSaved`), on tensors that are large
enough to leave, inside of a model that `pooch.auto` or a plan governs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph

from tests.peers.under import SIDE, Net, Program, assert_as_plain, held

pytestmark = pytest.mark.cpu


def hidden(net: Net) -> Tensor:
    return net.second(net.first(net.inputs).sigmoid()).tanh()


def with_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Program:
    def program(net: Net) -> Tensor:
        with graph.saved_tensors_hooks(pack, unpack):
            inner = hidden(net)
        return (inner * inner).mean()

    return program


def nested_hooks(net: Net) -> Tensor:
    with graph.saved_tensors_hooks(lambda x: x + 1, lambda x: x - 1):
        one = net.first(net.inputs).sigmoid()
        with graph.saved_tensors_hooks(lambda x: x * 4, lambda x: x / 4):
            one = net.second(one).tanh()
        return (one * one.exp()).mean()


def on_cpu(net: Net) -> Tensor:
    with graph.save_on_cpu():
        return hidden(net).square().mean()


def wrapped_numbers(net: Net) -> Tensor:
    with graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return (hidden(net) * 4.0 * torch.tensor(3.0)).pow(torch.tensor(2.0)).mean()


def double_backward(net: Net) -> Tensor:
    inner = hidden(net)
    weight = net.first.weight
    (gradient,) = torch.autograd.grad(inner.pow(3).sum(), weight, create_graph=True)
    return gradient.square().mean() + inner.mean()


def double_backward_in_hooks(net: Net) -> Tensor:
    with graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        return double_backward(net)


def tensor_hooks(net: Net) -> Tensor:
    inner = net.first(net.inputs).sigmoid()
    inner.register_hook(lambda gradient: gradient * 2)
    handle = inner.register_hook(lambda gradient: gradient * 100)
    handle.remove()
    outer = net.second(inner)
    outer.retain_grad()
    assert outer.grad_fn is not None
    outer.grad_fn.register_hook(lambda inputs, outputs: None)
    outer.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))
    return outer.tanh().square().mean()


def multi_grad_hooks(net: Net) -> Tensor:
    seen: list[int] = []
    one, other = net.first(net.inputs).sigmoid(), net.second(net.inputs).tanh()
    graph.register_multi_grad_hook((one, other), lambda gradients: seen.append(len(gradients)))
    graph.register_multi_grad_hook((one, other), lambda gradient: seen.append(1), mode="any")
    return (one * other).square().mean()


def edges(net: Net) -> Tensor:
    inner = net.first(net.inputs).sigmoid()
    edge = graph.get_gradient_edge(inner)
    loss = net.second(inner).tanh().square().mean()
    (gradient,) = torch.autograd.grad(loss, edge, retain_graph=True)
    return loss + gradient.sum()


def mutation(net: Net) -> Tensor:
    with graph.allow_mutation_on_saved_tensors():
        inner = net.first(net.inputs).sigmoid()
        out = inner.sin() * inner.cos()
        with torch.no_grad():
            inner.zero_()
        loss = net.second(out).square().mean()
        loss.backward()
    return net.second(net.first(net.inputs)).mean()


def mutation_of_a_view(net: Net) -> Tensor:
    with graph.allow_mutation_on_saved_tensors():
        inner = net.first(net.inputs).sigmoid().clone()
        view = inner[: SIDE // 2]
        out = inner.sin()
        view.mul_(3)
        (out.square().mean() + inner.sin().mean()).backward()
    return net.second(net.inputs).mean()


def saved_attributes(net: Net) -> Tensor:
    inner = net.first(net.inputs).sigmoid()
    product = inner * net.second.weight
    function: Any = product.grad_fn
    assert torch.equal(function._saved_self, inner)
    assert function._saved_self.requires_grad
    assert torch.equal(function._saved_other, net.second.weight)
    return product.square().mean()


def in_place(net: Net) -> Tensor:
    inner = net.first(net.inputs).sigmoid()
    other = inner.clone().mul_(2).sin_().add_(inner)
    return net.second(other.t().contiguous().relu_()).square().mean()


def retained(net: Net) -> Tensor:
    loss = hidden(net).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True, inputs=[net.first.weight])
    return loss


def detached(net: Net) -> Tensor:
    inner = net.first(net.inputs).sigmoid()
    with torch.no_grad():
        held_back = inner.exp().detach_()
    return (net.second(inner) * held_back + inner.detach().requires_grad_().sum()).square().mean()


PROGRAMS: dict[str, Program] = {
    "hooks that change nothing": with_hooks(lambda x: x, lambda x: x),
    "hooks that scale": with_hooks(lambda x: x * 2, lambda x: x / 2),
    "hooks that pack tuples": with_hooks(lambda x: ("packed", x.dtype, x.numpy(force=True).copy()),
                                         lambda packed: torch.from_numpy(packed[2])),
    "hooks that round": with_hooks(lambda x: x.to(torch.bfloat16), lambda x: x.to(torch.float32)),
    "hooks that pack integers": with_hooks(id, lambda number: torch.ones(SIDE, SIDE)),
    **{
        each.__name__.replace("_", " "): each
        for each in (
            nested_hooks, on_cpu, wrapped_numbers, double_backward, double_backward_in_hooks, tensor_hooks,
            multi_grad_hooks, edges, mutation, mutation_of_a_view, saved_attributes, in_place, retained, detached,
        )
    },
}  # fmt: skip


BY_PLAN = ("hooks that scale", "mutation")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_the_same_bits(name: str) -> None:
    assert_as_plain(PROGRAMS[name], by_plan=name in BY_PLAN)


def test_saved_tensors_that_are_written_to_files(tmp_path: Path) -> None:
    def pack(tensor: Tensor) -> Path:
        path = tmp_path / str(uuid4())
        torch.save(tensor, path)
        return path

    assert_as_plain(with_hooks(pack, torch.load))


def test_a_pack_hook_that_writes_its_argument_is_refused() -> None:
    net = Net(with_hooks(lambda x: x.mul_(2), lambda x: x))
    with held(net), pytest.raises(RuntimeError, match="pack hook is modifying its input in place"):
        net()


def test_a_pack_hook_that_raises_ends_the_forward_pass_alone() -> None:
    def fails(tensor: Tensor) -> Tensor:
        raise ZeroDivisionError

    net, plain = Net(with_hooks(fails, lambda x: x)), Net(lambda net: hidden(net).square().mean())
    expected = plain()
    with held(net):
        with pytest.raises(ZeroDivisionError):
            net()
        net.program = plain.program
        net().backward()
        assert torch.equal(net(), expected)


def test_a_saved_tensor_that_was_changed_in_place_is_refused() -> None:
    def program(net: Net) -> Tensor:
        inner = net.first(net.inputs).sigmoid()
        product = inner * inner
        inner.add_(1)
        return product.mean()

    net = Net(program)
    with held(net), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net().backward()


def test_a_second_backward_pass_is_refused_as_ever() -> None:
    net = Net(lambda net: hidden(net).square().mean())
    with held(net):
        loss = net()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_saved_attributes_are_gone_after_the_backward_pass() -> None:
    net = Net(lambda net: hidden(net).square().mean())
    with held(net):
        loss = net()
        function: Any = loss.grad_fn
        power = function.next_functions[0][0]
        loss.backward()
        with pytest.raises(RuntimeError, match="after they have already been freed"):
            power._saved_self  # noqa: B018


def test_hooks_can_be_forbidden_within_a_governed_call() -> None:
    """As `torch.func` does; what is saved meanwhile stays."""

    def program(net: Net) -> Tensor:
        inner = net.first(net.inputs).sigmoid()
        with graph.disable_saved_tensors_hooks("not here"):
            inner = inner.sin() * inner
        return net.second(inner).square().mean()

    assert_as_plain(program)


def test_hooks_of_one_saved_tensor_alone_are_refused_as_within_any_hooks() -> None:
    """PyTorch has one pair for each saved tensor, and a budget has taken it, as `save_on_cpu` would have."""

    def program(net: Net) -> Tensor:
        product = net.first(net.inputs).sigmoid().pow(2)
        function: Any = product.grad_fn
        function._raw_saved_self.register_hooks(lambda x: 2 * x, lambda x: x / 2)
        return net.second(product).square().mean()

    net = Net(program)
    net().backward()
    with held(net), pytest.raises(RuntimeError, match="only one pair of hooks is allowed at a time"):
        net()


def test_a_graph_outlives_the_budget() -> None:
    net = Net(lambda net: hidden(net).square().mean())
    with held(net):
        loss = net()
    loss.backward()
    other = Net(net.program)
    other().backward()
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)


def test_modules_that_share_hooks_and_parameters() -> None:
    def program(net: Net) -> Tensor:
        tied = nn.Linear(SIDE, SIDE, bias=False)
        tied.weight = net.first.weight
        with graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            return tied(net.second(tied(net.inputs)).relu()).square().mean()

    assert_as_plain(program)
