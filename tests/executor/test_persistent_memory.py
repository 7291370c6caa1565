"""What outlives steps on a real device: what is found, slices that fail, copies ahead of need, the end of it."""

from __future__ import annotations

import gc
import io
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.executor.engines.cpu import CpuTicket
from pooch.executor.engines.spill_file import Mover
from pooch.ground.errors import TierError
from pooch.machine.persistent import PersistentValue
from pooch.torchtools import raw_looks, raw_storages, watch
from pooch.torchtools.optimizer_slices import Load, StepNeeds
from pooch.torchtools.tensors import find_tensors
from tests.counting import the_allocator
from tests.executor.copiers import use_copier
from tests.executor.homes import Kept, same
from tests.executor.online.support import holding

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(watch.LIBRARY.get() is None, reason="nothing leaves without what watches natively"),
]
SIZE = 64


@pytest.fixture
def copied_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies can be made to fail."""
    use_copier("Python", monkeypatch)


@pytest.fixture
def kept() -> Iterator[Kept]:
    with holding() as evictor:
        made = Kept(evictor)
        yield made
        made.memory.close()


class Training:
    """A model of two layers with gradients and the state of an optimizer, all of which may leave."""

    def __init__(self, kept: Kept, steps: int = 2) -> None:
        torch.manual_seed(0)
        self.kept, self.memory = kept, kept.memory
        self.model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=0.1)
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
        self.begin_step()
        self.memory.adopt_state(self.optimizer, self.parameters)

    def begin_step(self) -> None:
        self.memory.begin_step([self.model])

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, SIZE)).square().sum().backward()

    def contents(self) -> list[Tensor]:
        found = [parameter.detach().clone() for parameter in self.parameters]
        for parameter in self.parameters:
            state = self.optimizer.state[parameter]
            found += [state[name].clone() for name in sorted(state)]
        return found

    def states(self) -> list[str]:
        return [value.state for value in self.memory.values if not value.is_gone]


def all_same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(same, one, other))


# Slices ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_away", [True, False])
def test_a_slice_that_fails_leaves_everything_as_it_was(kept: Kept, is_away: bool) -> None:
    training = Training(kept)
    before = training.contents()
    if is_away:
        kept.leave()
    else:
        training.parameters[0].data.add_(0)
        kept.evictor.relieve()
        _ = training.contents()
        kept.value(training.parameters[1]).is_pinned = False
        next(iter(training.memory.values)).revert()  # one is away, so the slice is one that moves something
    training.memory.begin_slice(training.optimizer, training.parameters)
    training.optimizer.step()
    assert not all_same(training.contents(), before)
    training.memory.undo_slice()
    assert all_same(training.contents(), before)
    kept.leave()
    assert all_same(training.contents(), before)
    assert not any(value.is_busy for value in training.memory.values)


def test_data_is_read_through_a_view_that_was_there_before(kept: Kept) -> None:
    data = torch.rand(SIZE, SIZE)
    view, expected = data[3:5], data[3:5].mul(2).sum().item()
    kept.memory.adopt_data([[data, view]])
    kept.leave()
    assert watch.is_away(data.untyped_storage()._cdata)
    assert view.mul(2).sum().item() == expected


def test_a_batch_that_takes_the_place_of_another_is_the_same_value(kept: Kept) -> None:
    for _ in range(3):
        batch = torch.rand(SIZE, SIZE)
        kept.memory.adopt_data([[batch]], is_given=True)
        kept.memory.begin_step([])
    assert {value.number for value in kept.memory.values} == {kept.value(batch).number} == {0}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_data_is_there_in_a_process_that_is_forked(kept: Kept) -> None:
    """As that of a loader, which may read it after this one has gone on."""
    data, parameter = torch.rand(SIZE, SIZE), torch.rand(SIZE, SIZE)
    kept.add(parameter)
    kept.memory.adopt_data([[data]])
    kept.leave()
    keys = [each.untyped_storage()._cdata for each in (data, parameter)]
    assert all(map(watch.is_away, keys))
    process = os.fork()
    if process == 0:
        os._exit(watch.is_away(keys[0]))
    assert os.waitpid(process, 0)[1] == 0
    assert list(map(watch.is_away, keys)) == [False, True]


def test_a_slice_is_undone_though_another_thread_ends_one_meanwhile(kept: Kept) -> None:
    training = Training(kept)
    before = training.contents()
    kept.leave()
    training.memory.begin_slice(training.optimizer, training.parameters)
    training.optimizer.step()
    thread = threading.Thread(target=training.memory.end_slice, args=(training.optimizer, []))
    thread.start()
    thread.join()
    training.memory.undo_slice()
    assert all_same(training.contents(), before)


def test_a_slice_that_fails_gives_no_state_to_what_had_none(kept: Kept) -> None:
    training = Training(kept, steps=0)
    training.backward()
    before = [parameter.detach().clone() for parameter in training.parameters]
    kept.leave()
    training.memory.begin_slice(training.optimizer, training.parameters)
    training.optimizer.step()
    training.memory.undo_slice()
    assert not training.optimizer.state
    assert all_same([parameter.detach().clone() for parameter in training.parameters], before)


class Replacing(torch.optim.Optimizer):
    """Counts in Python, and replaces its state rather than writing to it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = 0.5 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                parameter.sub_(state["mean"], alpha=group["lr"])


