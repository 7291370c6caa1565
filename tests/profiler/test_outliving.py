"""What a profile knows of what outlives its step: who it is, how large, and when the step uses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import pooch
from pooch.ir import PersistentTensor, Profile
from pooch.profiler.outliving import LEAST_BYTES

WIDTH = 160  # of layers, whose weights are larger than what is too small to move
SIZE = 4 * WIDTH * WIDTH


def network(layers: int = 3) -> torch.nn.Sequential:
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    return torch.nn.Sequential(*parts)


def profiled(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, mode: str = "run", **options: object
) -> Profile:
    inputs = torch.randn(8, WIDTH)
    return pooch.profile(lambda: model(inputs).square().mean(), model, optimizer, mode=mode, **options)  # type: ignore[arg-type]


def of(profile: Profile, kind: str) -> dict[str, PersistentTensor]:
    return {each.name: each for each in profile.persistent if each.kind == kind}


def test_parameters_gradients_and_state_with_their_uses() -> None:
    # GIVEN three layers and an optimizer with two moments
    model = network()
    profile = profiled(model, torch.optim.AdamW(model.parameters()))
    # THEN weights are known with what belongs to them; biases are too small
    names = ["0.weight", "2.weight", "4.weight"]
    assert SIZE >= LEAST_BYTES
    for kind, size_bytes in (("parameter", SIZE), ("gradient", SIZE), ("state", 2 * SIZE)):
        found = of(profile, kind)
        assert list(found) == names, kind
        assert {each.size_bytes for each in found.values()} == {size_bytes}
        assert all(each.is_written and each.is_stepped for each in found.values())
    # AND each weight is used by an op of the forward pass and by one of the backward pass, but for the first one:
    # nothing needs the gradient of the input
    parameters = of(profile, "parameter")
    for name, each in parameters.items():
        forward = [slot for slot in each.uses if slot < profile.forward_ops]
        assert [profile.ops[slot].name for slot in forward] == ["aten.addmm.default"]
        assert len(each.uses) == (1 if name == "0.weight" else 2)
    # AND gradients are made in the order in which the backward pass comes to them
    made = [each.uses for each in of(profile, "gradient").values()]
    assert all(len(uses) == 1 and uses[0] >= profile.forward_ops for uses in made)
    assert made == sorted(made, reverse=True)
    for name, each in of(profile, "gradient").items():
        assert profile.ops[each.uses[0]].gradient_bytes >= SIZE, name


def test_with_fake_tensors_it_is_the_same() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    assert profiled(model, optimizer, "fake").persistent == profiled(model, optimizer).persistent


def test_state_that_is_there_is_counted_like_state_to_come() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    before = of(profiled(model, optimizer), "state")
    model(torch.randn(8, WIDTH)).sum().backward()
    optimizer.step()
    after = of(profiled(model, optimizer), "state")
    assert before == after
    assert {each.size_bytes for each in after.values()} == {3 * SIZE}


OPTIMIZERS: dict[str, Callable[[object], torch.optim.Optimizer]] = {
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),  # type: ignore[arg-type]
    "LBFGS": lambda p: torch.optim.LBFGS(p),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_without_state_of_its_own_a_parameter_is_stepped_all_the_same(name: str) -> None:
    model = network(1)
    profile = profiled(model, OPTIMIZERS[name](model.parameters()))
    assert not of(profile, "state")
    assert of(profile, "parameter")["0.weight"].is_written


def test_what_is_frozen_is_never_written() -> None:
    model = network(2)
    model[0].weight.requires_grad_(False)
    profile = profiled(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    frozen, trained = of(profile, "parameter")["0.weight"], of(profile, "parameter")["2.weight"]
    assert (frozen.is_written, frozen.is_stepped) == (False, False)
    assert (trained.is_written, trained.is_stepped) == (True, True)
    assert list(of(profile, "gradient")) == list(of(profile, "state")) == ["2.weight"]


class Tied(torch.nn.Module):
    """Two layers with one weight, and a large buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(WIDTH, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).relu()) @ self.scale  # type: ignore[operator]


def test_a_tied_weight_is_one_tensor_with_the_uses_of_both_and_buffers_are_known() -> None:
    model = Tied()
    profile = profiled(model, torch.optim.AdamW(model.parameters()))
    assert list(of(profile, "parameter")) == ["first.weight"]
    uses = of(profile, "parameter")["first.weight"].uses
    assert len([slot for slot in uses if slot < profile.forward_ops]) == 2
    assert len(of(profile, "gradient")) == 1
    buffer = of(profile, "buffer")["scale"]
    assert (buffer.is_written, buffer.is_stepped) == (False, False)
    assert len(buffer.uses) == 2


class Handing(torch.nn.Module):
    """Takes the address of a weight in its forward pass, and writes over a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.handed, self.other = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("running", torch.zeros(WIDTH, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        made = self.other(self.handed(inputs))
        self.handed.weight.data_ptr()
        self.running.add_(1.0)  # type: ignore[operator]
        return made


def test_what_cannot_leave_is_not_among_them() -> None:
    model = Handing()
    profile = profiled(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(of(profile, "parameter")) == ["other.weight"]
    assert not of(profile, "buffer")


def test_gradients_that_accumulate_are_there_before_and_are_not_among_them() -> None:
    model = network(1)
    profile = profiled(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=True)
    assert not of(profile, "gradient")
    assert of(profile, "parameter")["0.weight"].is_stepped


def test_a_parameter_that_nothing_uses_has_no_uses() -> None:
    model = network(1)
    model.register_parameter("idle", torch.nn.Parameter(torch.zeros(WIDTH, WIDTH)))
    profile = profiled(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert of(profile, "parameter")["idle"].uses == ()
    assert "idle" not in of(profile, "gradient")
