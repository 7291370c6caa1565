"""Ways of training that break tools built on hooks: each gives the same bits, and swaps or replays something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pooch.executor import RunStats
from pooch.ir import Choice, Plan
from tests.executor.support import (
    all_of,
    applied,
    assert_same,
    mixed,
    planned_replays,
    quick_profile,
    region_of,
    tight_plan,
)

CHOICES = ["swap", "recompute", "mixed"]


class Layers(nn.Module):
    """A module around a function of its layers, so that each test tells its forward in one line."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.function = function

    def forward(self, rows: Tensor) -> Tensor:
        return self.function(self, rows)


def check(
    make: Callable[[], nn.Module],
    choice: str,
    rows: Tensor | None = None,
    step: Callable[[nn.Module, Tensor], Tensor] | None = None,
    backward: Callable[[nn.Module, Tensor], None] | None = None,
    mechanism: bool = True,
) -> RunStats:
    """Two steps plainly and planned, with an optimizer; gradients, parameters, buffers and random state are equal."""
    rows = (
        torch.rand(6, 8, generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(torch.get_default_device())
        if rows is None
        else rows
    )
    step = step or (lambda model, batch: model(batch).abs().sum())
    backward = backward or (lambda model, loss: loss.backward())
    results: list[dict[str, Tensor]] = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = make()
        plan: Plan | None = None
        if is_planned:
            profile = quick_profile(lambda m=model: step(m, rows), model)  # type: ignore[misc]
            decisions = mixed(profile) if choice == "mixed" else all_of(profile, choice)  # type: ignore[arg-type]
            plan = tight_plan(profile, decisions)
        results.append({})
        torch.manual_seed(2)
        with applied(plan, model) as run:
            for number in range(2):
                model.zero_grad()
                with region_of(run):
                    loss = step(model, rows)
                backward(model, loss)
                gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                results[-1] |= {f"{number} {n}.grad": g.detach().clone() for n, g in gradients.items()}
                results[-1] |= {f"{number} loss": loss.detach().clone()}
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        if name in gradients:
                            parameter.sub_(0.01 * gradients[name])
            stats = run.stats if run is not None else None
        results[-1] |= {n: t.clone() for n, t in model.state_dict().items()} | {"random state": torch.get_rng_state()}
        assert any("grad" in name for name in results[-1])
    assert_same(*results)
    assert stats is not None
    assert plan is not None
    assert stats.mismatches == 0
    if mechanism:
        assert stats.late_swaps == 0
        assert stats.swapped_out_bytes + stats.recomputed_ops > 0
        assert stats.recomputed_ops == planned_replays(plan)
    return stats


def _mlp(model: Any, rows: Tensor) -> Tensor:
    return torch.tanh(model.second(torch.sin(model.first(rows)))).exp()


@pytest.mark.parametrize("choice", CHOICES)
def test_autocast_to_bf16(choice: str) -> None:
    def step(model: nn.Module, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(rows).float().sum()

    check(lambda: Layers(_mlp), choice, step=step)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_model_in_bf16(choice: str) -> None:
    check(lambda: Layers(_mlp).bfloat16(), choice, rows=torch.rand(6, 8).bfloat16())


@pytest.mark.parametrize("choice", CHOICES)
def test_gradient_scaler(choice: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    check(lambda: Layers(_mlp), choice, backward=lambda model, loss: scaler.scale(loss).backward())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_checkpointed_regions_inside(choice: str, reentrant: bool) -> None:
    def function(model: Any, rows: Tensor) -> Tensor:
        hidden = checkpoint(
            lambda x: functional.dropout(model.first(x).sin(), 0.3), rows.requires_grad_(), use_reentrant=reentrant
        )
        return torch.tanh(model.second(hidden)).exp()

    check(lambda: Layers(function), choice)


class Doubling(torch.autograd.Function):
    """Saves its result, an input, and an attribute."""

    @staticmethod
    def forward(context: Any, rows: Tensor, factor: float) -> Tensor:
        result = rows.exp() * factor
        context.factor = factor
        context.save_for_backward(rows, result)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        rows, result = context.saved_tensors
        return gradient * result + rows * 0 * context.factor, None


@pytest.mark.parametrize("choice", CHOICES)
def test_custom_autograd_function(choice: str) -> None:
    check(lambda: Layers(lambda m, x: torch.sin(Doubling.apply(m.second(m.first(x).sin()), 2.0))), choice)


@pytest.mark.parametrize("choice", CHOICES)
def test_double_backward(choice: str) -> None:
    def penalty(model: nn.Module, loss: Tensor) -> None:
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(g.square().sum() for g in gradients)).backward()

    check(lambda: Layers(_mlp), choice, backward=penalty)


@pytest.mark.parametrize("choice", CHOICES)
def test_frozen_layers(choice: str) -> None:
    def make() -> nn.Module:
        model = Layers(_mlp)
        model.first.requires_grad_(False)
        return model

    check(make, choice)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().sin().t().cos(),
    "expanded": lambda x: x.sum(0, keepdim=True).expand(6, 8).sin() * x,
    "sliced": lambda x: x.sin()[1:5, ::2].exp().cos(),
    "chunks": lambda x: torch.cat([c.sin().exp() for c in x.sin().chunk(2, 1)]),
    "unbound": lambda x: sum(c.exp() for c in x.sin().unbind(0)),
    "strided": lambda x: x.sin().as_strided((3, 4), (8, 2), 1).exp().cos(),
    "diagonal": lambda x: x.sin().diagonal().exp().cos(),
    "unfolded": lambda x: x.sin().unfold(1, 3, 1).exp().cos(),
    "viewed": lambda x: x.sin().view(-1).view(3, 16).exp().flatten().cos(),
    "in-place on a view": lambda x: _add_to_view(x.sin()).exp().cos(),
    "in place": lambda x: x.sin().add_(1).mul_(2).exp().cos().clamp_(min=0.1),
    "in place after save": lambda x: (x.sin() * 2).relu_().exp().cos(),
    "twice": lambda x: (x.sin() * x.sin()).exp() * x.cos() * x.cos(),
}


def _add_to_view(rows: Tensor) -> Tensor:
    rows[:, 2:4] += 1
    return rows * 2


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", VIEWS)
def test_views_and_in_place_ops(name: str, choice: str) -> None:
    check(lambda: Layers(lambda m, x: VIEWS[name](m.second(m.first(x).sin()))), choice)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_tensor_saved_twice_moves_once(choice: str) -> None:
    stats = check(lambda: Layers(lambda m, x: _square(torch.sin(m.first(x)))), choice)
    assert stats.swapped_out_bytes <= 4 * 6 * 8 * 4


def _square(rows: Tensor) -> Tensor:
    return rows * rows * rows


@pytest.mark.parametrize("choice", CHOICES)
def test_channels_last(choice: str) -> None:
    def make() -> nn.Module:
        layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 3), nn.GELU())
        return layers.to(memory_format=torch.channels_last)

    pictures = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    check(make, choice, rows=pictures)


