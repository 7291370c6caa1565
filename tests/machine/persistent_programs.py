"""Random training steps on the modelled device in which what outlives steps leaves too: parameters, gradients, states.

The reference keeps everything: each value's token is known from the op that wrote it last, and every op has to find it.
What the executor does with torch's storages is done here with modelled homes, as briefly as it can be.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pooch.errors import TierError
from pooch.ir import Link
from pooch.machine import CopySpeed, Lane, Pressure, Value
from pooch.machine.persistent import Kind, PersistentPlace, PersistentValue, PersistentValues
from pooch.machine.recipes import NEVER_MS
from pooch.simulator.modelled import ModelledCounters as Counters

from .modelled import (
    GARBAGE,
    Chance,
    Faults,
    ModelledMemory,
    ModelledPlace,
    ModelledStorage,
    ModelledTicket,
    ModelledTier,
    OutOfMemory,
)  # fmt: skip
from .programs import Broken

# What may go wrong, one kind at a time and all together.
KINDS = (
    Faults(),
    Faults(copy_fails=0.15),
    Faults(no_room=0.3),
    Faults(interrupted=0.005),
    Faults(out_of_memory=0.01),
    Faults(copy_fails=0.1, no_room=0.1, interrupted=0.003, out_of_memory=0.005),
)
SIZES = (64, 128, 256, 512)
_LARGE = 2**40


class Log:
    """The uses of all homes, as the native part counts them."""

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._taken = 0

    def used(self, home: ModelledHome) -> None:
        """Note a use."""
        if not self._keys or self._keys[-1] != home.key:
            self._keys.append(home.key)
        home.last_use = self._taken + len(self._keys)

    def count(self) -> int:
        """How many uses there were since the last `take`."""
        return len(self._keys)

    def take(self) -> list[int]:
        """The keys of the homes that were used since the last `take`."""
        self._taken += len(self._keys)
        keys, self._keys = self._keys, []
        return keys


class ModelledHome:
    """A storage of the program's, whose bytes may be elsewhere. See `pooch.machine.persistent.Home`."""

    _keys = 0

    def __init__(self, world: World, storage: ModelledStorage) -> None:
        ModelledHome._keys += 1
        self.key = ModelledHome._keys
        self._world = world
        self._bytes: ModelledStorage | None = storage
        self._seen = weakref.ref(storage)  # once the program has released it, a copy may still hold it
        self.is_here, self.is_released = True, False
        self.tensors, self.uses, self.writes, self.last_use = 1, 0, 0, 0
        self.truth = storage.contents
        self.is_reverting = False

    @property
    def storage(self) -> ModelledStorage | None:
        """Its bytes, or None once the program has released it."""
        return self._seen() if self.is_here else None

    @property
    def is_used(self) -> bool:
        """Whether an op works on it."""
        return self.uses > 0

    @property
    def is_gone(self) -> bool:
        """Whether nothing holds it any more."""
        return self.is_released and self._seen() is None

    def take(self, writes: int | None = None) -> ModelledStorage | None:
        """Take the bytes out, which have to be in the tier."""
        storage = self._seen()
        if not self.is_here or self.is_used or storage is None:
            return None
        if not self.is_reverting and self._world.chance.happens(0.02):
            self.writes += 2  # another thread writes after the look at what is to leave
            self.write(self._world.token())
            self._world.has_raced = True
        if writes is not None and writes != self.writes:
            return None
        if not self.is_reverting and self._world.in_tier(self) != storage.contents:
            raise Broken("bytes are dropped that the tier does not have")
        self.is_here, self._bytes = False, None
        return storage

    def close(self) -> None:
        """Nothing works on it after an op has returned."""

    def give(self, storage: ModelledStorage) -> None:
        """Put bytes back."""
        if not self.is_released and not self.is_here:
            self._bytes, self._seen, self.is_here = storage, weakref.ref(storage), True

    def release(self) -> None:
        """The program lets go of it."""
        self._bytes, self.is_released = None, True

    def write(self, token: int) -> None:
        """Put other contents into the bytes."""
        assert self._bytes is not None
        self._bytes.contents = self.truth = token


