"""What the tests of activation offloading in TRL and torchtune show, with a budget in the place of their context.

Theirs offload every activation above a size; a budget has as many leave as it takes.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from pooch.torchtools.memory_meter import MemoryMeter
from pooch.torchtools.memory_trace import live_bytes
from tests.peers.under import SIDE, Net, assert_as_plain, held

pytestmark = pytest.mark.cpu
SIZE_BYTES = 4 * SIDE * SIDE


class ViewsOfIt(torch.autograd.Function):
    """Returns an argument that it saves, and a view of it, as torchtune's test does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.sin(), x.t().clone()

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return one * x.cos() + other.t()


def test_outputs_that_are_views() -> None:
    def program(net: Net) -> Tensor:
        inner = net.first(net.inputs)
        views = [inner.view(-1)[::2], inner.t(), inner[1:], inner.unsqueeze(0).expand(3, -1, -1)]
        one, other = ViewsOfIt.apply(net.second(inner))
        return sum((each.sin().mean() for each in views), (one * other).mean())

    assert_as_plain(program)


def test_attention_that_saves_its_output_and_what_it_was_made_from() -> None:
    def program(net: Net) -> Tensor:
        query, key = (part(net.inputs).view(1, 4, 24, SIDE) for part in (net.first, net.second))
        return scaled_dot_product_attention(query, key, key, is_causal=True).square().mean()

    assert_as_plain(program)


def swapped_bytes(program: Any, share: float = 0.5) -> int:
    net = Net(program)
    with held(net, share) as auto:
        for _ in range(2):
            net().backward()
            net.zero_grad()
        return auto.summary().swapped_bytes


class SavedSixTimes(torch.autograd.Function):
    """Saves one tensor and views of it; nothing of it can be computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        copied = x.clone()
        ctx.save_for_backward(copied, copied.t(), copied.view(-1), copied, copied[2:], copied.expand(4, -1, -1))
        return copied.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, transposed, flat, again, part, broadcast = ctx.saved_tensors
        assert torch.equal(transposed.t(), x)
        assert torch.equal(flat.view_as(x), again)
        assert torch.equal(part, x[2:])
        assert broadcast.stride(0) == 0
        return gradient * x.cos()


def test_a_storage_that_is_saved_by_several_tensors_is_copied_once() -> None:
    copied = swapped_bytes(lambda net: SavedSixTimes.apply(net.first(net.inputs)).mean())
    assert copied <= 2 * 3 * SIZE_BYTES, "two steps, in each of which the inputs, the product and the saved one leave"
    assert_as_plain(lambda net: SavedSixTimes.apply(net.first(net.inputs)).mean())


def test_parameters_and_buffers_do_not_leave_as_activations() -> None:
    def program(net: Net) -> Tensor:
        return (net.first.weight.sin() * net.second.weight).mean()

    net = Net(program)
    with held(net, share=100) as auto:
        net().backward()
        assert auto.summary().swapped_bytes == 0


def test_what_is_small_stays_where_there_is_room_for_the_gradients() -> None:
    assert swapped_bytes(lambda net: net.first(torch.ones(1, SIDE))[:, :8].exp().sin().mean(), 4) == 0


def test_a_model_of_several_layers_takes_less_memory() -> None:
    """Half of what plain training takes above what is there before it."""

    def peak_bytes(budget: float | None) -> int:
        torch.manual_seed(0)
        layers = [part for _ in range(12) for part in (nn.Linear(SIDE, SIDE), nn.Tanh())]
        model, inputs = nn.Sequential(*layers), torch.randn(4 * SIDE, SIDE)
        gc.collect()
        before_bytes = live_bytes(torch.device("cpu"))
        with held(model, share=4096 if budget is None else budget), MemoryMeter(torch.device("cpu")) as meter:
            model(inputs).square().mean().backward()
        return meter.peak_bytes - before_bytes

    plain_bytes = peak_bytes(None)
    half = plain_bytes // 2
    assert peak_bytes(half / SIZE_BYTES) <= half
