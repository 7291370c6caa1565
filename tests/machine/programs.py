"""Random training steps on the modelled device, under pressure, each compared with what plain training would read.

A step makes values, saves some of them for its backward pass, writes over others, lets go of them sooner or later, and
reads what it saved in about the reverse order. Several steps may be alive at once. The reference keeps everything: a
value's token is known from the op that made it, and every read has to give that token.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from pooch.errors import ReplayDiffers
from pooch.ir import Link
from pooch.machine import Call, CopySpeed, Lane, Level, Pressure, Recipes, Value, Witness
from pooch.machine.recipes import Resolve
from pooch.simulator.modelled import ModelledCounters as Counters

from .modelled import (
    SIZES,
    Chance,
    Faults,
    ModelledMemory,
    ModelledPlace,
    ModelledStorage,
    ModelledTier,
    OutOfMemory,
)  # fmt: skip

# What may go wrong, one kind at a time and all together.
KINDS = (
    Faults(),
    Faults(copy_fails=0.2),
    Faults(no_room=0.3),
    Faults(interrupted=0.005),
    Faults(out_of_memory=0.005),
    Faults(replay_differs=0.1),
    Faults(copy_fails=0.1, no_room=0.1, interrupted=0.003, out_of_memory=0.003, replay_differs=0.05),
)


_FEW = 2  # replays of banned recipes: see `ModelledStep.replay`


class Broken(AssertionError):
    """The machine did something wrong; the text names the seed."""


@dataclass(eq=False)
class Handle:
    """A saved tensor: what it has to give, and whether it may still be read."""

    step: ModelledStep
    value: Value
    token: int
    is_stale: bool = False


@dataclass(frozen=True)
class RanOp:
    """An op as it ran: what it read and made."""

    reads: tuple[int, ...]
    outer: ModelledStorage | None  # from before the step: a replay reads what it holds then
    writes: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    is_banned: bool


@dataclass
class Held:
    """A storage that the program holds, and the op until which it does."""

    storage: ModelledStorage
    until: int


class ModelledStep:
    """One training step: the owner of its values."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.thread = threading.get_ident()
        self.saved: dict[int, Value] = {}
        self.recipes = Recipes(self.saved, self, machine.pressure.speed)
        self.handles: list[Handle] = []
        self.buffers = [ModelledStorage(machine.memory, 0) for _ in range(2)]
        self.program: list[Held] = []
        self._most = 0

    # The owner of values: see `pooch.machine.values.Owner`.

    def take_place(self, size_bytes: int) -> ModelledPlace | None:
        return self.machine.tier.take(size_bytes)

    def replay_ms(self, number: int) -> float:
        return self.recipes.replay_ms(number)

    def make_again(self, number: int) -> ModelledStorage:
        memory, counters, calls = self.machine.memory, self.machine.counters, len(self.recipes._order(number))
        asked, ran = memory.asked, counters.recomputed_ops
        storage = self.recipes.make_again(number)
        assert isinstance(storage, ModelledStorage)
        ran = counters.recomputed_ops - ran
        if memory.asked == asked and ran != calls:
            raise Broken(f"{ran} calls ran where {calls} make value {number} again, and nothing left meanwhile")
        return storage

    # The kitchen: see `pooch.machine.recipes.Kitchen`.

    def ensure(self, value: Value) -> ModelledStorage:
        storage = self.machine.pressure.ensure(value)
        assert isinstance(storage, ModelledStorage)
        return storage

    def replay(self, call: RanOp, resolve: Resolve) -> list[ModelledStorage]:
        machine, arguments, made = self.machine, list[ModelledStorage](), list[ModelledStorage]()
        try:
            for read in call.reads:
                arguments.append(resolve(read, False))
                arguments[-1].held_by_program += 1  # a tensor on it
            for number, size_bytes in zip(call.writes, call.sizes_bytes, strict=True):
                made.append(machine.memory.new(size_bytes))
                made[-1].held_by_program += 1
                made[-1].contents = machine.token(number, [each.contents for each in arguments], call.outer)
                # What is banned runs again only if what was to be read in its place has ended before.
                if call.is_banned or machine.chance.happens(machine.chance.faults.replay_differs):
                    made[-1].contents += 1
        finally:
            for each in (*arguments, *made):
                each.held_by_program -= 1
        machine.counters.recomputed_ops += 1
        return made

    def copied(self, storage: ModelledStorage) -> ModelledStorage:
        copy = self.machine.memory.new(storage.nbytes())
        copy.contents = storage.contents
        return copy

    def check(self, value: Value, storage: ModelledStorage) -> None:
        witness = value.witness
        if witness is not None and not witness.agrees(storage) and not witness.restore(storage):
            raise ReplayDiffers("a replay gave other bits, and there was no copy")

    def returned(self, value: Value) -> None:
        self.machine.pressure.returned(value)

    def is_banned(self, call: Call, number: int) -> bool:
        return call.call.is_banned

    # The owner again.

    def remember(self, value: Value) -> None:
        level = Level.COPIED if self.machine.chance.random.random() < 0.5 else Level.WHOLE
        value.witness = witness = Witness(value.number, level, lambda storage, _: storage.contents)
        witness.take(value.storage)
        place = self.take_place(value.size_bytes) if level == Level.COPIED else None
        if place is not None:
            witness.start_copy(place, value.storage)
            witness.finish_copy()

    def moved(self, value: Value) -> list[Value]:
        return self.recipes.moved(value)

    def gained(self, gained_ms: float) -> None:
        self.machine.seen["dropped"] += 1

    def released(self, number: int) -> None:
        self.saved.pop(number, None)

    # The program ------------------------------------------------------------------------------------------------------

    def _next_number(self) -> int:
        self._most += 1
        return self._most

    def forward(self, ops: int) -> None:
        """Run ops, which make values, write over them, save them and let go of them."""
        for op in range(ops):
            self.let_go_until(op)
            if self.program and self.machine.chance.random.random() < 0.15:
                self._write_over(self.machine.chance.random.choice(self.program))
            if self.program and self.machine.chance.random.random() < 0.15:
                self._save_again(self.machine.chance.random.choice(self.program))
            if self.machine.chance.random.random() < 0.1:
                self._change_buffer()
            self._run_op(op)
            self.machine.pressure.write_ahead()
            self.machine.look_between()

    def _change_buffer(self) -> None:
        """An op in place on a tensor from outside of the step, such as a running mean."""
        buffer = self.machine.chance.random.choice(self.buffers)
        readers = [call for call in self.recipes.readers(range(self._most + 1)) if call.call.outer is buffer]
        with self.machine.pressure.lock:
            self.recipes.give_up(readers)
        buffer.contents += 1

    def _run_op(self, op: int) -> None:
        random = self.machine.chance.random
        held = random.sample(self.program, min(len(self.program), random.randrange(3)))
        outer = random.choice([None, *self.buffers])
        sources = [each.storage.contents for each in held]
        reads = tuple(dict.fromkeys(each.storage.number for each in held))
        sizes_bytes = tuple(random.choices(SIZES, k=1 + (random.random() < 0.2)))
        made = [self._make(size_bytes, sources, outer) for size_bytes in sizes_bytes]
        if random.random() < 0.85 and all(read in self.recipes for read in reads):
            writes = tuple(storage.number for storage in made)
            ran = RanOp(reads, outer, writes, sizes_bytes, random.random() < 0.05)
            self.recipes.add(Call(ran, reads, writes, random.random() * 2))
        for storage in made:
            self.program.append(Held(storage, op + 1 + min(random.randrange(8), random.randrange(8))))
            if random.random() < 0.8:
                for _ in range(1 + (random.random() < 0.2)):
                    self._save(storage.number, storage, storage.contents)

    def _make(self, size_bytes: int, sources: list[int], outer: ModelledStorage | None) -> ModelledStorage:
        """One output of an op."""
        storage, number = self.machine.memory.new(size_bytes), self._next_number()
        storage.contents, storage.number = self.machine.token(number, sources, outer), number
        storage.held_by_program = 1
        return storage

    def _save_again(self, held: Held) -> None:
        self._save(held.storage.number, held.storage, held.storage.contents)

    def _save(self, number: int, storage: ModelledStorage, token: int) -> None:
        pressure = self.machine.pressure
        with pressure.lock:
            value = self.saved.get(number)
            if value is None:
                value = Value(number, self, storage)
                value.is_shared = storage.is_in_parts
                self.saved[number] = value
                pressure.save(value)
            elif value.storage is None:  # it left, and the program has it again
                value.storage = storage
            value.handles += 1
        self.handles.append(Handle(self, value, token))

    def _write_over(self, held: Held) -> None:
        """An op in place.

        Autograd refuses to read what was saved of it before, unless that was another part of the storage: then it reads
        what is there.
        """
        pressure = self.machine.pressure
        with pressure.lock:  # what reads the old contents cannot run again
            self.recipes.give_up(self.recipes.readers([held.storage.number]))
        value = self.saved.pop(held.storage.number, None)
        if value is not None:
            pressure.overwritten(value)
            self.machine.seen["overwritten"] += 1
        if held.storage.readers:
            raise Broken("an op writes over what is being copied out")
        number = self._next_number()
        held.storage.is_in_parts = True
        before, held.storage.number = held.storage.number, number
        held.storage.contents = self.machine.token(number, [held.storage.contents])
        is_part = self.machine.chance.random.random() < 0.5
        for handle in self.handles:
            if handle.value.storage is held.storage:
                handle.is_stale |= not is_part
                handle.token = held.storage.contents
            else:
                handle.is_stale |= handle.value.number == before

    def let_go_until(self, op: int) -> None:
        """Let go of what the program holds no longer."""
        for held in [each for each in self.program if each.until <= op]:
            self.program.remove(held)
            held.storage.held_by_program -= 1

    def backward(self) -> None:
        """Read what was saved, about in reverse order, and let go of it."""
        random = self.machine.chance.random
        self.let_go_until(10**9)
        while self.handles:
            place = len(self.handles) - 1 - min(random.randrange(3), random.randrange(3), len(self.handles) - 1)
            handle = self.handles[place]
            if not handle.is_stale:
                for _ in range(1 + (random.random() < 0.1)):
                    self._read(handle)
            sizes_bytes = random.choices(SIZES, k=random.randrange(4))
            gradients = [self.machine.memory.new(size_bytes) for size_bytes in sizes_bytes]  # of the pass itself
            if self.program and random.random() < 0.3:
                self._write_over(random.choice(self.program))
            self.let_go_until(10**9)
            self.end(place)
            self.machine.look_between()
            del gradients

    def _read(self, handle: Handle) -> None:
        pressure, value = self.machine.pressure, handle.value
        with pressure.lock:
            pressure.reading(value)
            was = value.state
            storage = pressure.ensure(value)
            self.machine.seen[was] += 1
            if storage.contents != handle.token:
                raise Broken(f"value {value.number} was read with other contents ({was} before)")
            value.is_busy = True
            try:
                pressure.read_ahead(value)
            finally:
                value.is_busy = False
            if storage.contents != handle.token:
                raise Broken(f"value {value.number} changed while it was read")
        if value.number in self.saved:  # the program has a tensor on it now
            storage.number = value.number
            storage.held_by_program += 1
            self.program.append(Held(storage, 0))

    def end(self, place: int = -1) -> None:
        """Autograd lets go of a handle."""
        handle = self.handles.pop(place)
        self.machine.pressure.lock.end(handle.value)

    def abandon(self) -> None:
        """An error has ended the step: the program and autograd let go of everything."""
        self.let_go_until(10**9)
        while self.handles:
            self.end()