class Waves(nn.Module):
    """Complex parameters and a Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, rows: Tensor) -> Tensor:
        waves = torch.fft.rfft(rows.sin(), n=14) @ self.weight
        return (waves.conj() * waves.exp()).imag.sin()


@pytest.mark.parametrize("choice", CHOICES)
def test_complex_numbers(choice: str) -> None:
    check(Waves, choice)


@pytest.mark.parametrize("choice", CHOICES)
def test_weight_norm_and_spectral_norm(choice: str) -> None:
    def make() -> nn.Module:
        model = Layers(_mlp)
        nn.utils.parametrizations.weight_norm(model.first)
        nn.utils.parametrizations.spectral_norm(model.second)
        return model

    check(make, choice)


@pytest.mark.parametrize("choice", CHOICES)
def test_functional_call(choice: str) -> None:
    def step(model: nn.Module, rows: Tensor) -> Tensor:
        doubled = {name: p * 2 for name, p in model.named_parameters()}
        return torch.func.functional_call(model, doubled, (rows,)).sum()

    check(lambda: Layers(_mlp), choice, step=step)


@pytest.mark.parametrize("choice", CHOICES)
def test_hooks_of_the_users_own(choice: str) -> None:
    seen: list[str] = []

    def make() -> nn.Module:
        model = Layers(_mlp)
        model.first.register_forward_hook(lambda module, args, result: result * 2)
        model.first.register_full_backward_hook(lambda module, gradients, outputs: seen.append("backward"))
        model.second.weight.register_hook(lambda gradient: gradient * 3)
        return model

    check(make, choice)
    assert seen


@pytest.mark.parametrize("choice", CHOICES)
def test_saved_tensors_hooks_of_the_users_own(choice: str) -> None:
    packed: list[int] = []

    def pack(tensor: Tensor) -> Any:
        packed.append(tensor.numel())
        return tensor.detach().double()

    def function(model: Any, rows: Tensor) -> Tensor:
        hidden = model.first(rows).sin()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.float()):
            hidden = hidden.exp()
        return torch.tanh(model.second(hidden)).exp()

    check(lambda: Layers(function), choice)
    assert packed


DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: functional.dropout(x, 0.4),
    "in place": lambda x: functional.dropout(x * 2, 0.4, inplace=True),
    "alpha": lambda x: functional.alpha_dropout(x, 0.4, training=True),
    "feature": lambda x: functional.feature_alpha_dropout(x, 0.4, training=True),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "noise": lambda x: x * torch.rand_like(x) + torch.randn(8),
    "gumbel": lambda x: functional.gumbel_softmax(x),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", DROPOUTS)
def test_random_ops_replay_what_they_drew(name: str, choice: str) -> None:
    check(lambda: Layers(lambda m, x: DROPOUTS[name](m.second(m.first(x).sin())).sin().exp()), choice)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers(kind: Any, choice: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(8, 8, num_layers=2, dropout=0.3, bidirectional=True)

        def forward(self, rows: Tensor) -> Tensor:
            result: Tensor = self.layer(rows.unsqueeze(0))[0].sin()
            return result

    check(Net, choice)


@pytest.mark.parametrize("choice", CHOICES)
def test_statistics_of_instance_norm(choice: str) -> None:
    """It keeps running statistics through copies that the step makes."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.SiLU())

    check(make, choice, rows=torch.rand(2, 3, 8))


@pytest.mark.parametrize("choice", CHOICES)
def test_low_rank_adapters_that_add_in_place(choice: str) -> None:
    def function(model: Any, rows: Tensor) -> Tensor:
        hidden = model.first(rows)
        hidden += model.second(rows.sin()) * 0.5
        return hidden.sin().exp()

    def make() -> nn.Module:
        model = Layers(function)
        model.first.requires_grad_(False)
        return model

    check(make, choice)


@pytest.mark.parametrize("choice", ["swap", "recompute"])
def test_tensors_made_in_inference_mode_as_constants(choice: Choice) -> None:
    with torch.inference_mode():
        constant = torch.rand(6, 8)
    check(lambda: Layers(lambda m, x: (m.second(m.first(x).sin()) + constant).sin().exp()), choice)
