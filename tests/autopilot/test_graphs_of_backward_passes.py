"""What a backward pass saves for graphs that it builds itself leaves as what the forward pass has saved does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pooch
from pooch.torchtools import watch

WIDTH, ROWS, LAYERS, STEPS = 64, 1024, 8, 6
VALUE_BYTES = 4 * WIDTH * ROWS
BUDGET_BYTES = 12 * VALUE_BYTES  # a block has more than twice as many activations

pytestmark = pytest.mark.skipif(watch.LIBRARY.get() is None, reason="steps are watched natively")


def block() -> nn.Sequential:
    parts = [(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(LAYERS)]
    return nn.Sequential(*[each for part in parts for each in part])


class Checkpointed(nn.Module):
    """One block, computed again in the backward pass, by a function of PyTorch's that builds a graph there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(WIDTH, WIDTH), block()

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, self.first(rows), use_reentrant=True)
        return out


class Coupling(torch.autograd.Function):
    """`x + block(y)`, which keeps nothing but `y`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, block: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.block, ctx.state = block, torch.get_rng_state()
        ctx.save_for_backward(y)
        with torch.no_grad():
            return x + block(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        with torch.random.fork_rng(), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            given = y.detach().requires_grad_()
            out = ctx.block(given)
        return gradient, *torch.autograd.grad(out, (given,), gradient), None, *[None] * len([*ctx.block.parameters()])


class Reversible(nn.Module):
    """Two halves, each of which changes the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, 2 * WIDTH), nn.ModuleList([block(), block()])

    def forward(self, rows: Tensor) -> Tensor:
        x, y = self.first(rows).chunk(2, 1)
        for each in self.blocks:
            x, y = y, Coupling.apply(x, y.contiguous(), each)
        return x * y


class Implicit(nn.Module):
    """A hook of the backward pass that solves for a gradient with a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(WIDTH, WIDTH), block().eval()

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        at = hidden.detach()  # a hook that holds the tensor it is on is collected late

        def solve(gradient: Tensor) -> Tensor:
            with torch.enable_grad():
                given = at.detach().requires_grad_()
                (found,) = torch.autograd.grad(self.block(given), given, gradient)
            return gradient + 0.5 * found

        hidden.register_hook(solve)
        return torch.tanh(hidden)


def trained(make: Callable[[], nn.Module], budget_bytes: int | None, device: str = "cpu") -> list[bytes]:
    """The bits of a training, and of what it leaves."""
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[str] = []
    found: list[Tensor] = []
    around: Any = contextlib.nullcontext()
    if budget_bytes is not None:
        around = pooch.auto(model, budget_bytes, optimizer, tell=told.append)
    with around as auto:
        for _ in range(STEPS):
            loss = model(torch.randn(ROWS, WIDTH, device=device)).square().mean()
            loss.backward()
            found += [loss.detach(), *[each.grad.clone() for each in model.parameters() if each.grad is not None]]
            optimizer.step()
            optimizer.zero_grad()
        if auto is not None:
            summary = auto.summary()
            assert summary.peak_bytes <= budget_bytes, (told, summary.peak_bytes / VALUE_BYTES)
            assert not [line for line in told if "over the budget" in line or "not governed" in line], told
    return [each.detach().cpu().numpy().tobytes() for each in [*found, *model.parameters(), torch.get_rng_state()]]


@pytest.mark.parametrize("make", [Checkpointed, Reversible, Implicit])
def test_a_graph_that_the_backward_pass_builds_holds_the_budget(make: Callable[[], nn.Module]) -> None:
    assert trained(make, BUDGET_BYTES) == trained(make, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("make", [Checkpointed, Implicit])
def test_on_a_gpu_too(make: Callable[[], nn.Module]) -> None:
    plain = trained(make, None, "cuda")  # and what libraries take for good
    assert trained(make, torch.cuda.memory_allocated() + BUDGET_BYTES + VALUE_BYTES, "cuda") == plain


class Cubed(torch.autograd.Function):
    """Its backward pass differentiates by a transform of `torch.func`, and by hooks of the program's own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        slopes = torch.func.grad(lambda each: (each**3).sum())(values)
        packed: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda each: packed.append(each) or each, lambda each: each)
        with torch.enable_grad(), hooks:
            given = values.detach().requires_grad_()
            (again,) = torch.autograd.grad((given**3).sum(), given)
        assert packed, "hooks of the program are asked alone"
        return gradient * (slopes + again) / 2


class Transformed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = block()

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = Cubed.apply(self.block(rows))
        return out


def test_transforms_and_hooks_of_the_program_in_a_backward_pass_are_as_without_a_budget() -> None:
    assert trained(Transformed, BUDGET_BYTES) == trained(Transformed, None)


@pytest.mark.parametrize("is_disabled", [False, True])
def test_hooks_of_the_program_around_a_backward_pass_are_asked_alone(is_disabled: bool) -> None:
    model, packed = Checkpointed(), list[int]()

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor

    def around() -> Any:
        if is_disabled:
            return torch.autograd.graph.disable_saved_tensors_hooks("not here")
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    with pooch.auto(model, BUDGET_BYTES, tell=lambda _: None):
        for _ in range(2):
            loss = model(torch.randn(ROWS, WIDTH)).square().mean()
            with around():
                loss.backward()
    assert bool(packed) is not is_disabled


def test_what_a_backward_pass_has_saved_can_be_read_after_it() -> None:
    model, graphs = Implicit(), list[Tensor]()

    def keep(gradient: Tensor) -> None:
        with torch.enable_grad():
            graphs.append(model.block(gradient.detach().requires_grad_()).sum())

    with pooch.auto(model, BUDGET_BYTES, tell=lambda _: None):
        for _ in range(3):
            hidden = model(torch.randn(ROWS, WIDTH))
            hidden.register_hook(keep)
            hidden.square().mean().backward()
            graphs.pop().backward()


def test_a_budget_that_a_hook_removes_in_a_backward_pass_leaves_nothing_in_place() -> None:
    """Autograd puts the stack of saved tensor hooks back once the pass is over, whatever was taken off it in a hook."""
    model = Checkpointed()
    auto = pooch.auto(model, BUDGET_BYTES, tell=lambda _: None)
    for number in range(2):
        hidden = model(torch.randn(ROWS, WIDTH))
        if number:
            hidden.register_hook(lambda _: auto.remove())
        hidden.square().mean().backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    model(torch.randn(ROWS, WIDTH)).square().mean().backward()