@dataclass
class Machine:
    """A modelled device under pressure, which runs random steps one after the other.

    Attributes:
        seed: All that happens follows from it.
        seen: How often each state was met at a read, and what else happened.
    """

    seed: int
    faults: Faults
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = Chance(self.seed, self.faults)
        self.memory, self.tier, self.counters = ModelledMemory(self.chance), ModelledTier(self.chance), Counters()
        speed = CopySpeed("a modelled tier")
        self.pressure = Pressure(2**40, self.memory, self.memory, self.tier, speed, self.counters)
        self._tokens: dict[tuple[int, ...], int] = {}
        self.alive: list[ModelledStep] = []
        self._most_over_bytes = 0

    def token(self, number: int, sources: list[int], outer: ModelledStorage | None = None) -> int:
        """The contents that an op gives, which follow from what it reads."""
        read = (number, *sources, *(() if outer is None else (outer.contents,)))
        return self._tokens.setdefault(read, 2 * len(self._tokens))

    def run_step(self) -> None:
        """Run one step, or several that are alive at once, and look at what is left.

        Raises:
            Broken: Something was wrong.
        """
        random = self.chance.random
        self.counters.__init__()  # type: ignore[misc]
        self.pressure.begin(self.counters)
        self._most_over_bytes = 0
        self.tier.bytes_per_ms = rate = random.choice((10.0, 1e3, 1e5))
        self.pressure.speed.out, self.pressure.speed.back = Lane(), Lane()
        self.pressure.speed.start_from(Link("a modelled tier", 0.0, 0.0, rate, rate))
        self.pressure.set_budget(random.choice((2048, 8192, 16384, 32768)))
        self.memory.after = self._look_at_bytes
        steps = [ModelledStep(self) for _ in range(1 + (random.random() < 0.2))]
        self.alive = steps
        try:
            for step in steps:
                step.forward(random.randrange(2, 24))
            for step in random.sample(steps, len(steps)):
                if random.random() < 0.05:
                    step.abandon()  # a loss that nobody differentiates
                step.backward()
        except (KeyboardInterrupt, OutOfMemory, ReplayDiffers) as error:
            self.seen[type(error).__name__] += 1
            # A frame of the error may hold a storage, as a traceback does in a program.
            error.__traceback__ = None
        self._clean_up(steps)

    def _clean_up(self, steps: list[ModelledStep]) -> None:
        self.chance.is_calm = True
        told_bytes = self.pressure.missing_bytes
        if told_bytes > self._most_over_bytes and not (self.faults.interrupted or self.faults.out_of_memory):
            raise Broken(f"{told_bytes} bytes over the budget are told, and it was {self._most_over_bytes}")
        if self.chance.random.random() < 0.1:
            self.pressure.lock.__enter__()  # Ctrl-C at the entry of `__exit__`
        self.pressure.lock.give_back()
        if self.pressure.lock._lock._is_owned():  # type: ignore[attr-defined]
            raise Broken("the lock is held although nobody is at work")
        for step in steps:
            step.abandon()
        self.alive = []
        self.pressure.set_budget(2**40)
        self.pressure.begin(self.counters)
        self.chance.is_calm = False
        candidates, away = self.pressure._candidates, self.pressure._away
        known = (self.pressure._values, self.pressure._writing, candidates._entries, candidates._entering, away._values)
        if any(known):
            raise Broken("values of steps that are over are still known")
        if any(step.saved for step in steps) and not self.faults.interrupted:
            raise Broken("a step still knows values that nobody reads")
        if self.tier.in_use and not self.faults.interrupted:
            raise Broken(f"{self.tier.in_use} rooms of the tier were not given back")
        self.tier.in_use = 0
        steps.clear()
        if self.memory.live_bytes and not self.faults.interrupted:
            raise Broken(f"{self.memory.live_bytes} bytes are still live after the step")
        self.pressure._reading.clear()
        self.seen["steps"] += 1

    def _look_at_bytes(self) -> None:
        """After an allocation: the budget is passed only if nothing could leave."""
        over_bytes = self.memory.live_bytes - (self.memory.budget_bytes or 0)
        self.seen["asked"] += over_bytes > 0
        for value in self.pressure._values:
            self._look_at(value)
        self._most_over_bytes = max(self._most_over_bytes, over_bytes)
        if over_bytes > self.pressure.missing_bytes:
            raise Broken(f"{over_bytes} bytes over the budget, and {self.pressure.missing_bytes} are told")
        if over_bytes <= 0 or not self.faults.tier_is_sound:
            return
        for value in self.pressure._values:
            is_free = value.storage is not None and not (value.storage.held_by_program or value.is_shared)
            if is_free and not (value.is_busy or value.changed):
                raise Broken(f"{over_bytes} bytes over the budget, and value {value.number} ({value.state}) stayed")
        self.seen["over"] += 1

    def look_between(self) -> None:
        """Between ops and reads, nothing is being read."""
        for value in self.pressure._values:
            if value.is_busy:
                raise Broken(f"value {value.number} stays, since it seems to be read")

    def _look_at(self, value: Value) -> None:
        if (value.place is None) and (value.is_copied or value.state == "leaving"):
            raise Broken(f"value {value.number} is {value.state} and has no room in the tier")
        if value.state == "unmade" and not value.is_busy:
            owner = value.owner()
            if owner is not None and not value.changed and value.number not in owner.recipes:
                raise Broken(f"value {value.number} was dropped, and nothing can make it again")


def run(seed: int, steps: int, faults: Faults) -> Counter[str]:
    """Run random steps from a seed, and return what was seen.

    Raises:
        Broken: Something was wrong; its text has what is needed to run it again.
    """
    machine = Machine(seed, faults)
    for number in range(steps):
        try:
            machine.run_step()
        except (AssertionError, RecursionError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise Broken(f"run({seed}, {number + 1}, {faults}): {type(error).__name__}: {error}") from error
    if not faults.replay_differs and machine.seen["ReplayDiffers"] > _FEW + steps // 50:
        raise Broken(f"run({seed}, {steps}, {faults}): {machine.seen['ReplayDiffers']} replays gave other contents")
    return machine.seen
