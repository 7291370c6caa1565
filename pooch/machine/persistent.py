"""Values that outlive a step: parameters, buffers, gradients, the state of an optimizer, data of the program's.

The program holds their storages for as long as it likes, so it is their bytes that leave and come back. Where such a
value is follows from the same three fields as for all others (see `values.py`), of which two are read off its home:
whether the bytes are there, and whether they are still what the tier has.

A step repeats, and so do the uses of what outlives it: who is used last from now on, going by the step before, leaves
first (Belady 1966, "A study of replacement algorithms for a virtual-storage computer", section 3, MIN).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter
from typing import Literal, Protocol, get_args

from .eviction import online_score
from .values import Memory, Owner, Place, Storage, Ticket, Value

Kind = Literal["parameter", "buffer", "gradient", "state", "data"]
KINDS: frozenset[Kind] = frozenset(get_args(Kind))
Cost = Callable[[Value], float]


class Home(Protocol):
    """A storage of the program's, of which the bytes can be taken.

    Attributes:
        key: Tells it from others.
        storage: The storage, or None once the program has released it.
        is_here: Whether the bytes are in it.
        is_used: Whether an op works on them.
        is_gone: Whether the program has released it.
        is_read: Whether a copy reads it for which whatever writes to it has to wait.
        tensors: How many tensors there are on it.
        writes: Grows with each op that writes to it.
        last_use: How many uses of all homes there were up to the latest one of this.
    """

    key: int = 0
    storage: Storage | None = None
    is_here: bool = False
    is_used: bool = False
    is_gone: bool = False
    is_read: bool = False
    tensors: int = 0
    writes: int = 0
    last_use: int = 0

    def take(self, writes: int | None = None) -> Storage | None:
        """Take the bytes out, and return them as a storage of their own. None if they are in use or not there.

        Args:
            writes: None, too, if there were more writes than so many. Without it, that does not matter.
        """
        return None

    def give(self, storage: Storage) -> None:
        """Put bytes back, which leaves the storage that is given empty."""
        return

    def close(self) -> None:
        """Note that what ops were still working on when they returned is done."""
        return


class _Nowhere(Home):
    """The home of what has none: as it is until its first bytes have come."""


_NOWHERE = _Nowhere()
_ORDERS_A_STEP = 16  # about as often are all of them looked at, to see in which order they leave


@dataclass(frozen=True, slots=True)
class Moved:
    """The bytes of each kind that were copied.

    Attributes:
        out_bytes: To the tier. What leaves while its copy there is still right is not copied.
        in_bytes: Back from it.
    """

    out_bytes: Counter[Kind] = field(default_factory=Counter)
    in_bytes: Counter[Kind] = field(default_factory=Counter)


class PersistentValue(Value):
    """One value that outlives a step.

    Args:
        number: Of its kind among those of its parameter: the same in each step.
        home: Where the program has it.
        kind: What it is.
        owner: Has room in the tier for it.
        size_bytes: Its size.

    Attributes:
        kind: What it is.
        leaves: Whether it has left since a copy of it was begun ahead of need, so that it probably will again.
        users: How many accesses are under way that are no ops.
        spare: Its room in the tier if a copy to there has failed in this step, in which it stays then, or None.
        on_first_leave: Called with its size when its bytes leave for the first time. None: nobody wants to know.
    """

    __slots__ = (
        "_arriving", "_home", "_is_in_tier", "_is_lent", "_is_pinned", "_loans", "_place", "_written",
        "kind", "leaves", "on_first_leave", "spare", "users",
    )  # fmt: skip

    outlives_steps = True

    def __init__(self, number: int, home: Home, kind: Kind, owner: Owner, size_bytes: int) -> None:
        self._home: Home = _NOWHERE  # what is set below must not touch any bytes
        self.kind = kind
        self._arriving: Storage | None = None
        self._is_in_tier, self._written, self._loans = False, 0, 0
        self._is_lent = self.leaves = False
        self.on_first_leave: Callable[[int], None] | None = None
        self.spare: PersistentPlace | None = None
        self.users = 0
        super().__init__(number, owner)
        self.size_bytes, self._home = size_bytes, home

    @property
    def storage(self) -> Storage | None:
        """Its bytes on the device, or None."""
        if self._arriving is not None:
            return self._arriving
        return self._home.storage if self._home.is_here else None

    @storage.setter
    def storage(self, storage: Storage | None) -> None:
        if storage is not None or self._arriving is not None:
            self._arriving = storage
        else:  # another thread may have written to it since somebody looked whether it is copied
            self._left(self._home.take(self._written - self._loans))

    def _left(self, taken: Storage | None) -> None:
        if taken is not None:
            self.leaves = True
            if self.on_first_leave is not None:
                on_first_leave, self.on_first_leave = self.on_first_leave, None
                on_first_leave(self.size_bytes)

    @property
    def is_copied(self) -> bool:
        """Whether the tier holds its bytes as they are now."""
        if not self._is_in_tier:
            return False
        return self._arriving is not None or not self._home.is_here or self._writes == self._written

    @is_copied.setter
    def is_copied(self, is_copied: bool) -> None:
        self._is_in_tier = is_copied

    @property
    def is_pinned(self) -> bool:
        """Whether its bytes stay where they are, since somebody has their address."""
        if self._is_lent:
            self._end_loan()
        return self._is_pinned or self._is_lent

    @is_pinned.setter
    def is_pinned(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned

    def close(self) -> None:
        """Let it leave again after an op that might have worked on it after it had returned, as collectives do."""
        self._home.close()

    def lend(self) -> None:
        """Have its bytes stay where they are as long as there are further tensors on them, such as that of an array.

        Nothing tells what is written to them meanwhile.
        """
        self._is_lent, self._loans = True, self._loans + 1

    def _end_loan(self) -> None:
        if not self.users and self._home.tensors <= 1:
            self._is_lent, self._loans = False, self._loans + 1

    @property
    def _writes(self) -> int:
        """Grows with each write, and with each loan that begins or has ended."""
        if self._is_lent:
            self._end_loan()
        return self._home.writes + self._loans

    @property
    def place(self) -> Place | None:
        """Its room in the tier, or None: there was none, or the program has changed the size of its storage."""
        storage = self._home.storage
        return self._place if storage is None or storage.nbytes() == self.size_bytes else None

    @place.setter
    def place(self, place: Place | None) -> None:
        self._place = place

    @property
    def is_here(self) -> bool:
        """Whether its bytes are on the device, and have arrived."""
        return self._home.is_here and not self._home.is_gone

    @property
    def is_away(self) -> bool:
        """Whether its bytes are in the tier alone."""
        return self._is_in_tier and self._arriving is None and not self._home.is_here and not self._home.is_gone

    @property
    def is_only_here(self) -> bool:
        """Whether its bytes are here as in plain training: the tier has no copy of them, and none is under way."""
        if self.ticket is not None or self._arriving is not None or not self._home.is_here:
            return False
        return not (self._is_in_tier and self.is_copied)

    @property
    def is_gone(self) -> bool:
        """Whether the program has released it."""
        return self._home.is_gone

    @property
    def has_home(self) -> bool:
        """Whether it stands for bytes of the program: no longer once everything is back for good."""
        return type(self._home) is not _Nowhere

    @property
    def key(self) -> int:
        """Tells its home from others."""
        return self._home.key

    @property
    def last_use(self) -> int:
        """How many uses of all homes there were up to its latest one."""
        return self._home.last_use

    @property
    def can_leave(self) -> bool:
        """Whether it is there, and nothing works on it."""
        home = self._home
        if self._arriving is None and (not home.is_here or home.is_gone):
            return False
        if self.is_busy or self.users or home.is_used or self._is_pinned:
            return False
        return not (self._is_lent and self.is_pinned)

    def is_held_elsewhere(self, memory: Memory) -> bool:
        """Whether an op that is running works on it. That the program holds it does not matter."""
        return self._home.is_used

    @property
    def is_outdated(self) -> bool:
        """Whether it was written to since the copy began that is under way."""
        return self.ticket is not None and self._writes != self._written

    def begins_to_leave(self, *, is_ordered: bool = False) -> None:
        """Note that its bytes are copied as they are now.

        Args:
            is_ordered: Whether what writes to them has to wait for the copy.
        """
        self._written, self._is_in_tier = self._writes, False
        self._home.is_read = is_ordered

    def is_read_no_more(self) -> None:
        """Note that the copy has ended, or that all that follows comes after it."""
        self._home.is_read = False

    def revert(self) -> None:
        """Give up what was written to it since its copy, which is what it holds from now on: clean or here -> away.

        If somebody has the address of its bytes, they stay and are filled from the copy. The caller knows that the tier
        has a copy, and that nothing works on it.

        Raises:
            OSError: If the copy cannot be read, whatever the engine raises then.
        """
        assert self._is_in_tier
        if not self.is_pinned:
            self._left(self._home.take())
            return
        assert self.place is not None
        ticket = self.place.copy_in(self._home.storage)
        try:
            ticket.wait()
        finally:
            ticket.wait()  # an interrupt must not leave a part of it
        if ticket.error is not None:
            raise ticket.error

    def arrived(self) -> None:
        """Put its bytes, which have come, to where the program looks for them."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            self._home.give(arriving)
            self._written = self._writes

    def leave_home(self) -> None:
        """Let go of the home, and know how it was: an open step that still knows the value is not to keep it."""
        home, self._home = self._home, _Nowhere()
        self._home.is_here, self._home.is_gone = home.is_here, home.is_gone


