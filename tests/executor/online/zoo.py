"""Steps of every kind as functions of a region, so that each can run plainly and under an evictor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.executor.nets import Block, ConvNet, Recurrent

Region = Callable[[], AbstractContextManager[Any]]
Found = dict[str, Tensor]
Training = Callable[[Region], Found]
WIDTH = 64


def found_in(model: nn.Module, **more: Tensor) -> Found:
    """Everything that must be equal after a step: gradients, buffers, random state, and what else is given."""
    gradients = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    rest = {name: tensor.detach().clone() for name, tensor in more.items()}
    return gradients | buffers | rest | {"random state": torch.get_rng_state()}


def rows(count: int = 64) -> Tensor:
    return torch.randn(count, WIDTH)


class Layers(nn.Module):
    """A stack of layers in which a function makes the activations."""

    def __init__(self, activate: Callable[[Tensor], Tensor], depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.activate = activate

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = self.activate(layer(hidden))
        return hidden


def trained(model: nn.Module, inputs: Tensor) -> Training:
    def train(region: Region) -> Found:
        with region():
            output = model(inputs)
            loss = output.float().square().mean()
        loss.backward()
        return found_in(model, loss=loss, output=output)

    return train


def layers(activate: Callable[[Tensor], Tensor], depth: int = 4) -> Callable[[], Training]:
    return lambda: trained(Layers(activate, depth), rows())


class Cube(torch.autograd.Function):
    """Saves its argument and its result, and works on what it saved in Python."""

    @staticmethod
    def forward(ctx: Any, argument: Tensor) -> Tensor:
        result = argument * argument * argument
        ctx.save_for_backward(argument, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        argument, result = ctx.saved_tensors
        return gradient * (3 * argument * argument + 0 * result)


def views(hidden: Tensor) -> Tensor:
    first, second = hidden.view(8, 8, WIDTH).transpose(0, 1).chunk(2, dim=-1)
    return torch.cat([first.tanh() * second, second.sin() * first], -1).reshape(-1, WIDTH)[:, ::1]


def several_outputs(hidden: Tensor) -> Tensor:
    values, places = hidden.sort(dim=-1)
    mean, _ = hidden.max(dim=0)
    return values.gather(-1, places) * torch.var_mean(hidden, -1, keepdim=True)[0] + mean


def in_place(hidden: Tensor) -> Tensor:
    return functional.leaky_relu_(functional.dropout(hidden, 0.3).mul_(1.5).add_(0.1), 0.2)


class Autocast(nn.Module):
    """Layers under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Layers(functional.gelu)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(hidden)


def twice_backward(region: Region) -> Found:
    model, inputs = Layers(torch.tanh), rows()
    with region():
        loss = model(inputs).square().mean()
    loss.backward(retain_graph=True)
    first = found_in(model)
    loss.backward()
    return found_in(model, **{f"first {name}": tensor for name, tensor in first.items()})


