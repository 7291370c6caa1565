"""A budget that is a share of the first step: what that takes is counted while values leave, without a record of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import pooch
from pooch.executor.live_bytes import live_bytes_of

CPU = torch.device("cpu")
_SMALL_BYTES = 2**10  # scalars of Pooch's own, and what a step under hooks does not make


class Residual(nn.Module):
    """Blocks with a branch, an activation in place, a mask, and a value that is saved more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inner = torch.relu_(layer(x))
            x = x + nn.functional.dropout(inner * torch.sigmoid(inner), 0.1)
        return x


def steps() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    return {
        "mlp": (lambda: nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(8))), (4096, 128)),
        "residual": (Residual, (4096, 128)),
        "convolutions": (
            lambda: nn.Sequential(
                *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(6))
            ),
            (8, 8, 32, 32),
        ),
        "encoder": (lambda: nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), (16, 64, 128)),
    }


def trained(model: nn.Module, inputs: torch.Tensor) -> None:
    torch.manual_seed(1)
    model(inputs).square().mean().backward()


@pytest.mark.parametrize("share", ["70%", "55%"])
@pytest.mark.parametrize("kind", steps())
def test_it_is_the_share_of_what_the_step_takes_without_pooch(kind: str, share: str) -> None:
    gc.collect()  # what ends in the middle of a step would be counted at its begin
    build, shape = steps()[kind]
    torch.manual_seed(0)
    plain, governed, inputs = build(), build(), torch.randn(shape)
    governed.load_state_dict(plain.state_dict())
    live = live_bytes_of(CPU)
    live.reset_peak()
    before_bytes = live.now()
    trained(plain, inputs)
    rise_bytes = live.peak() - before_bytes
    plain_gradients = [parameter.grad for parameter in plain.parameters()]
    live.close()
    with pooch.auto(governed, share, tell=lambda _: None) as auto:
        before_bytes = auto._driver._live.now()
        trained(governed, inputs)
        driver = auto._driver
        assert driver.budget.size_bytes is not None
        expected_bytes = float(share.rstrip("%")) / 100 * (before_bytes + rise_bytes)
        assert abs(driver.budget.size_bytes - expected_bytes) <= _SMALL_BYTES
        assert driver.last.mode == "online"
        if kind != "encoder":  # one layer, half of which has to be there at once
            assert driver.last.peak_bytes <= driver.budget.size_bytes
        assert driver.counters.swapped_bytes > 0
    for parameter, gradient in zip(governed.parameters(), plain_gradients, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)


def test_gradients_leave_in_the_first_backward_pass_where_parameters_and_they_would_pass_it() -> None:
    """There are nearly no activations, so half of what the step takes are the parameters."""
    results = []
    for share in (None, "80%"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        inputs = torch.randn(4, 512)
        if share is None:
            trained(model, inputs)
        else:
            told: list[str] = []
            with pooch.auto(model, share, tell=told.append) as auto:
                trained(model, inputs)
                driver = auto._driver
                memory = driver._persistence.memory
                assert memory is not None
                assert memory.values.moved.out_bytes["gradient"] > 0
                assert driver.budget.size_bytes is not None
                assert driver.last.peak_bytes <= driver.budget.size_bytes
                assert any("would exceed 80% of what it takes" in line for line in told)
        results.append([parameter.grad for parameter in model.parameters()])
    for plain, governed in zip(*results, strict=True):
        assert plain is not None
        assert governed is not None
        assert torch.equal(plain, governed)


@pytest.mark.parametrize("has_own_hooks", [False, True])
def test_it_is_known_after_a_first_step_in_whose_midst_a_model_came(has_own_hooks: bool) -> None:
    """Slices of a `Sequential` are new models in each step, so that no step would do otherwise."""
    gc.collect()
    own = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    torch.manual_seed(0)
    build, shape = steps()["mlp"]
    layers, inputs = build(), torch.randn(shape)
    assert isinstance(layers, nn.Sequential)
    with pooch.auto(layers[:4], "60%", tell=lambda _: None) as auto:
        first = layers[:4]
        auto.add(first)
        with own if has_own_hooks else nullcontext():
            inner = first(inputs)
            second = layers[4:]
            auto.add(second)
            outer = second(inner)
        outer.square().mean().backward()
        driver = auto._driver
        assert driver.budget.size_bytes is not None
        assert (driver.last.peak_bytes > driver.budget.size_bytes) == has_own_hooks


def test_state_of_another_optimizer_is_told_where_the_budget_reads_otherwise() -> None:
    """That of the first one is part of the budget that is told, and that of a scale is some bytes."""
    body, head, inputs, told = nn.Linear(256, 256), nn.Linear(256, 256), torch.randn(256, 256), list[str]()
    scale = torch.ones(1, requires_grad=True)
    found, optimizers = list[int](), list[torch.optim.Optimizer]()
    with pooch.auto(nn.Sequential(body, head), "90%", tell=told.append):
        for trained_part in (body.weight, scale, head.weight):
            optimizers, before = [*optimizers, torch.optim.Adam([trained_part])], len(told)
            for _ in range(2):
                (head(body(inputs)) * scale).mean().backward()
                optimizers[-1].step()
            found.append(sum("another optimizer" in line for line in told[before:]))
    assert found == [0, 0, 1]


@pytest.mark.parametrize("is_loaded", [False, True])
def test_an_optimizer_that_is_made_anew_takes_the_place_of_the_one_before(is_loaded: bool) -> None:
    """A program that began each epoch with a new one had a share of ever more: 40% became 70%."""
    layer, inputs = nn.Linear(256, 256), torch.randn(256, 256)
    optimizer, found = torch.optim.Adam(layer.parameters()), set[int | None]()
    with pooch.auto(layer, "90%", tell=lambda _: None) as auto:
        for _ in range(4):
            layer(inputs).mean().backward()
            optimizer.step()
            found.add(auto._driver.budget.size_bytes)
            kept = optimizer.state_dict() if is_loaded else None
            optimizer = torch.optim.Adam(layer.parameters())
            if kept is not None:
                optimizer.load_state_dict(kept)
            del kept
    assert len(found) == 1


def test_the_first_step_is_compared_with_the_budget_that_is_told() -> None:
    """That counts the optimizer's state, which the first step creates after it. It had less before."""
    gc.collect()
    model, inputs = nn.Linear(1024, 1024, bias=False), torch.randn(256, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    with pooch.auto(model, "70%", optimizer, tell=lambda _: None) as auto:
        for number in range(4):
            model(inputs).sigmoid().square().mean().backward()
            first_bytes = auto._driver.budget.size_bytes
            if number == 0:
                assert first_bytes is not None
                assert auto._driver.last.peak_bytes > first_bytes, "otherwise this shows nothing"
                assert auto.summary().steps_over_budget == 1
            optimizer.step()
            optimizer.zero_grad()
    summary = auto.summary()
    assert summary.budget_bytes is not None
    assert summary.peak_bytes <= summary.budget_bytes
    assert summary.steps_over_budget == 0
    assert "Budget held" in str(summary)