class ModelledRoom(ModelledPlace):
    """Room in the tier, which notices copies of what it has already."""

    is_exact = False  # whether a copy of what is there counts as a mistake
    may_repeat = False  # since somebody had the address of what it is for, and may have written to it

    def copy_out(self, storage: ModelledStorage) -> ModelledTicket:
        """Begin to copy a storage here."""
        if self.is_exact and not self.may_repeat and self.contents == storage.contents != GARBAGE:
            raise Broken("what the tier has is copied to it again")
        if any(not ticket._is_over for ticket in self.under_way):
            raise Broken("two copies use one room at once")
        self.under_way.clear()
        return super().copy_out(storage)


class RoomyTier(ModelledTier):
    """The tier, whose rooms are `ModelledRoom`s."""

    def take(self, size_bytes: int) -> ModelledRoom | None:
        """Room for a value, or None."""
        if self.chance.happens(self.chance.faults.no_room):
            return None
        self.in_use += 1
        room = ModelledRoom(self, size_bytes)
        room.is_exact = not (self.chance.faults.interrupted or self.chance.faults.out_of_memory)
        return room


class NoRecipes:
    """The owner of what cannot be made again."""

    def __init__(self, tier: ModelledTier | None = None) -> None:
        self._tier = tier

    @property
    def thread(self) -> int:
        return threading.get_ident()

    def take_place(self, size_bytes: int) -> Any:
        return None if self._tier is None else self._tier.take(size_bytes)

    def replay_ms(self, number: int) -> float:
        return NEVER_MS

    def make_again(self, number: int) -> Any:
        raise Broken("nothing can make this again")

    def remember(self, value: Value) -> None:
        raise Broken("something is dropped that nothing can make again")

    def moved(self, value: Value) -> Iterable[Value]:
        return ()

    def gained(self, gained_ms: float) -> None:
        raise Broken("nothing is gained by dropping what nothing can make again")

    def released(self, number: int) -> bool:
        return False


@dataclass
class Saved:
    """What autograd has saved, and what it has to give."""

    value: Value
    token: int