def test_a_slice_that_fails_gives_back_what_it_has_replaced(kept: Kept) -> None:
    training = Training(kept)
    optimizer = Replacing(training.parameters)
    training.backward()
    optimizer.step()
    kept.memory.adopt_state(optimizer, training.parameters)
    before = [optimizer.state[parameter]["mean"] for parameter in training.parameters]
    copies = [mean.clone() for mean in before]
    kept.leave()
    kept.memory.begin_slice(optimizer, training.parameters)
    optimizer.step()
    kept.memory.undo_slice()
    for parameter, mean, copy in zip(training.parameters, before, copies, strict=True):
        assert optimizer.state[parameter]["count"] == 1
        assert optimizer.state[parameter]["mean"] is mean
        assert same(mean + 0, copy)


def test_a_slice_that_succeeds_is_not_lost_and_its_state_may_leave(kept: Kept) -> None:
    training = Training(kept, steps=0)
    training.backward()
    kept.leave()
    training.memory.begin_slice(training.optimizer, training.parameters)
    training.optimizer.step()
    training.memory.end_slice(training.optimizer, training.parameters)
    after = training.contents()
    kept.leave()
    assert training.states().count("away") >= 3 * len(training.parameters)
    assert all_same(training.contents(), after)
    training.memory.undo_slice()  # of no slice
    assert all_same(training.contents(), after)


def test_nothing_of_a_slice_leaves_while_it_runs(kept: Kept) -> None:
    training = Training(kept)
    kept.leave()
    training.memory.begin_slice(training.optimizer, training.parameters)
    kept.leave()
    changed = [value for value in training.memory.values if value.kind in ("parameter", "state")]
    assert {value.state for value in changed} == {"clean"}
    training.memory.end_slice(training.optimizer, training.parameters)
    kept.leave()
    assert {value.state for value in changed} == {"away"}


def test_a_slice_that_fails_is_undone_in_place_where_somebody_has_the_address(kept: Kept) -> None:
    training = Training(kept)
    kept.leave()
    array = training.parameters[0].detach().numpy()
    address = training.parameters[2].data_ptr()
    array[0] = 5  # nothing tells
    before = training.contents()
    kept.leave()
    training.memory.begin_slice(training.optimizer, training.parameters)
    training.optimizer.step()
    training.memory.undo_slice()
    assert all_same(training.contents(), before)
    assert (array == before[0].numpy()).all()
    assert training.parameters[2].data_ptr() == address