class PersistentPlace:
    """Room in the tier that a value keeps, so that a copy of what has not changed is still there.

    Args:
        value: The value.
        place: The room. Also an attribute.
        moved: Counts the bytes of each kind that leave and come back.
        is_ordered: Whether an op that writes to the value has to wait for a copy that reads it, as on streams. Without
            that the copy may be of parts of both, and is not used.
    """

    def __init__(self, value: PersistentValue, place: Place, moved: Moved, *, is_ordered: bool = False) -> None:
        self._value, self.place, self._moved, self._is_ordered = value, place, moved, is_ordered
        self._kept: Place | None = None  # where the copy is that is kept
        self._take_another: Callable[[int], Place | None] | None = None  # as long as the copy to keep is in `place`
        self._is_keeping = False

    def keep(self, take_another: Callable[[int], Place | None]) -> None:
        """Keep the copy that is here: the next one goes to another room, if there is any.

        Args:
            take_another: Returns room of a size, or None.
        """
        self._take_another, self._is_keeping = take_another, True

    @property
    def is_keeping(self) -> bool:
        """Whether the copy is still there that was to be kept."""
        return self._is_keeping

    def keep_no_longer(self, *, is_reverted: bool = False) -> Place | None:
        """Return the room that is needed no longer, if two were: that of the copy that was kept.

        Args:
            is_reverted: Have that copy be the one that counts, and return the room of the later one.
        """
        kept, self._kept, self._take_another, self._is_keeping = self._kept, None, None, False
        if kept is not None and is_reverted:
            kept, self.place = self.place, kept
        return kept

    def _make_way(self) -> None:
        """Have the next copy go somewhere else if the one that is here is kept."""
        take_another, self._take_another = self._take_another, None
        if take_another is None:
            return
        another = take_another(self._value.size_bytes)
        if another is None:
            self._is_keeping = False
        else:
            self._kept, self.place = self.place, another

    def copy_out(self, storage: Storage) -> Ticket:
        """Start copying a storage here."""
        self._make_way()
        self._value.begins_to_leave(is_ordered=self._is_ordered)
        self._moved.out_bytes[self._value.kind] += self._value.size_bytes
        return self.place.copy_out(storage)

    def copy_in(self, storage: Storage) -> Ticket:
        """Start filling a storage from here."""
        self._moved.in_bytes[self._value.kind] += self._value.size_bytes
        return self.place.copy_in(storage)

    def copied(self, error: BaseException | None) -> None:
        """Note how a copy out to here ended: why it failed, or None."""
        self._value.is_read_no_more()
        self.place.copied(error)

    def release(self) -> None:
        """Keep the room for the next step, as a copy to here has failed."""
        self._value.spare = self