@dataclass
class World:
    """A modelled device under pressure, which trains one model of random values.

    Attributes:
        seed: All that happens follows from it.
        faults: How often things go wrong.
        sizes_bytes: Of the parameters. None: by chance.
        has_temporaries: Whether ops take memory for a moment.
        reads_ahead: Whether what is used next is brought back beforehand.
        seen: How often each state was met at a use, and what else happened.
    """

    seed: int
    faults: Faults
    sizes_bytes: Sequence[int] | None = None
    has_temporaries: bool = True
    reads_ahead: bool = True
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = Chance(self.seed, self.faults)
        self.random = self.chance.random
        self.memory, self.tier, self.counters = ModelledMemory(self.chance), RoomyTier(self.chance), Counters()
        speed = CopySpeed("a modelled tier")
        self.pressure = Pressure(_LARGE, self.memory, self.memory, self.tier, speed, self.counters)
        self.log = Log()
        self.values = self.pressure.persistent = PersistentValues(self.log.count)
        self.owner, self.saver = NoRecipes(), NoRecipes(self.tier)
        self.homes: dict[int, ModelledHome] = {}  # by the keys
        self.free: defaultdict[int, list[ModelledRoom]] = defaultdict(list)
        self.saved: list[Saved] = []
        self._tokens = 0
        self._staying: dict[int, ModelledStorage] = {}  # of the homes whose address somebody has, by the keys
        self._lent: list[ModelledHome] = []
        self._pinned: set[int] = set()  # the keys of those that stay for good
        self._most_over_bytes = 0
        self.has_raced = False  # whether another thread has written to what was about to leave
        self._has_ended_unseen = False  # whether bytes may have ended while room was made: with the end of a copy
        self.chance.is_calm = True
        sizes_bytes = self.sizes_bytes or [self.random.choice(SIZES) for _ in range(self.random.randrange(3, 9))]
        self.parameters = [self._made("parameter", number, size) for number, size in enumerate(sizes_bytes)]
        self.buffers = [self._made("buffer", 300 + number, self.random.choice(SIZES)) for number in range(2)]
        self.gradients: list[ModelledHome | None] = [None for _ in sizes_bytes]
        self.states: list[ModelledHome | None] = [None for _ in sizes_bytes]
        self.chance.is_calm = False

    def token(self) -> int:
        """Contents that there were never before."""
        self._tokens += 1
        return self._tokens

    # Homes, as `pooch.executor.persistent` makes them -----------------------------------------------------------------

    def _made(self, kind: Kind, number: int, size_bytes: int) -> ModelledHome:
        """The program makes a tensor, which may leave from then on."""
        storage = self.memory.new(size_bytes)
        storage.contents = self.token()
        home = ModelledHome(self, storage)
        del storage
        value = PersistentValue(number, home, kind, self.owner, size_bytes)
        self.homes[home.key] = home
        before = self.values.add(home.key, value)
        if before is not None and before.is_gone:
            self._give_back(before)
        free = self.free[size_bytes]
        place = free.pop() if free else self.tier.take(size_bytes)
        value.place = None if place is None else PersistentPlace(value, place, self.values.moved)
        return home

    def _give_back(self, value: PersistentValue) -> None:
        place, value.place, value.spare = value.place or value.spare, None, None
        if isinstance(place, PersistentPlace):
            room = place.place
            assert isinstance(room, ModelledRoom)
            room.contents, room.may_repeat = GARBAGE, False
            self.free[value.size_bytes].append(room)

    def value_of(self, home: ModelledHome) -> PersistentValue:
        """The value of a home."""
        value = self.values.of(home.key)
        assert value is not None
        return value

    def in_tier(self, home: ModelledHome) -> int:
        """The contents that the tier has of a home."""
        place = self.value_of(home).place
        if not isinstance(place, PersistentPlace):
            return GARBAGE
        assert isinstance(place.place, ModelledPlace)
        return place.place.contents

    def _may_repeat(self, value: PersistentValue) -> None:
        place = value.place or value.spare
        if isinstance(place, PersistentPlace) and isinstance(place.place, ModelledRoom):
            place.place.may_repeat = True

    def bring_back(self, values: Iterable[PersistentValue]) -> None:
        """As the executor does before an op."""
        with self.pressure.lock:
            for value in values:
                was_busy, value.is_busy = value.is_busy, True
                try:
                    if value.storage is None:
                        self.pressure.store.start_in(value, self.counters)
                    self.pressure.store.finish_in(value, self.counters)
                finally:
                    value.is_busy = was_busy
            for value in islice(self.values.used_next(16), 4 if self.reads_ahead else 0):
                if value.is_gone:
                    raise Broken("what the program has released is brought back")
                if self.memory.live_bytes + 2 * value.size_bytes > self.pressure.budget_bytes:
                    return
                self.pressure.store.start_in(value, self.counters)
                self.seen["read ahead"] += 1

    def write_ahead(self, homes: Iterable[ModelledHome]) -> None:
        """As the executor does after a slice of an optimizer's step, and where a gradient was accumulated."""
        with self.pressure.lock:
            for value in map(self.value_of, homes):
                if not value.leaves or value.place is None:
                    continue
                self.pressure.store.finish_out(value, self.counters)
                if value.state == "here" and value.place is not None:
                    self.pressure.store.start_out(value, value.place, self.counters)
                    value.leaves = False
                    self.seen["written ahead"] += 1

    # The program ------------------------------------------------------------------------------------------------------

    @contextmanager
    def use(self, reads: Sequence[ModelledHome], writes: Sequence[ModelledHome] = ()) -> Iterator[None]:
        """An op on homes, as the native part has it run."""
        homes = [*reads, *writes]
        for home in homes:
            home.uses += 1
            home.writes += home in writes
            self.log.used(home)
            self.seen[f"used {self.value_of(home).state}"] += 1
        try:
            if not all(home.is_here for home in homes):
                self.bring_back([self.value_of(home) for home in homes if not home.is_here])
            self._look_at_contents(homes)
            takes = self.has_temporaries and self.random.random() < 0.5
            temporary = self.memory.new(self.random.choice(SIZES)) if takes else None
            self._look_at_contents(homes)
            for home in writes:
                home.write(self.token())
            del temporary
            yield
        finally:
            for home in homes:
                home.writes += home in writes
                home.uses -= 1

    def _look_at_contents(self, homes: Iterable[ModelledHome]) -> None:
        for home in homes:
            storage = home.storage
            if storage is None:
                raise Broken("an op finds nothing where its bytes should be")
            if storage.contents != home.truth:
                kind = self.value_of(home).kind
                raise Broken(f"an op finds other contents in a {kind}: {storage.contents} and not {home.truth}")

    def forward(self) -> None:
        """Read the parameters and save activations."""
        order = list(range(len(self.parameters)))
        if self.random.random() < 0.15:
            self.random.shuffle(order)
        for number in order:
            if self.random.random() < 0.05:
                continue
            updated = [self.random.choice(self.buffers)] if self.random.random() < 0.3 else []
            with self.use([self.parameters[number]], updated):
                if self.random.random() < 0.7:
                    self._save()
            self._happen()

    def _save(self) -> None:
        storage = self.memory.new(self.random.choice(SIZES))
        storage.contents = token = self.token()
        with self.pressure.lock:
            value = Value(1000 + len(self.saved), self.saver, storage)
            value.handles = 1
            self.pressure.save(value)
        self.saved.append(Saved(value, token))

    def backward(self) -> None:
        """Read what was saved, and make or add to gradients."""
        for number in reversed(range(len(self.parameters))):
            if self.saved:
                self._read_saved(self.saved.pop())
            gradient = self.gradients[number]
            with self.use([self.parameters[number]]):
                if gradient is None:
                    size_bytes = self.value_of(self.parameters[number]).size_bytes
                    gradient = self.gradients[number] = self._made("gradient", 100 + number, size_bytes)
            with self.use([], [gradient]):
                pass
            self.write_ahead([gradient])
            self._happen()
        while self.saved:
            self._read_saved(self.saved.pop())

    def _read_saved(self, saved: Saved) -> None:
        try:
            with self.pressure.lock:
                self.pressure.reading(saved.value)
                storage = self.pressure.ensure(saved.value)
                if storage.contents != saved.token:
                    raise Broken("autograd reads other contents than it has saved")
                saved.value.is_busy = True
                try:
                    self.pressure.read_ahead(saved.value)
                finally:
                    saved.value.is_busy = False
                del storage
        finally:
            self.pressure.lock.end(saved.value)

    def optimize(self) -> None:
        """Step the parameters in slices, one of which may be undone."""
        numbers = [number for number, gradient in enumerate(self.gradients) if gradient is not None]
        while numbers:
            count = self.random.randrange(1, 3)
            part, numbers = numbers[:count], numbers[count:]
            for number in part:
                if self.states[number] is None:
                    size_bytes = self.value_of(self.parameters[number]).size_bytes
                    self.states[number] = self._made("state", 200 + number, size_bytes)
            changed = [self.parameters[number] for number in part]
            changed += [state for state in (self.states[number] for number in part) if state is not None]
            self._slice(part, changed)
            self._happen()

    def _slice(self, part: Sequence[int], changed: Sequence[ModelledHome]) -> None:
        """A slice of the step, as `pooch.executor.slices` makes it undoable."""
        values, store = [self.value_of(home) for home in changed], self.pressure.store
        fails = self.random.random() < 0.15
        try:
            if fails:
                with self.pressure.lock:
                    for value in values:
                        value.is_busy = True
                        if value.state == "away":
                            store.start_in(value, self.counters)
                    self.bring_back(values)
                    for value in values:
                        store.finish_out(value, self.counters)
                        if value.is_pinned:
                            value.is_copied = False
                        if not value.is_copied and value.place is not None:
                            store.start_out(value, value.place, self.counters)
                    for value in values:
                        store.finish_out(value, self.counters)
            can_undo = fails and all(value.is_copied for value in values)
            before = [home.truth for home in changed]
            with self.use([gradient for gradient in map(self.gradients.__getitem__, part) if gradient], changed):
                pass
        finally:
            for value in values:
                value.is_busy = False
        if can_undo:
            with self.pressure.lock:
                for home, value, truth in zip(changed, values, before, strict=True):
                    home.truth, home.is_reverting = truth, True
                    value.revert()
                    home.is_reverting = False
                    self.seen["undone"] += 1
        self.write_ahead(changed)

    def zero_gradients(self) -> None:
        """Let go of the gradients, or write zeros over them."""
        how = self.random.random()
        for number, gradient in enumerate(self.gradients):
            if gradient is None or how < 0.2:
                continue  # they accumulate
            if how < 0.4:
                with self.use([], [gradient]):
                    pass
                continue
            self._has_ended_unseen |= self.value_of(gradient).ticket is not None
            self._pinned.discard(gradient.key)
            while gradient in self._lent:
                self._end_lending(gradient)
            self._staying.pop(gradient.key, None)
            self.gradients[number] = None
            gradient.release()
            del gradient

    # What happens between ops -----------------------------------------------------------------------------------------

    def _alive(self) -> list[ModelledHome]:
        found = [*self.parameters, *self.buffers, *self.gradients, *self.states]
        return [home for home in found if home is not None]

    def _happen(self) -> None:
        """What a program may do at any time."""
        self._look_at_values()
        chance = self.random.random()
        if chance < 0.1:
            self.pressure.write_ahead()
        elif chance < 0.15:
            self._hand_out(self.random.choice(self._alive()))
        elif chance < 0.3 and self._lent:
            self._end_lending(self.random.choice(self._lent))
        elif chance < 0.35:
            self.pressure.relieve()
        elif chance < 0.4 and self._staying:
            self.homes[self.random.choice(list(self._staying))].write(self.token())  # nothing tells
            self.seen["written unseen"] += 1
        elif chance < 0.45:
            self._access(self.random.choice(self._alive()))
        elif chance < 0.48:
            self._look_at_the_order()
        elif chance < 0.55:
            held = [self.memory.new(self.random.choice(SIZES)) for _ in range(self.random.randrange(4))]
            del held

    def _hand_out(self, home: ModelledHome) -> None:
        """Somebody obtains an address, for good or for as long as there is an array."""
        value = self.value_of(home)
        self._may_repeat(value)
        if self.random.random() < 0.05:
            value.is_pinned = True
            self._pinned.add(home.key)
        else:
            home.tensors += 1
            value.lend()
            self._lent.append(home)
        self.bring_back([value])
        storage = home.storage
        assert storage is not None
        self._staying[home.key] = storage
        self.seen["handed out"] += 1

    def _access(self, home: ModelledHome) -> None:
        """Something reads or writes that is no op, such as `tolist` or `apply_`."""
        value = self.value_of(home)
        value.users += 1
        self._may_repeat(value)
        try:
            if self.random.random() < 0.5:
                value.lend()
                self.bring_back([value])
                home.write(self.token())
            else:  # it reads, such as `tolist`
                self.bring_back([value])
                self._look_at_contents([home])
                self.memory.new(self.random.choice(SIZES))
                self._look_at_contents([home])
        finally:
            value.users -= 1

    def _end_lending(self, home: ModelledHome) -> None:
        self._lent.remove(home)
        home.tensors -= 1
        if home not in self._lent and home.key not in self._pinned:
            self._staying.pop(home.key, None)

    # What must hold ---------------------------------------------------------------------------------------------------

    def _look_at_values(self) -> None:
        for key, storage in self._staying.items():
            if self.homes[key].storage is not storage:
                raise Broken("bytes have left although somebody has their address")
        for home in self._alive():
            value = self.value_of(home)
            if value.is_busy:
                raise Broken("a value stays, since it seems to be at work")
            if value.is_pinned and home not in self._lent and home.key not in self._pinned:
                raise Broken("a value stays, since somebody seems to have its address")
            if value.state == "unmade":
                raise Broken("a value is lost")

    def _look_at_bytes(self) -> None:
        """After an allocation: the budget is passed only if nothing could leave."""
        over_bytes = self.memory.live_bytes - (self.memory.budget_bytes or 0)
        self._most_over_bytes = max(self._most_over_bytes, over_bytes)
        for key, storage in self._staying.items():
            if self.homes[key].storage is not storage:
                raise Broken("bytes have left although somebody has their address")
        if over_bytes > self.pressure.missing_bytes:
            raise Broken(f"{over_bytes} bytes over the budget, and {self.pressure.missing_bytes} are told")
        has_raced, self.has_raced = self.has_raced, False
        if over_bytes <= 0 or has_raced or not self.faults.tier_is_sound:
            return
        self.seen["over"] += 1
        for value in self.values:
            if value.can_leave and (value.is_copied or value.place is not None):
                raise Broken(f"{over_bytes} bytes over the budget, and a {value.kind} ({value.state}) stayed")

    def _look_at_the_order(self) -> None:
        """What has come to be at work since the order was made is passed over."""
        order = self.pressure._next_to_leave()
        if next(order, None) is None:
            return
        value = self.value_of(self.random.choice(self._alive()))
        value.is_busy = True
        try:
            if value in list(order):
                raise Broken("a value leaves while it is at work")
        finally:
            value.is_busy = False

    def run_step(self) -> None:
        """Run one step.

        Raises:
            Broken: Something was wrong.
        """
        self._begin()
        try:
            for _ in range(1 + (self.random.random() < 0.3)):
                self.forward()
                self.backward()
            self.optimize()
            self.zero_gradients()
        except (KeyboardInterrupt, OutOfMemory, TierError) as error:
            self.seen[type(error).__name__] += 1
            error.__traceback__ = None
        self._end()

    def _begin(self) -> None:
        self.counters.__init__()  # type: ignore[misc]
        self.chance.is_calm = True
        self.pressure.begin(self.counters)
        self._most_over_bytes, self._has_ended_unseen = 0, any(value.ticket for value in self.values)
        self.tier.bytes_per_ms = rate = self.random.choice((10.0, 1e3, 1e5))
        self.pressure.speed.out, self.pressure.speed.back = Lane(), Lane()
        self.pressure.speed.start_from(Link("a modelled tier", 0.0, 0.0, rate, rate))
        self.pressure.set_budget(self.random.choice((1024, 2048, 3072, 8192)))
        self.memory.after = self._look_at_bytes
        self._forget_gone()
        self.chance.is_calm = False

    def _forget_gone(self) -> None:
        """As the executor does where a step begins."""
        with self.pressure.lock:
            for value in self.values:
                if value.ticket is not None and value.ticket.is_done():
                    self.pressure.store.finish_out(value, self.counters)
            for value in self.values.begin_step(self.log.take()):
                self.pressure.store.settle(value)
                self._give_back(value)
                del self.homes[value.key]

    def _end(self) -> None:
        self.chance.is_calm = True
        self.pressure.lock.give_back()
        while self.saved:
            self.pressure.lock.end(self.saved.pop().value)
        is_exact = not (self.faults.interrupted or self.faults.out_of_memory or self._has_ended_unseen)
        if is_exact and self.pressure.missing_bytes > max(0, self._most_over_bytes):
            told = self.pressure.missing_bytes
            raise Broken(f"{told} bytes over the budget are told, and it was {self._most_over_bytes}")
        self.pressure.set_budget(_LARGE)
        self._look_at_values()
        if self.random.random() < 0.1:
            self._look_at_everything()
        self.chance.is_calm = False
        self.seen["steps"] += 1

    def _end_copies(self) -> None:
        for value in self.values:
            self.pressure.store.finish_out(value, self.counters)

    def _look_at_everything(self) -> None:
        """All of it is right, and there is one room and one storage for each."""
        alive = self._alive()
        for home in alive:
            with self.use([home]):
                pass
        self._end_copies()
        self._forget_gone()
        if len(self.homes) != len(alive):
            raise Broken(f"{len(self.homes)} homes are known, and the program has {len(alive)}")
        rooms = sum((value.place or value.spare) is not None for value in self.values) + sum(
            map(len, self.free.values())
        )
        if rooms != self.tier.in_use and not self.faults.interrupted:
            raise Broken(f"{self.tier.in_use} rooms of the tier are taken, and {rooms} of them are known")
        live_bytes = sum(self.value_of(home).size_bytes for home in alive)
        if self.memory.live_bytes != live_bytes and not self.faults.interrupted:
            raise Broken(f"{self.memory.live_bytes} bytes are live, and the program holds {live_bytes}")


