"""What is told of what stays where nothing more can leave."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pooch.autopilot.optimizer_states import OptimizerStates
from pooch.autopilot.staying import Staying
from tests.autopilot.under import Under
from tests.other_threads import another_thread

ROWS, WIDTH = 64, 256
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*[layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def lines_of(budget: int | str, held: list[torch.Tensor]) -> list[str]:
    """Train under a budget while the program holds some tensors, and return the lines about what stayed."""
    torch.manual_seed(0)
    model, under = Net(), Under(budget)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with under(model):
        for _ in range(4):
            model(torch.rand(ROWS, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert held or not under.summary.steps_over_budget
    return [line for line in under.told if " were live and nothing more could leave, " in line]


def test_the_largest_tensors_that_the_program_holds_are_named_once() -> None:
    held = [
        torch.zeros(1024, 1031),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(1024, 1033)[:2],
        torch.zeros(64, 320),
    ]
    arrays = [each.numpy() for each in held]  # else they leave
    (line,) = lines_of(4 * 2**20, held)
    del arrays
    names = "float32[1024,1033] 4.04 MiB, float32[1024,1031] 4.03 MiB, float32[64,320] 80.00 KiB"
    assert f"were tensors that the program holds (the largest: {names})" in line
    figures = re.findall(r"([\d.]+) (B|KiB|MiB) (?:were|param|what)", line)
    live_bytes, held_bytes, *others_bytes = (float(number) * UNITS[unit] for number, unit in figures)
    assert live_bytes == pytest.approx(held_bytes + sum(others_bytes), abs=0.02 * 2**20)
    assert sum(each.untyped_storage().nbytes() for each in held) <= held_bytes + 0.01 * 2**20


class Outer(nn.Module):
    """Needs 2 MiB at once for the outer product in one of its modules, in the forward or in the backward pass."""

    def __init__(self, is_in_backward: bool) -> None:
        super().__init__()
        self.before, self.large = nn.Linear(WIDTH, WIDTH), InBackward() if is_in_backward else InForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.before(x)).sum()  # type: ignore[no-any-return]


class InForward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            outer = torch.outer(x[:2].flatten(), x[:4].flatten())
        return x * outer[0, 0]


class InBackward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Large.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _Large(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * torch.outer(gradient[:2].flatten(), gradient[:4].flatten())[0, 0]


@pytest.mark.parametrize(("is_in_backward", "place"), [(False, "module 'large'"), (True, "_LargeBackward")])
def test_the_op_that_alone_passes_the_budget_is_named(is_in_backward: bool, place: str) -> None:
    torch.manual_seed(0)
    model, under = Outer(is_in_backward), Under(3 * 2**19)
    with under(model):
        for _ in range(2):
            model(torch.rand(ROWS, WIDTH)).backward()
    assert under.summary.steps_over_budget == 2
    (line,) = [line for line in under.told if " over the budget of " in line]
    assert f"what single ops need (2.00 MiB at once in {place}); raise the budget or lower the batch size" in line


def test_nothing_is_told_where_the_budget_is_held() -> None:
    assert lines_of("90%", []) == []


def test_objects_are_looked_through_while_more_is_live_and_not_told_yet() -> None:
    looks = list[int]()

    def models() -> list[nn.Module]:
        looks.append(1)
        return []

    evictor: Any = SimpleNamespace(device=torch.device("cpu"), persistent=None, live=SimpleNamespace())
    staying = Staying(evictor, models, OptimizerStates((), []))
    assert staying.take() is None
    for live_bytes in (2**20, 2**20 + 2**10, *(times * 2**20 for times in range(2, 100))):
        evictor.live.now = lambda live_bytes=live_bytes: live_bytes
        staying.look()
        assert len(looks) > 1 or live_bytes < 2 * 2**20, "hardly more was live the second time"
    assert len(looks) == 5
    assert str(staying.take()).startswith("when 5.00 MiB were live and nothing more could leave, ")
    assert staying.take() is None


def test_nobody_looks_while_another_thread_may_train() -> None:
    """What its ops free just then would end the process."""
    looks = list[int]()

    def models() -> list[nn.Module]:
        looks.append(1)
        return []

    evictor: Any = SimpleNamespace(device=torch.device("cpu"), persistent=None, live=SimpleNamespace(now=lambda: 2**20))
    staying = Staying(evictor, models, OptimizerStates((), []))
    with another_thread(may_train=True):
        staying.look()
        assert looks == []
    with another_thread(may_train=False):
        staying.look()
    assert looks == [1]


def test_a_look_that_fails_is_no_failure_of_the_step() -> None:
    """Where a process is not given more memory, a list of all objects may be too large."""

    def models() -> list[nn.Module]:
        raise MemoryError

    evictor: Any = SimpleNamespace(device=torch.device("cpu"), persistent=None, live=SimpleNamespace(now=lambda: 2**20))
    staying = Staying(evictor, models, OptimizerStates((), []))
    staying.look()
    assert staying.take() is None