def test_a_slice_for_which_there_was_no_room_stays_as_it_is_as_a_whole(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(kept)
    kept.leave()
    _ = training.parameters[0] + 1
    monkeypatch.setattr(kept.evictor, "budget_bytes", 0)  # so there is no room for copies on the device
    value = kept.value(training.parameters[0])
    place, value.place, value.is_copied = value.place, None, False
    training.memory.begin_slice(training.optimizer, training.parameters)
    training.optimizer.step()
    after = training.contents()
    training.memory.undo_slice()
    assert all_same(training.contents(), after)
    value.place = place


@pytest.mark.parametrize("has_room", [True, False])
def test_what_is_here_is_copied_on_the_device_where_there_is_room(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    training = Training(kept)
    kept.leave()
    before = training.contents()  # so all are here
    with torch.no_grad():
        training.parameters[0].mul_(1)
    kept.value(training.parameters[2]).revert()
    if not has_room:
        monkeypatch.setattr(kept.evictor, "budget_bytes", 0)
    copied_bytes = kept.memory.values.moved.out_bytes.total()
    training.memory.begin_slice(training.optimizer, training.parameters)
    assert (kept.memory.values.moved.out_bytes.total() == copied_bytes) is has_room
    training.optimizer.step()
    training.memory.undo_slice()
    assert all_same(training.contents(), before)


@pytest.fixture
def tight(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> Training:
    """There is no room for a slice, as where a single parameter is too large: what it changes leaves while it runs."""
    training = Training(kept)
    kept.leave()
    monkeypatch.setattr(kept.evictor, "budget_bytes", 0)
    return training


def stepped_while_all_leaves(training: Training) -> None:
    for parameter in training.parameters:
        for tensor in (parameter.data, *find_tensors(training.optimizer.state[parameter])):
            tensor.add_(1)
            training.kept.leave()


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_does_not_fit_leaves_while_it_is_stepped(tight: Training, is_whole: bool) -> None:
    begin = tight.memory.begin_whole if is_whole else tight.memory.begin_slice
    begin(tight.optimizer, tight.parameters)
    stepped_while_all_leaves(tight)
    assert all(value.state == "away" for value in tight.memory.values if value.kind in ("parameter", "state"))
    tight.memory.end_slice(tight.optimizer, tight.parameters)
    after = tight.contents()
    tight.kept.leave()
    assert all_same(tight.contents(), after)


@pytest.mark.parametrize("ends", ["here", "away"])
def test_what_has_left_while_it_was_stepped_is_undone(tight: Training, ends: str) -> None:
    before = tight.contents()
    tight.kept.leave()
    for _ in range(2):  # the room of the first copies serves once more
        tight.memory.begin_slice(tight.optimizer, tight.parameters)
        stepped_while_all_leaves(tight)
        if ends == "here":
            assert not all_same(tight.contents(), before)
        tight.memory.undo_slice()
        assert all_same(tight.contents(), before)
    places = [value.place.place for value in tight.memory.values]
    rooms = [*places, *(place for free in tight.memory._rooms._free.values() for place in free)]
    assert len(set(map(id, rooms))) == len(rooms)
    changed = sum(value.kind in ("parameter", "state") for value in tight.memory.values)
    assert len(rooms) - len(places) == changed


def test_a_step_is_told_that_has_failed_and_cannot_be_undone(tight: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limited tier has no room for two copies of each."""
    monkeypatch.setattr(tight.kept.evictor.engine.room, "limit_bytes", 2**20)
    tight.memory.begin_slice(tight.optimizer, tight.parameters)
    stepped_while_all_leaves(tight)
    after = tight.contents()

    def fails() -> None:
        try:
            raise TierError("a copy cannot be read")
        except TierError:
            tight.memory.undo_slice()

    with pytest.warns(UserWarning, match=r"cannot be undone.*load a checkpoint"):
        fails()
    assert all_same(tight.contents(), after)


def test_state_that_something_else_than_a_step_has_made_is_copied_to_the_tier(tight: Training) -> None:
    before = tight.contents()
    for parameter in tight.parameters:
        tight.optimizer.state[parameter]["other"] = torch.ones(4, SIZE)
        tight.optimizer.state[parameter]["list"] = [torch.ones(2, SIZE)]
    tight.memory.begin_slice(tight.optimizer, tight.parameters)
    tight.kept.leave()
    for parameter in tight.parameters:
        assert tight.kept.value(tight.optimizer.state[parameter]["other"]).state == "away"
        assert tight.kept.value(tight.optimizer.state[parameter]["list"][0]).state == "away"
        tight.optimizer.state[parameter]["other"].zero_()
        tight.optimizer.state[parameter]["list"].pop().zero_()
    tight.memory.undo_slice()
    for parameter in tight.parameters:
        (listed,) = tight.optimizer.state[parameter].pop("list")
        assert (listed == 1).all()
        assert (tight.optimizer.state[parameter].pop("other") == 1).all()
    assert all_same(tight.contents(), before)


# How large slices are -------------------------------------------------------------------------------------------------

LAYER_BYTES = 4 * SIZE * SIZE
NEEDS = StepNeeds({}, alone=3.0, beside=0.0)


def loads_of(training: Training, needs: StepNeeds | None, free_bytes: int) -> list[Load]:
    """What each parameter takes by itself where so much is free."""
    evictor = training.kept.evictor
    evictor.budget_bytes = evictor.live.now() + free_bytes
    return training.memory.loads(training.optimizer, [[each] for each in training.parameters], needs)


def test_what_is_here_takes_no_room_but_for_temporary_tensors(kept: Kept) -> None:
    training = Training(kept)
    loads = loads_of(training, NEEDS, 4 * LAYER_BYTES)
    assert [(load.moves, load.share, load.has_room) for load in loads] == [(False, 0.0, True)] * 4
    on_lists = replace(NEEDS, alone=1.0, beside=1.0)
    assert [load.share for load in loads_of(training, on_lists, 4 * LAYER_BYTES)][::2] == [1 / 3] * 2
    assert [load.share for load in loads_of(training, None, 4 * LAYER_BYTES)][::2] == [0.5] * 2, "two are thought of"


def test_there_is_no_room_where_the_largest_parameter_has_none(kept: Kept) -> None:
    training = Training(kept)
    assert loads_of(training, NEEDS, 3 * LAYER_BYTES) == [Load(False, math.inf, math.inf)] * 4


def test_what_is_away_shares_the_room_with_what_comes_and_leaves_meanwhile(kept: Kept) -> None:
    training = Training(kept)
    before = training.contents()
    kept.leave()
    with torch.no_grad():
        for parameter in training.parameters[1:]:
            for tensor in (parameter, *training.optimizer.state[parameter].values()):
                tensor.add_(0)
    _ = [parameter.grad + 0 for parameter in training.parameters if parameter.grad is not None]
    first, *others = loads_of(training, NEEDS, 30 * LAYER_BYTES)
    assert first.moves
    assert first.has_room
    assert not any(load.moves for load in others)
    assert loads_of(training, NEEDS, 6 * LAYER_BYTES)[0].moving_share == pytest.approx(3.0, rel=0.1), "a third of it"
    assert all_same(training.contents(), before)


def test_a_gradient_that_is_away_moves(kept: Kept) -> None:
    training = Training(kept)
    gradient = training.parameters[0].grad
    assert gradient is not None
    value = kept.value(gradient)
    kept.evictor.store.start_out(value, value.place, kept.evictor.stats)
    kept.evictor.store.finish_out(value, kept.evictor.stats)
    kept.evictor.store.drop(value)
    assert [load.moves for load in loads_of(training, NEEDS, 30 * LAYER_BYTES)] == [True, False, False, False]


def test_where_nothing_asks_for_room_more_is_thought_to_be_taken(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(kept)
    monkeypatch.setattr(kept.evictor.live, "asks", False, raising=False)
    shares = [load.share for load in loads_of(training, replace(NEEDS, alone=0.0), 4 * LAYER_BYTES)]
    assert shares[::2] == [0.5] * 2


@pytest.mark.parametrize(("room", "temporary", "come"), [(20, 0, 10), (20, 20, 0), (0, 0, 0)])
def test_what_the_next_slice_needs_comes_while_one_computes(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, room: int, temporary: int, come: int
) -> None:
    """Two parameters, their gradients, two moments and a count of each, if there is room beside what this one takes."""
    training = Training(kept)
    kept.leave()
    before = training.states().count("away")
    monkeypatch.setattr(kept.evictor, "budget_bytes", kept.evictor.live.now() + room * LAYER_BYTES)
    training.memory._temporary_bytes = temporary * LAYER_BYTES
    training.memory.begin_next(training.optimizer, training.parameters[:2])
    assert training.states().count("away") == before - come
    assert not training.memory._ahead, "it is not what was used next in the step before"


# Copies ahead of need -------------------------------------------------------------------------------------------------


class Order:
    """What was used in which order in the step before, and where it is now.

    Args:
        kept: Has enough room for all of it.
    """

    def __init__(self, kept: Kept) -> None:
        self.kept, self.values = kept, kept.memory.values
        self.tensors = [torch.full((SIZE, SIZE), float(number)) for number in range(60)]
        for tensor in self.tensors:
            kept.add(tensor)
        for tensor in self.tensors:
            _ = tensor + 1
        kept.memory.begin_step([])
        self.all = [kept.value(tensor) for tensor in self.tensors]
        kept.leave()

    def here(self, monkeypatch: pytest.MonkeyPatch, numbers: range) -> None:
        """Bring some of them back, and leave no more room than for one more."""
        with monkeypatch.context() as patch:
            patch.setattr(self.kept.memory, "_read_ahead", lambda: None)
            self.kept.memory.bring_back([self.all[number] for number in numbers])
        self.full(monkeypatch)

    def full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Leave no more room than for one of them."""
        budget_bytes = self.kept.evictor.live.now() + self.all[0].size_bytes
        monkeypatch.setattr(self.kept.evictor, "budget_bytes", budget_bytes)

    def states(self, *numbers: int) -> list[str]:
        return [self.all[number].state for number in numbers]


def test_what_is_used_next_comes_back_in_place_of_what_is_used_last(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Order(kept)
    order.here(monkeypatch, range(50, 60))
    kept.memory.bring_back([order.all[0]])
    assert order.states(1, 2) == ["returning", "returning"]
    assert order.states(58, 59) == ["away", "away"]
    assert order.states(50, 51) == ["clean", "clean"]


def test_what_is_used_soon_does_not_leave_for_what_is_used_next(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order(kept)
    order.here(monkeypatch, range(6, 12))
    kept.memory.bring_back([order.all[0]])
    assert order.states(1, *range(6, 12)) == ["away", *["clean"] * 6]


@pytest.mark.usefixtures("copied_in_python")
def test_nobody_waits_for_what_leaves_ahead(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written to is copied first, if it has left before, and leaves when that is done."""
    order = Order(kept)
    order.here(monkeypatch, range(50, 60))
    for value, tensor in zip(order.all[50:60], order.tensors[50:60], strict=True):
        with torch.no_grad():
            tensor.mul_(1)
        value.leaves = value is not order.all[59]
    kept.memory.begin_step([])  # what was used now is no order of a step
    order.values._uses = type(order.values._uses)([value.number for value in order.all])
    kept.memory.bring_back([order.all[0]])
    assert order.states(58, 59) == ["leaving", "here"]
    assert order.states(1) == ["away"]
    assert not order.all[58].leaves  # a copy ahead is in vain if it does not
    with monkeypatch.context() as patch:
        patch.setattr(CpuTicket, "is_done", lambda ticket: False)
        kept.memory.bring_back([order.all[0]])
        assert order.states(58) == ["leaving"]
    order.all[58].ticket.wait()
    kept.memory.bring_back([order.all[0]])
    assert order.states(58) == ["away"]


def test_more_stays_free_once_something_has_come_ahead_in_vain(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ops between two uses take more than was thought: what had just come would leave again for them."""
    order = Order(kept)
    order.here(monkeypatch, range(50, 60))
    kept.memory.bring_back([order.all[0]])
    assert order.states(1, 2) == ["returning", "returning"]
    have_left = order.states(*range(50, 60)).count("away")
    kept.evictor.store.drop(order.all[1])
    kept.memory.bring_back([order.all[0]])
    assert order.states(1, 2) == ["returning", "returning"]
    assert order.states(*range(50, 60)).count("away") == have_left + 1
    kept.memory.bring_back([order.all[1], order.all[2]])
    _ = order.tensors[1] + order.tensors[2]
    for each in order.all[1:3]:
        kept.evictor.store.drop(each)  # after its use
    kept.memory.bring_back([order.all[0]])
    assert kept.memory._spare_bytes == order.all[0].size_bytes
    for halves in (1, 2, 4):  # in the first of these steps it was lost
        kept.memory.begin_step([])
        assert kept.memory._spare_bytes == order.all[0].size_bytes // halves


def test_state_of_the_next_step_does_not_come_back_in_this_one(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would leave again as that begins."""
    order = Order(kept)
    for value in order.all[:2]:
        value.kind = "state"
    monkeypatch.setattr(order.values, "_count_uses", lambda: 58)
    assert list(order.values.used_next(5)) == [order.all[58], order.all[59], order.all[2]]
    monkeypatch.setattr(order.values, "_count_uses", lambda: 0)
    assert list(order.values.used_next(2)) == order.all[:2]


def test_state_that_is_used_last_leaves_first_and_no_more_than_has_to(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Order(kept)
    order.here(monkeypatch, range(60))
    for value in order.all:
        value.kind = "state"
    kept.memory.let_state_leave(2 * order.all[0].size_bytes)
    assert order.states(0, 57, 58, 59) == ["clean", "clean", "away", "away"]


# What is found --------------------------------------------------------------------------------------------------------


def test_parameters_gradients_and_buffers_of_a_model_are_found_once(kept: Kept) -> None:
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, SIZE))
    model[2].weight = model[0].weight
    model(torch.ones(2, SIZE)).sum().backward()
    kept.memory.begin_step([model, model])
    kinds = sorted(value.kind for value in kept.memory.values)
    count = len(list(model.parameters()))
    assert kinds == sorted(["parameter"] * count + ["gradient"] * count + ["buffer"] * len(list(model.buffers())))
    kept.memory.begin_step([model])
    assert len(list(kept.memory.values)) == len(kinds)


def test_what_cannot_leave_is_told(kept: Kept, tmp_path: Any) -> None:
    model = nn.Module()
    model.seen = nn.Parameter(torch.ones(SIZE))
    view = model.seen.detach()
    model.shared = nn.Parameter(torch.ones(SIZE).share_memory_())
    model.of_an_array = nn.Parameter(torch.frombuffer(bytearray(4 * SIZE), dtype=torch.float32))
    file = tmp_path / "mapped"
    file.write_bytes(bytes(4 * SIZE))
    model.mapped = nn.Parameter(torch.from_file(str(file), shared=False, size=SIZE))
    model.sparse = nn.Parameter(torch.eye(3).to_sparse())
    kept.memory.begin_step([model])
    assert not list(kept.memory.values)
    assert sum(kept.memory.staying_bytes.values()) == 4 * 4 * SIZE
    assert len(kept.memory.staying_bytes) >= 2
    assert view.sum() == SIZE


@pytest.mark.parametrize("is_counted", [False, True])
def test_what_was_loaded_from_a_checkpoint_leaves_as_well(kept: Kept, is_counted: bool) -> None:
    """PyTorch says that its storages cannot be resized, as of those of mapped files, though it owns their memory."""
    file, allocator = io.BytesIO(), the_allocator()
    torch.save(torch.arange(float(SIZE)), file)
    file.seek(0)
    if is_counted:
        assert allocator.install(kept)
    try:
        model = nn.Module()
        model.loaded = nn.Parameter(torch.load(file))
        assert not model.loaded.untyped_storage().resizable()
        kept.memory.begin_step([model])
        assert not kept.memory.staying_bytes
        for _ in range(2):
            kept.leave()
            assert kept.value(model.loaded).state == "away"
            assert torch.equal(model.loaded.detach(), torch.arange(float(SIZE)))
        model.loaded.share_memory_()
        kept.leave()
        assert model.loaded.sum() == SIZE * (SIZE - 1) / 2
    finally:
        allocator.remove(kept)


def test_another_thread_may_add_values_while_they_are_added_up(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.ones(SIZE) for _ in range(3)]
    for tensor in tensors[:2]:
        kept.add(tensor)

    def is_here(_: PersistentValue) -> bool:
        monkeypatch.undo()
        kept.add(tensors[2])  # as another thread does
        return False

    monkeypatch.setattr(PersistentValue, "is_here", property(is_here))
    assert kept.memory.values.away_bytes().total() == tensors[0].nbytes, "the second is looked at as it is"
    assert kept.memory.values.here_bytes() == 3 * tensors[0].nbytes
    assert kept.memory.values.away_bytes().total() == 0


def test_what_is_too_small_to_gain_anything_stays(kept: Kept) -> None:
    kept.memory._least_bytes = 4 * SIZE + 1
    model = nn.Linear(SIZE, SIZE)
    kept.memory.begin_step([model])
    assert [value.size_bytes for value in kept.memory.values] == [4 * SIZE * SIZE]


def test_a_gradient_that_is_made_anew_takes_the_room_of_the_one_before(kept: Kept) -> None:
    training = Training(kept)
    count = len(training.memory._numbers)
    rooms = len({id(value.place.place) for value in training.memory.values if value.place})
    for _ in range(3):
        kept.leave()
        training.backward()
        training.begin_step()
        assert len(training.memory._numbers) == count
        assert len(training.memory._homes) == len(list(training.memory.values)) == rooms
    free = sum(map(len, training.memory._rooms._free.values()))
    assert free <= len(training.parameters)


def test_a_tensor_that_the_program_has_put_on_a_storage_is_watched(kept: Kept) -> None:
    model = nn.Linear(SIZE, SIZE)
    kept.memory.begin_step([model])
    other = nn.Linear(SIZE, SIZE)
    torch._C.TensorBase.set_(other.weight.data, model.weight.untyped_storage(), 0, (SIZE, SIZE), (SIZE, 1))
    twin = torch._C.TensorBase.set_(torch.empty(0), model.weight.untyped_storage(), 0, (SIZE, SIZE), (SIZE, 1))
    other.weight = nn.Parameter(twin)
    kept.memory.begin_step([model, other])
    expected = model.weight.detach().clone()
    kept.leave()
    assert same(other.weight.detach() + 0, expected)


# Moving ---------------------------------------------------------------------------------------------------------------


def test_what_left_before_is_copied_as_soon_as_it_was_written(kept: Kept) -> None:
    training = Training(kept)
    kept.leave()
    out_bytes = training.memory.values.moved.out_bytes
    training.memory.begin_slice(training.optimizer, training.parameters)
    training.optimizer.step()
    before = out_bytes["parameter"]
    training.memory.end_slice(training.optimizer, training.parameters)
    assert out_bytes["parameter"] - before == sum(parameter.nbytes for parameter in training.parameters)
    after = training.contents()
    kept.leave()
    assert all_same(training.contents(), after)


def test_what_never_leaves_is_not_copied(kept: Kept) -> None:
    training = Training(kept)
    for _ in range(3):
        training.backward()
        training.memory.begin_slice(training.optimizer, training.parameters)
        training.optimizer.step()
        training.memory.end_slice(training.optimizer, training.parameters)
        training.begin_step()
    assert training.memory.moved_bytes == 0


def test_what_is_used_next_is_brought_back_if_there_is_room(kept: Kept) -> None:
    training = Training(kept)
    training.model(torch.ones(2, SIZE))
    training.begin_step()
    kept.leave()
    _ = training.parameters[1] + 1
    assert "returning" in training.states() or "clean" in training.states()
    assert training.states().count("away") < len(training.states()) - 1
    kept.leave()
    kept.evictor.budget_bytes = kept.evictor.live.now() + 2
    training.begin_step()
    away = training.states().count("away")
    _ = training.parameters[1] + 1
    assert training.states().count("away") == away - 1


@pytest.mark.usefixtures("copied_in_python")
@pytest.mark.parametrize("what", ["op", "numpy", "storage"])
def test_a_read_that_fails_leaves_it_away_and_is_told(kept: Kept, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(kept)
    expected = training.contents()
    reads: dict[str, Callable[[Tensor], Any]] = {
        "op": lambda x: x + 1, "numpy": lambda x: x.detach().numpy(), "storage": lambda x: x.untyped_storage().tolist(),
    }  # fmt: skip
    kept.leave()

    def fail(*_: Any) -> None:
        raise OSError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(Mover, "read", fail)
        with pytest.raises(TierError):
            reads[what](training.parameters[0])
    value = kept.value(training.parameters[0])
    assert (value.state, value.is_busy, value.users, value.can_leave) == ("away", False, 0, False)
    assert all_same(training.contents(), expected)


@pytest.mark.usefixtures("copied_in_python")
def test_a_read_that_fails_once_is_repeated(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(kept)
    expected = training.contents()
    kept.leave()
    original, failures = Mover.read, [OSError("no such luck")]

    def read(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        original(*arguments)

    monkeypatch.setattr(Mover, "read", read)
    assert all_same(training.contents(), expected)
    assert not failures


@pytest.mark.usefixtures("copied_in_python")
def test_a_copy_that_fails_leaves_it_there_until_the_next_step(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(kept)
    expected = training.contents()

    def fail(*_: Any) -> None:
        raise OSError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(Mover, "write", fail)
        kept.leave()
    kept.leave()
    assert set(training.states()) == {"here"}
    training.begin_step()
    kept.leave()
    assert set(training.states()) == {"away"}
    assert all_same(training.contents(), expected)


def test_a_gradient_that_is_released_while_it_is_copied_is_forgotten(kept: Kept) -> None:
    training = Training(kept)
    kept.leave()
    training.backward()
    training.begin_step()
    gradient = training.parameters[0].grad
    assert gradient is not None
    value = kept.value(gradient)
    assert value.place is not None
    kept.evictor.store.finish_out(value, kept.evictor.stats)
    if value.state == "here":
        kept.evictor.store.start_out(value, value.place, kept.evictor.stats)
    del gradient
    training.optimizer.zero_grad()
    kept.leave()
    assert value.is_gone
    training.begin_step()
    assert value not in list(training.memory.values)


class HoldingTicket:
    """A copy that has ended, and holds the storage until somebody waits for it, as those of streams do."""

    error, copy_ms, moved_bytes = None, 1.0, 2**40

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage

    def is_done(self) -> bool:
        return True

    def wait(self) -> float:
        self.storage = None
        return 0.0


def test_a_copy_that_has_ended_does_not_hold_what_is_released_beyond_the_step(kept: Kept) -> None:
    training = Training(kept)
    training.backward()
    training.begin_step()
    gradient = training.parameters[0].grad
    assert gradient is not None
    value = kept.value(gradient)
    value.begins_to_leave()
    value.ticket = HoldingTicket(gradient.untyped_storage())
    del gradient
    training.optimizer.zero_grad()
    assert not value.is_gone
    training.begin_step()
    assert value.is_gone
    assert value not in list(training.memory.values)


@pytest.mark.usefixtures("copied_in_python")
def test_the_room_of_a_copy_that_failed_goes_to_what_is_made_anew(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(kept)
    training.backward()
    training.begin_step()

    def fail(*_: Any) -> None:
        raise OSError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(Mover, "write", fail)
        kept.leave()
    taken: list[int] = []
    monkeypatch.setattr(training.memory._tier, "take", taken.append)
    training.backward()  # of the same step
    assert not taken


def test_one_value_at_a_time_is_there_while_all_are_saved(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(kept)
    expected = training.contents()
    kept.leave()
    monkeypatch.setattr("pooch.executor.persistent._COPIES_AHEAD", 0)
    most = 0
    original = training.memory.bring_back

    def bring_back(values: Any) -> None:
        nonlocal most
        kept.leave()
        original(values)
        most = max(most, len(training.states()) - training.states().count("away"))

    monkeypatch.setattr(training.memory.reads, "_bring_back", bring_back)
    file = io.BytesIO()
    torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, file)
    assert most == 1
    file.seek(0)
    loaded = torch.load(file)
    assert all_same(list(loaded["model"].values()), expected[: len(training.parameters)])


class AsAList:
    """What reads its tensor by itself as it is saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> dict[str, Any]:
        return {"numbers": self.tensor.tolist(), "array": self.tensor.detach().numpy().tobytes()}


def test_what_reads_tensors_by_itself_while_it_is_saved_finds_them(kept: Kept) -> None:
    training = Training(kept)
    weight = training.parameters[0]
    expected = AsAList(weight.detach().clone()).__getstate__()
    kept.leave()
    file = io.BytesIO()
    torch.save(AsAList(weight), file)
    file.seek(0)
    assert vars(torch.load(file, weights_only=False)) == expected


def test_at_the_end_all_is_back_and_nothing_is_watched() -> None:
    before = [vars(each).copy() for each in (torch.Tensor, torch.UntypedStorage, torch._C.PyTorchFileWriter)]
    with holding() as evictor:
        other = Kept(evictor)
        training = Training(other)
        expected = training.contents()
        other.leave()
        values = list(training.memory.values)
        training.memory.close()
        assert all(value.is_here for value in values)
        assert evictor.persistent is None
        assert not any(parameter._post_accumulate_grad_hooks for parameter in training.parameters)
        del values
        assert not training.memory._homes
        other.leave()
        assert all_same(training.contents(), expected)
    gc.collect()
    assert not raw_looks._EVERYWHERE
    assert not raw_storages._KEEPERS
    assert [vars(each) for each in (torch.Tensor, torch.UntypedStorage, torch._C.PyTorchFileWriter)] == before