def run(seed: int, steps: int, faults: Faults) -> Counter[str]:
    """Train from a seed, and return what was seen.

    Raises:
        Broken: Something was wrong; its text has what is needed to run it again.
    """
    world = World(seed, faults)
    for number in range(steps):
        try:
            world.run_step()
        except (AssertionError, RecursionError, KeyError, ValueError, TypeError, AttributeError) as error:
            text = f"persistent_programs.run({seed}, {number + 1}, {faults}): {type(error).__name__}: {error}"
            raise Broken(text) from error
    return world.seen


# The order in which values leave --------------------------------------------------------------------------------------

_SIZE = SIZES[1]


def stepped(world: World, order: Sequence[int]) -> list[int]:
    """Use parameters in an order within one step, and return those that were not there."""
    world._forget_gone()
    loads = []
    for number in order:
        home = world.parameters[number]
        if not home.is_here:
            loads.append(number)
        with world.use([home]):
            pass
    return loads


def loads_at_least(order: Sequence[int], here: set[int], most: int, steps: int) -> list[list[int]]:
    """What has to be loaded where what is used last from now on leaves first (Belady)."""
    uses, found = [*order] * (steps + 1), list[list[int]]()
    for at, number in enumerate(uses[: steps * len(order)]):
        if at % len(order) == 0:
            found.append([])
        if number in here:
            continue
        found[-1].append(number)
        if len(here) == most:
            here = here - {max(here, key=lambda each: [*uses[at + 1 :], each].index(each))}
        here = here | {number}
    return found