class Uses:
    """The order in which a step uses what outlives it, as the step before did.

    Args:
        order: The numbers of values, in the order of their uses. A value may come several times.

    Attributes:
        length: How many uses there are.
    """

    def __init__(self, order: Sequence[int] = ()) -> None:
        self.length = len(order)
        self.order = order
        self._places: dict[int, list[int]] = {}
        for place, number in enumerate(order):
            self._places.setdefault(number, []).append(place)

    @property
    def are_known(self) -> bool:
        """Whether a step was seen."""
        return self.length > 0

    def distance(self, number: int, now: int) -> int:
        """How many uses come before the next one of a value.

        Args:
            number: Of the value.
            now: How many uses there were in this step.
        """
        places = self._places.get(number)
        if places is None:
            return 2 * self.length
        place = now % self.length
        index = bisect_left(places, place)
        return places[index] - place if index < len(places) else self.length - place + places[0]

    def distances(self, now: int) -> dict[int, int]:
        """Return how many uses come before the next one of each value that is used.

        Args:
            now: How many uses there were in this step.
        """
        place = now % max(1, self.length)
        following = [*self.order[place:], *self.order[:place]]
        return dict(zip(reversed(following), range(self.length - 1, -1, -1), strict=True))  # the nearest one is last

    def following(self, now: int, count: int) -> list[tuple[int, bool]]:
        """Return the numbers of those that are used next, and of each whether that is in the next step.

        Args:
            now: How many uses there were in this step.
            count: How many uses are looked at.
        """
        order, length = self.order, self.length
        return [(order[place % length], place >= length) for place in range(now, now + min(count, length))]


