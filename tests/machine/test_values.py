"""Where a value is, and its moves, one at a time."""

from __future__ import annotations

import pytest

from pooch.errors import PlanMismatch, TierError
from pooch.machine import Call, CopySpeed, Level, Recipes, Store, Value, Witness
from pooch.simulator.modelled import ModelledCounters as Counters
from tests.machine.modelled import Chance, Faults, ModelledMemory, ModelledPlace, ModelledStorage, ModelledTier


class Device:
    """A modelled device with one value on it."""

    def __init__(self, faults: Faults | None = None) -> None:
        chance = Chance(1, faults or Faults())
        self.memory, self.tier, self.counters = ModelledMemory(chance), ModelledTier(chance), Counters()
        self.speed = CopySpeed("a modelled tier")
        self.store = Store(self.memory, self.tier, self.speed)
        self.value = Value(1, None, self.storage(7))

    def storage(self, contents: int, size_bytes: int = 64) -> ModelledStorage:
        storage = self.memory.new(size_bytes)
        storage.contents = contents
        return storage

    def place(self) -> ModelledPlace:
        place = self.tier.take(64)
        assert place is not None
        return place


def test_a_value_goes_out_and_comes_back() -> None:
    device = Device()
    value, store = device.value, device.store
    assert value.state == "here"
    store.start_out(value, device.place(), device.counters)
    assert value.state == "leaving"
    store.finish_out(value, device.counters)
    assert value.state == "clean"
    assert store.drop(value) == 64
    assert value.state == "away"
    assert device.memory.live_bytes == 0
    store.start_in(value, device.counters)
    assert value.state == "returning"
    store.finish_in(value, device.counters)
    assert value.state == "clean"
    assert value.storage.contents == 7  # type: ignore[union-attr]
    assert (device.counters.swapped_out_bytes, device.counters.swapped_in_bytes) == (64, 64)
    store.forget_copy(value)
    assert value.state == "here"
    assert device.tier.in_use == 0


def test_a_value_whose_copy_fails_stays_and_the_tier_says_why() -> None:
    device = Device(Faults(copy_fails=1.0))
    device.store.start_out(device.value, device.place(), device.counters)
    device.store.finish_out(device.value, device.counters)
    assert device.value.state == "here"
    assert device.counters.kept_after_errors == 1
    assert device.tier.fault is not None
    assert device.tier.in_use == 0


def test_a_value_that_cannot_be_read_back_is_away_still() -> None:
    device = Device()
    value, store = device.value, device.store
    store.start_out(value, device.place(), device.counters)
    store.finish_out(value, device.counters)
    store.drop(value)
    store.start_in(value, device.counters)
    assert value.ticket is not None
    value.ticket.fails = True  # type: ignore[attr-defined]
    with pytest.raises(TierError, match="a swapped activation cannot be read back"):
        store.finish_in(value, device.counters)
    assert value.state == "away"


def test_what_is_dropped_without_a_copy_is_unmade() -> None:
    device = Device()
    device.store.drop(device.value)
    assert device.value.state == "unmade"


def test_moves_are_told_with_the_storage() -> None:
    """Not with its address: whoever asks for that keeps the bytes of what outlives a step in place."""
    device, told = Device(), list[tuple[str, object]]()
    device.store.on_move = lambda kind, value, storage: told.append((kind, storage))
    storage = device.value.storage
    device.store.drop(device.value)
    assert told == [("left", storage)]


def test_a_witness_puts_back_what_was_there() -> None:
    device = Device()
    witness = Witness("recipe", Level.COPIED, lambda storage, _: storage.contents)
    witness.take(device.value.storage)
    witness.start_copy(device.place(), device.value.storage)
    witness.finish_copy()
    other = device.storage(8)
    assert not witness.agrees(other)
    assert witness.restore(other)
    assert other.contents == 7
    device.value.witness = witness
    device.value.forget_witness()
    assert device.tier.in_use == 0


class Kitchen:
    """Runs calls by adding one to what they read."""

    def __init__(self, device: Device, banned: int | None = None) -> None:
        self.device, self.banned, self.ran = device, banned, list[int]()
        self.returns: list[Value] = []

    def ensure(self, value: Value) -> ModelledStorage:
        storage = value.storage
        assert isinstance(storage, ModelledStorage)
        return storage

    def replay(self, call: Call, resolve: object) -> list[ModelledStorage]:
        read = [resolve(number, False).contents for number in call.reads]  # type: ignore[operator]
        self.ran.append(call.writes[0])
        return [self.device.storage(sum(read) + 1)]

    def copied(self, storage: ModelledStorage) -> ModelledStorage:
        return self.device.storage(storage.contents)

    def check(self, value: Value, storage: ModelledStorage) -> None:
        assert storage.contents == 1 + value.number

    def returned(self, value: Value) -> None:
        self.returns.append(value)

    def is_banned(self, call: Call, number: int) -> bool:
        return number == self.banned


