"""The parameters and buffers of a module are those that the module itself gives, in the same order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from pooch.torchtools.module_tensors import module_tensors, parameters_of

pytestmark = pytest.mark.cpu


class Shared(nn.Module):
    """Has a part twice, a parameter twice, and places with nothing in them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.first = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
        self.again, self.nothing = self.first[0], None
        self.register_module("missing", None)
        self.first[2].weight = self.first[0].weight
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.register_buffer("seen_again", self.seen)
        self.register_parameter("none", None)


class Chosen(nn.Linear):
    """Gives other parameters than it has."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter([("weight", self.weight)])


def within_itself() -> nn.Module:
    outer, inner = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    outer.append(inner)
    inner.append(outer)
    return outer


MADE: dict[str, Callable[[], nn.Module]] = {
    "shared": Shared,
    "deep": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 3),
    "chosen": lambda: Chosen(2, 2),
    "parametrized": lambda: weight_norm(nn.Linear(3, 3)),
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    "list": lambda: nn.ModuleList([nn.ParameterDict({"a": torch.ones(2)}), nn.ParameterList([torch.ones(3)])]),
    "within itself": within_itself,
    "empty": nn.Identity,
}


def same(found: list[Any], expected: Iterator[Tensor]) -> bool:
    return [(each.data_ptr(), each.shape) for each in found] == [(each.data_ptr(), each.shape) for each in expected]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", MADE)
def test_they_are_those_that_the_module_gives_in_its_order(name: str) -> None:
    module = MADE[name]()
    parameters, buffers = module_tensors(module)
    assert same(parameters, module.parameters())
    assert same(buffers, module.buffers())


def test_parameters_of_several_modules_come_once() -> None:
    one, other = Shared(), nn.Linear(3, 3)
    other.weight = one.first[0].weight
    found = parameters_of([one, other, one])
    assert [id(each) for each in found] == [*map(id, one.parameters()), id(other.bias)]
    assert len(parameters_of([copy.deepcopy(one), one])) == 2 * len(list(one.parameters()))