def look_at_order(order: Sequence[int], most: int) -> None:
    """Have values of one size leave at equal prices, in a step that repeats, and compare what is loaded.

    Args:
        order: The numbers of values, below seven, in the order of their uses.
        most: How many of them there is room for.

    Raises:
        Broken: What is used last from now on does not leave first, or what is used next is not told.
    """
    world = World(0, Faults(), sizes_bytes=[_SIZE] * 7, has_temporaries=False, reads_ahead=False)
    world.pressure.relieve()  # so that the tier has a copy of each
    world.pressure.set_budget(most * _SIZE)
    first = stepped(world, order)
    here = {number for number, home in enumerate(world.parameters) if home.is_here}
    expected = loads_at_least(order, here, most, 4)
    found = [stepped(world, order) for _ in range(4)]
    if found != expected:
        raise Broken(f"look_at_order({order}, {most}): {found} are loaded after {first}, and not {expected}")
    world.pressure.relieve()
    world._forget_gone()
    uses = [number for place, number in enumerate(order) if place == 0 or order[place - 1] != number]
    told = [value.number for value in world.values.used_next(len(uses))]
    if told != uses:
        raise Broken(f"look_at_order({order}, {most}): {told} are told to be used next, and not {uses}")


def look_at_random_order(seed: int) -> None:
    """Do so with an order from a seed."""
    numbers = random.Random(seed)
    look_at_order([numbers.randrange(7) for _ in range(numbers.randrange(2, 15))], numbers.randrange(1, 7))