def chain(kitchen: Kitchen, saved: dict[int, Value], length: int = 4) -> Recipes:
    """Each value is made from the one before."""
    recipes = Recipes(saved, kitchen, kitchen.device.speed)
    for number in range(length):
        reads = (number - 1,) if number else ()
        call = Call(None, reads, (number,), 2.0)
        recipes.add(Call(call, reads, (number,), 2.0))
    return recipes


def test_a_chain_runs_from_what_is_at_hand_and_costs_as_much() -> None:
    device = Device()
    here, gone = Value(1, None, device.storage(2)), Value(2)
    gone.saved_at = 1
    kitchen = Kitchen(device)
    recipes = chain(kitchen, {1: here, 2: gone})
    assert recipes.replay_ms(3) == 4.0
    assert recipes.make_again(3).contents == 4
    assert kitchen.ran == [2, 3]
    assert gone.state == "here", "what is made on the way and saved stays"
    assert not gone.is_busy
    assert kitchen.returns == [gone]


def test_what_a_plan_moves_does_not_stay_when_it_is_made_on_the_way() -> None:
    """The plan counts on its bytes being free, and pressure knows nothing of it."""
    device = Device()
    here, planned = Value(1, None, device.storage(2)), Value(2)
    kitchen = Kitchen(device)
    recipes = chain(kitchen, {1: here, 2: planned})
    assert recipes.make_again(3).contents == 4
    assert planned.state == "unmade"


def test_what_is_held_for_replays_is_at_hand_but_nothing_leaves_because_of_it() -> None:
    """A plan lets go of it once its own replays have run."""
    device = Device()
    kitchen = Kitchen(device)
    recipes = chain(kitchen, {})
    recipes.sources[2] = device.storage(3)
    assert recipes.replay_ms(3) == 8.0
    assert recipes.make_again(3).contents == 4
    assert kitchen.ran == [3]


class WritingKitchen(Kitchen):
    """Runs calls by adding one to what they read, in its place."""

    def replay(self, call: Call, resolve: object) -> list[ModelledStorage]:
        (storage,) = [resolve(number, True) for number in call.reads]  # type: ignore[operator]
        storage.contents += 1
        return [storage]


@pytest.mark.parametrize("holder", ["a plan", "autograd"])
def test_an_op_in_place_writes_into_a_copy_of_what_others_read(holder: str) -> None:
    device = Device()
    there = device.storage(3)
    saved = {} if holder == "a plan" else {2: Value(2, None, there)}
    kitchen = WritingKitchen(device)
    recipes = chain(kitchen, saved)
    if holder == "a plan":
        recipes.sources[2] = there
    assert recipes.make_again(3).contents == 4
    assert there.contents == 3


@pytest.mark.parametrize("uncertain", [2, 3])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_what_may_go_before_a_value_is_read_is_not_counted_on(uncertain: int, is_recorded: bool) -> None:
    """A plan records those calls alone that it replays. So a value must not be dropped that another one makes."""
    device = Device()
    kitchen = Kitchen(device)
    saved = {2: Value(2, None, device.storage(3)), 3: Value(3, None, device.storage(4))}
    uncertain_ones, staying = set[int](), set[int]()
    recipes = chain(kitchen, saved) if is_recorded else Recipes(saved, kitchen, device.speed)  # type: ignore[arg-type]
    recipes.add(Call(None, (2,), (3,), 2.0))
    recipes.may_go, recipes.stays = uncertain_ones.__contains__, staying.__contains__
    assert recipes.replay_ms(3) == 2.0
    uncertain_ones.add(uncertain)
    recipes.moved(saved[2])
    assert recipes.replay_ms(3) == (8.0 if is_recorded else float("inf"))
    staying.add(2)
    recipes.moved(saved[2])
    assert recipes.replay_ms(3) == 2.0


def test_what_was_banned_or_has_changed_cannot_be_made_again() -> None:
    device = Device()
    banning, kitchen = Kitchen(device, banned=1), Kitchen(device)
    assert chain(banning, {}).replay_ms(3) == float("inf")
    recipes = chain(kitchen, {})
    changed = recipes.of(2)
    assert changed is not None
    recipes.give_up([changed])
    assert recipes.replay_ms(3) == float("inf")
    assert recipes.replay_ms(1) == 4.0
    with pytest.raises(PlanMismatch, match="needs value 3 again"):
        recipes.make_again(3)


def test_a_chain_that_is_too_long_is_not_thought_of() -> None:
    kitchen = Kitchen(Device())
    recipes = chain(kitchen, {}, length=300)
    assert recipes.replay_ms(199) == 400.0
    assert recipes.replay_ms(200) == float("inf")
