"""What an optimizer's step is thought to take: the moments that are known are those that a step makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from pooch.executor.slices import MOST_MOMENTS, known_moments, stepping_bytes
from pooch.torchtools.tensors import find_tensors

Make = Callable[..., torch.optim.Optimizer]
KNOWN: dict[str, Make] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "AdamW, amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "SGD": torch.optim.SGD,
    "SGD, momentum": partial(torch.optim.SGD, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "RMSprop, momentum": partial(torch.optim.RMSprop, momentum=0.9),
    "RMSprop, all": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Adadelta": torch.optim.Adadelta,
    "Rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("kind", KNOWN)
def test_the_moments_that_are_known_are_those_that_a_step_makes(kind: str) -> None:
    parameter = torch.nn.Parameter(torch.randn(40, 50))
    optimizer = KNOWN[kind]([parameter], lr=0.1)
    moments = known_moments(optimizer)
    assert moments is not None
    assert moments <= MOST_MOMENTS
    temporary_bytes = stepping_bytes(optimizer, [parameter]) - moments * parameter.nbytes
    assert temporary_bytes > 0
    parameter.square().sum().backward()
    optimizer.step()
    assert sum(each.nbytes for each in find_tensors(dict(optimizer.state)) if each.ndim) == moments * parameter.nbytes
    assert stepping_bytes(optimizer, [parameter]) == temporary_bytes


def test_of_others_no_moments_are_known() -> None:
    class Own(torch.optim.AdamW):
        pass

    parameter = torch.nn.Parameter(torch.randn(40, 50))
    assert known_moments(Own([parameter])) is None
    assert known_moments(torch.optim.LBFGS([parameter])) is None