def double_backward(region: Region) -> Found:
    model, inputs = Layers(torch.tanh), rows().requires_grad_()
    with region():
        loss = model(inputs).square().mean()
    (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
    (gradient.square().sum() + loss).backward()
    return found_in(model, gradient=gradient)


def double_backward_within(region: Region) -> Found:
    """A gradient penalty: the first backward pass belongs to the forward pass."""
    model, inputs = Layers(torch.tanh), rows().requires_grad_()
    with region():
        loss = model(inputs).square().mean()
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        loss = loss + gradient.square().sum()
    loss.backward()
    return found_in(model, gradient=gradient)


def several_forwards(region: Region) -> Found:
    model, more = Layers(functional.gelu), Layers(in_place)
    with region():
        first = model(rows()).square().mean()
        second = more(model(rows())).square().mean()
    third = model(rows()).square().mean()
    (first + second + third).backward()
    return found_in(nn.ModuleList([model, more]), first=first, second=second)


def steps_that_overlap(region: Region) -> Found:
    model = Layers(torch.tanh)
    with region():
        first = model(rows()).square().mean()
    with region():
        second = model(rows()).square().mean()
    first.backward()
    with region():
        third = model(rows()).square().mean()
    third.backward()
    second.backward()
    return found_in(model)


def partial_backward(region: Region) -> Found:
    model, inputs = Layers(torch.tanh), rows()
    with region():
        hidden = model.layers[0](inputs).tanh()
        one = model.layers[1](hidden).sin().square().mean()
        other = model.layers[2](hidden).cos().square().mean()
    one.backward(retain_graph=True)
    kept = {f"one: {name}": tensor for name, tensor in found_in(model).items()}
    del one
    other.backward()
    return found_in(model, **kept)


def dropped_without_backward(region: Region) -> Found:
    model = Layers(torch.tanh)
    with region():
        lost = model(rows()).square().mean()
        del lost
        loss = model(rows()).square().mean()
    loss.backward()
    return found_in(model)


def statistics_on_the_way(region: Region) -> Found:
    """What is saved depends on a buffer that the step itself changes afterwards."""

    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Layers(torch.tanh)
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            hidden = (self.body(hidden) - self.mean).relu()
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            return (self.body(hidden) + self.mean).relu().sigmoid()

    model = Moving()
    with region():
        loss = model(rows()).square().mean()
    loss.backward()
    return found_in(model)


def running_statistics_as_data(region: Region) -> Found:
    """A batch norm changes its statistics without raising their version, before and after something else reads them."""
    norm, body = nn.BatchNorm1d(WIDTH), Layers(torch.tanh)
    with region():
        hidden = (body(rows()) - norm.running_mean).relu()
        hidden = norm(body(hidden))
        hidden = (body(hidden) - norm.running_mean).relu()
        loss = norm(body(hidden)).square().mean()
    loss.backward()
    return found_in(nn.ModuleList([norm, body]))


def checkpointed(reentrant: bool) -> Training:
    def train(region: Region) -> Found:
        model, inputs = Layers(lambda hidden: functional.dropout(torch.tanh(hidden), 0.1)), rows().requires_grad_()
        with region():
            hidden = model(inputs)
            hidden = checkpoint(model, hidden, use_reentrant=reentrant)
            loss = model(hidden).square().mean()
        loss.backward()
        return found_in(model, loss=loss)

    return train


def tokens_trained(model: nn.Module) -> Training:
    tokens = torch.randint(0, 50, (4, 16))

    def train(region: Region) -> Found:
        with region():
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        return found_in(model, loss=loss)

    return train


def images_trained() -> Training:
    model, pixels = ConvNet(8), torch.rand(4, 3, 16, 16)
    return trained(model, pixels)


def empty_ones(hidden: Tensor) -> Tensor:
    """Saves tensors without elements, each beside one that has some."""
    nothing = (hidden[:0].sin() * hidden[:0].cos()).exp()
    return torch.cat([hidden.tanh(), nothing]) * hidden.sigmoid()


ZOO: dict[str, Callable[[], Training]] = {
    "convolutions": images_trained,
    "attention": lambda: trained(Block(32), torch.randn(4, 16, 32)),
    "recurrent": lambda: tokens_trained(Recurrent(32)),
    "in place": layers(in_place),
    "dropout": layers(lambda hidden: functional.dropout(torch.tanh(hidden), 0.4)),
    "own results": layers(lambda hidden: hidden.sigmoid().tanh().softmax(-1).exp()),
    "own function": layers(Cube.apply),
    "views": layers(views),
    "empty ones": layers(empty_ones),
    "several outputs": layers(several_outputs),
    "autocast": lambda: trained(Autocast(), rows()),
    "retain_graph": lambda: twice_backward,
    "double backward": lambda: double_backward,
    "double backward within": lambda: double_backward_within,
    "several forwards": lambda: several_forwards,
    "overlapping steps": lambda: steps_that_overlap,
    "partial backward": lambda: partial_backward,
    "dropped graph": lambda: dropped_without_backward,
    "changing buffer": lambda: statistics_on_the_way,
    "running statistics": lambda: running_statistics_as_data,
    "checkpoint": lambda: checkpointed(False),
    "reentrant checkpoint": lambda: checkpointed(True),
}
