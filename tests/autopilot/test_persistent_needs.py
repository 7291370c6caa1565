"""What outlives steps is added up in one place, each of it once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pooch.autopilot.optimizer_states import OptimizerStates
from pooch.autopilot.persistent_needs import PersistentNeeds, Taken
from tests.executor.online.support import holding

pytestmark = pytest.mark.cpu


def test_what_parameters_take_is_added_up_once() -> None:
    trained, stepped = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(100))
    frozen = nn.Parameter(torch.zeros(1000), requires_grad=False)
    stepped.grad = torch.zeros(100)
    taken = Taken.by([trained, stepped, frozen, trained])
    assert taken == Taken(parameters_bytes=4 * 1110, gradients_bytes=4 * 110, to_come_bytes=4 * 10)


def test_what_is_shared_by_two_models_is_no_reason_to_have_it_leave() -> None:
    """Two models of one parameter, which take half of the budget with their gradient."""
    parameter, other = nn.Parameter(torch.zeros(2**18)), nn.Parameter(torch.zeros(2**18))
    with holding() as evictor:
        before_bytes = evictor.live.now() - 2 * parameter.nbytes
        least_bytes = before_bytes + 3 * parameter.nbytes
        needs = PersistentNeeds(evictor, OptimizerStates((), []))
        assert not needs.is_tight([parameter, parameter], least_bytes + parameter.nbytes)
        assert needs.is_tight([parameter, other], least_bytes + parameter.nbytes)
        assert needs.share_is_passed_by([parameter, parameter], before_bytes, 0.5, least_bytes) == 0
        assert needs.share_is_passed_by([parameter, other], before_bytes, 0.5, least_bytes) == least_bytes
