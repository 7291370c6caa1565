"""The state of optimizers comes back while the backward pass runs, as far as there is room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pooch.machine.persistent import PersistentValue
from pooch.machine.state_ahead import StateAhead
from pooch.torchtools import watch
from tests.executor.homes import Kept, same
from tests.executor.online.support import holding

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(watch.LIBRARY.get() is None, reason="nothing leaves without what watches natively"),
]
SIZE, LAYERS = 64, 4
MOMENT_BYTES = SIZE * SIZE * 4


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)])


def _backward(model: nn.Module) -> None:
    model(torch.ones(2, SIZE)).square().sum().backward()


class Training:
    """A model whose optimizer's state has left after a step that used it, and the same in plain training."""

    def __init__(self, kept: Kept) -> None:
        self.kept, self.memory, self.values = kept, kept.memory, kept.memory.values
        self.model, self.plain = _model(), _model()
        self.optimizer, self.plain_optimizer = (
            torch.optim.Adam(each.parameters()) for each in (self.model, self.plain)
        )
        self.train(1)
        self.memory.adopt_model(self.model)
        self.memory.adopt_state(self.optimizer, self.model.parameters())
        self.train(1)
        self.memory.begin_step([self.model])
        self.memory.let_state_leave(float("inf"))

    def train(self, steps: int) -> None:
        for model, optimizer in ((self.model, self.optimizer), (self.plain, self.plain_optimizer)):
            for _ in range(steps):
                _backward(model)
                optimizer.step()
                optimizer.zero_grad()

    def moments(self) -> list[PersistentValue]:
        """In the order in which a step uses them."""
        found = [self.kept.value(state[name]) for state in self.states() for name in ("exp_avg", "exp_avg_sq")]
        return sorted(found, key=lambda value: self.values._states.index(value.number))

    def copy_out(self, tensor: Tensor) -> None:
        """Have the tier have a copy as well."""
        evictor, value = self.kept.evictor, self.kept.value(tensor)
        evictor.store.start_out(value, value.place, evictor.stats)
        evictor.store.finish_out(value, evictor.stats)

    def arrive(self) -> None:
        """Wait for all that is on its way."""
        for value in self.moments():
            if value.ticket is not None:
                value.ticket.wait()

    def states(self) -> list[dict[str, Tensor]]:
        return [self.optimizer.state[each] for each in self.model.parameters()]

    def step_is_that_of_plain_training(self) -> bool:
        _backward(self.plain)
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.step()
        parts = zip(self.model.parameters(), self.plain.parameters(), strict=True)
        other = [self.plain_optimizer.state[each] for each in self.plain.parameters()]
        states = zip(self.states(), other, strict=True)
        return all(same(one, two) for one, two in parts) and all(
            same(one[name], two[name]) for one, two in states for name in ("step", "exp_avg", "exp_avg_sq")
        )


@pytest.fixture
def training() -> Iterator[Training]:
    with holding() as evictor:
        kept = Kept(evictor)
        yield Training(kept)
        evictor.set_budget(2**60)
        kept.memory.close()


def test_state_comes_back_while_the_backward_pass_runs(training: Training) -> None:
    moments = training.moments()
    assert len(moments) == 2 * LAYERS
    assert all(value.is_away for value in moments)
    _backward(training.model)
    come = [not value.is_away for value in moments]
    assert come[0]
    assert come == sorted(come, reverse=True), "what is used first comes first"
    for _ in moments:
        training.arrive()
        training.memory._bring_state_ahead()
    assert not any(value.is_away for value in moments)
    assert training.step_is_that_of_plain_training()


def test_nothing_comes_back_for_which_there_is_no_room(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(StateAhead, "go_on", lambda _: 0)
        _backward(training.model)
    evictor, unused = training.kept.evictor, torch.zeros(SIZE, SIZE)
    training.kept.add(unused)
    training.copy_out(unused)
    with monkeypatch.context() as patch:
        patch.setattr(evictor, "budget_bytes", evictor.live.now() + MOMENT_BYTES)
        training.memory._bring_state_ahead()
        assert all(value.is_away for value in training.moments())
        assert all(value.is_here for value in training.values if value.kind != "state"), "nothing leaves for it"
        patch.setattr(evictor, "budget_bytes", evictor.live.now() + 3 * MOMENT_BYTES)
        training.memory._bring_state_ahead()
        assert not training.moments()[0].is_away
    assert training.step_is_that_of_plain_training()


def test_what_came_last_leaves_before_anything_else_and_comes_again(training: Training) -> None:
    _backward(training.model)
    for _ in range(2):
        training.arrive()
        training.memory._bring_state_ahead()
    training.arrive()
    evictor, spare_bytes = training.kept.evictor, training.memory._spare_bytes
    come = [value for value in training.moments() if not value.is_away]
    assert len(come) > 2
    for parameter in training.model.parameters():  # the tier has them as well, and the last one is used later
        training.copy_out(parameter)
    evictor.set_budget(evictor.live.now())
    evictor.make_room(MOMENT_BYTES)
    assert [value for value in come if value.is_away] == [come[-1]]
    assert all(value.is_here for value in training.values if value.kind != "state")
    evictor.set_budget(2**60)
    training.memory._bring_state_ahead()
    assert come[-1].is_away
    assert training.memory._spare_bytes > spare_bytes, "more stays free from then on"
    training.memory._bring_state_ahead()
    assert not come[-1].is_away
    assert training.step_is_that_of_plain_training()


def test_once_an_optimizer_steps_what_it_will_use_does_not_leave_before_what_it_has_used(training: Training) -> None:
    _backward(training.model)
    training.arrive()
    assert list(training.values._unused_first())
    _ = training.states()[0]["step"] + 0, training.states()[0]["exp_avg"] + 0
    assert list(training.values._unused_first()) == []
    assert training.values.has_lost_state() == 0
    assert training.step_is_that_of_plain_training()


def test_state_that_the_step_before_did_not_use_stays_away(training: Training) -> None:
    """As where the gradients of several backward passes are added up."""
    moments = training.moments()
    _backward(training.model)
    training.memory.begin_step([training.model])
    training.memory.let_state_leave(float("inf"))
    assert all(value.is_away for value in moments)
    _backward(training.model)
    assert all(value.is_away for value in moments)