class PersistentValues:
    """The values that outlive a step, in the order in which they leave.

    Args:
        count_uses: Returns how many uses of homes there were since the step began.
        count_here_bytes: Returns the bytes of all of them that are on the device. None: they are added up here.

    Attributes:
        moved: What was copied.
        are_last: Whether they leave after all values that autograd has saved, whatever that costs.
        held_back: The kinds of which none leaves.
    """

    def __init__(self, count_uses: Callable[[], int], count_here_bytes: Callable[[], int] | None = None) -> None:
        self._values: dict[int, PersistentValue] = {}  # by the keys of their homes
        self._numbered: dict[int, PersistentValue] = {}
        self._count_uses, self._count_here_bytes, self._uses = count_uses, count_here_bytes, Uses()
        self._scored: list[tuple[float, PersistentValue]] = []  # those that could leave at `_scored_at`, in order
        self._scored_at = self._first = 0  # the latter: the place of the first that has not left since
        self.moved = Moved()
        self.are_last, self.held_back = False, frozenset[Kind]()

    def __iter__(self) -> Iterator[PersistentValue]:
        return iter(list(self._values.values()))

    def add(self, key: int, value: PersistentValue) -> PersistentValue | None:
        """Add a value, and return the one that had its number before, if there is one.

        Args:
            key: Of its home.
            value: The value.
        """
        before = self._numbered.get(value.number)
        value.leaves = before is not None and before.leaves
        self._values[key] = self._numbered[value.number] = value
        return before

    def of(self, key: int) -> PersistentValue | None:
        """Return the value of a home, given its key."""
        return self._values.get(key)

    def of_all(self, keys: Sequence[int]) -> dict[int, PersistentValue]:
        """Return the values of homes by their keys, of those that have one."""
        values = self._values
        return {key: values[key] for key in keys if key in values}

    def begin_step(self, used: Sequence[int]) -> list[PersistentValue]:
        """Note that a step begins, and return the values that the program has released, which are forgotten.

        Args:
            used: The keys of the homes that were used since the last step began, in the order of their uses.
        """
        order = [value.number for value in map(self._values.get, used) if value is not None]
        if order:
            self._uses = Uses(order)
        self._scored = []
        for value in self._values.values():
            value.close()
            if value.spare is not None:
                value.place, value.spare = value.spare, None
        gone = {key: value for key, value in self._values.items() if value.is_gone}
        for key, value in gone.items():
            del self._values[key]
            if self._numbered.get(value.number) is value:
                del self._numbered[value.number]
        return list(gone.values())

    def clear(self) -> None:
        """Let go of all of them, and of their homes, since their storages may get others. Nothing keeps one."""
        for value in self._values.values():
            value.place = value.spare = None
            value.leave_home()
        self._scored = []
        self._values.clear()
        self._numbered.clear()

    def here_bytes(self) -> int:
        """The bytes of those that are on the device."""
        if self._count_here_bytes is not None:
            return self._count_here_bytes()
        return sum(value.size_bytes for value in self if value.is_here)  # other threads may add some meanwhile

    def away_bytes(self) -> Counter[Kind]:
        """The bytes of those of each kind that are not on the device."""
        found: Counter[Kind] = Counter()
        for value in self:
            if not (value.is_here or value.is_gone):
                found[value.kind] += value.size_bytes
        return found

    def used_next(self, count: int) -> Iterator[PersistentValue]:
        """Yield those that will be used next, the nearest first, if they are away.

        The state of optimizers is used at the end of a step, and leaves as the next one begins. So that of the next
        step is not among them before it has begun.

        Args:
            count: How many uses are looked at.
        """
        for number, is_in_next_step in self._uses.following(self._count_uses(), count):
            value = self._numbered.get(number)
            if value is not None and value.is_away and not (is_in_next_step and value.kind == "state"):
                yield value

    def farthest(self) -> list[PersistentValue]:
        """Return those that can leave, what is used next first, so that `pop` gives what is used last."""
        leaving, now = [value for value in self._values.values() if value.can_leave], self._count_uses()
        if not self._uses.are_known:
            return sorted(leaving, key=lambda value: now - value.last_use)
        distances, never = self._uses.distances(now), 2 * self._uses.length
        ahead = [distances.get(value.number, never) for value in leaving]
        return [value for _, _, value in sorted(zip(ahead, range(len(leaving)), leaving, strict=True))]

    def distance(self, value: PersistentValue) -> float:
        """How far ahead the next use of a value is."""
        return self._distance(value, self._count_uses())

    def among(self, saved: Iterator[Value], cost_ms: Cost, score: Cost) -> Iterator[Value]:
        """Yield these values and others in the order in which they leave.

        Args:
            saved: Values that autograd has saved, in the order in which they leave.
            cost_ms: Gives what leaving costs.
            score: Gives the score of a saved value, by which it is compared with these.
        """
        if self.held_back == KINDS:
            yield from saved
            return
        own = self._in_order(cost_ms)
        if self.held_back:
            own = (each for each in own if each[1].kind not in self.held_back)
        following = next(own, None)
        for value in saved:
            limit = -1.0 if self.are_last else score(value)
            while following is not None and following[0] <= limit:
                if following[1].can_leave:  # it may have left meanwhile
                    yield following[1]
                following = next(own, None)
            yield value
        if following is not None:
            yield from (value for _, value in chain((following,), own) if value.can_leave)

    def _in_order(self, cost_ms: Cost) -> Iterator[tuple[float, PersistentValue]]:
        """Yield those that can leave, with their scores, the lowest first, each once.

        The order of a moment ago serves as well: what has arrived since comes after it.
        """
        now, yielded, scored = self._count_uses(), set[PersistentValue](), self._scored
        is_recent = scored and 0 <= now - self._scored_at < self._uses.length // _ORDERS_A_STEP
        if is_recent:
            while self._first < len(scored) and not scored[self._first][1].can_leave:
                self._first += 1
            for each in islice(scored, self._first, None):
                if each[1].can_leave:
                    yielded.add(each[1])
                    yield each
        self._scored, self._scored_at, self._first = self._in_order_now(cost_ms), now, 0
        yield from (each for each in self._scored if each[1] not in yielded)

    def _in_order_now(self, cost_ms: Cost) -> list[tuple[float, PersistentValue]]:
        uses = self._uses
        now = self._count_uses() if uses.are_known else max((each.last_use for each in self), default=0)
        distances, never = uses.distances(now), 2 * uses.length
        costs_ms: dict[tuple[int, bool], float] = {}  # of what has the same size, and is or is not to be copied first
        scored = []
        for value in self._values.values():
            if not value.can_leave:
                continue
            size_bytes = value.size_bytes
            kind = size_bytes, value.is_copied or value.ticket is not None
            if kind not in costs_ms:
                costs_ms[kind] = cost_ms(value)
            ahead = distances.get(value.number, never) if distances else now - value.last_use
            scored.append((online_score(costs_ms[kind], size_bytes, ahead), value))
        return sorted(scored, key=itemgetter(0))

    def _distance(self, value: PersistentValue, now: int) -> float:
        """How far ahead its next use is. In the first step, what was used first is used last from now on."""
        if self._uses.are_known:
            return self._uses.distance(value.number, now)
        return now - value.last_use
