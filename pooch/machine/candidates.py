"""The values that can leave, in the order in which they leave, without a look at all of them each time.

The score of a value is its price (what leaving costs, per byte) divided by a function of its distance to the position
of the backward pass: see `eviction.py`. When the position moves, all scores move, so no order by score lasts. But of
values with the same price, the one that was saved first always has the lowest score. So values are kept by price, in
buckets that are a quarter of an octave wide, each in the order of saving, and only the first of each is scored.

Prices that have grown are noticed when a value comes first; of prices that may have shrunk, somebody has to tell.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from .eviction import EvictionPolicy, distance, priced_score
from .recipes import NEVER_MS
from .values import Value

_BUCKETS_PER_OCTAVE = 4
_FREE, _NEVER = -(10**6), 10**6  # the buckets of what costs nothing, and of what cannot leave in any way
_LOOKED_AT = 16  # of those that could not leave before, each time

_Entry = tuple[int, int, float, Value]  # saved at, serial number, price, value


class _Heads:
    """The first of each bucket, by score, from one position. Most looks need little more.

    Args:
        buckets: The entries in each, as a heap, with some that are valid no more.
        entries: Those that are valid, by value.
        position: Of the backward pass.

    Attributes:
        bucket: The bucket of what `pop` returned last.
    """

    def __init__(self, buckets: dict[int, list[_Entry]], entries: dict[Value, _Entry], position: float) -> None:
        self._buckets, self._entries, self._position = buckets, entries, position
        self.bucket = _NEVER
        firsts = [(self._first(bucket), bucket) for bucket in list(buckets)]
        able = ((entry, bucket) for entry, bucket in firsts if entry is not None and bucket != _NEVER)
        self._heap = [(priced_score(entry[2], position, entry[0]), bucket) for entry, bucket in able]
        # By bucket. Those that were pushed again are in the heap several times, and the last one counts.
        self._scores = {bucket: score for score, bucket in self._heap}
        heapq.heapify(self._heap)

    def pop(self) -> _Entry | None:
        """Return the first of all, which stays where it is, or None."""
        while self._heap:
            score, self.bucket = heapq.heappop(self._heap)
            if self._scores.get(self.bucket) != score:
                continue
            entry = self._first(self.bucket)
            if entry is None:
                continue
            if priced_score(entry[2], self._position, entry[0]) <= score:
                return entry
            self.push(self.bucket)  # another one has become the first of the bucket
        return None

    def push(self, bucket: int) -> None:
        """Look at a bucket again, as another entry may be the first."""
        entry = None if bucket == _NEVER else self._first(bucket)
        if entry is not None:
            self._scores[bucket] = score = priced_score(entry[2], self._position, entry[0])
            heapq.heappush(self._heap, (score, bucket))

    def _first(self, bucket: int) -> _Entry | None:
        """Return the first of a bucket that is still valid, or None, and then there is no bucket any more."""
        entries, valid = self._buckets.get(bucket), self._entries.get
        while entries:
            if valid(entries[0][-1]) is entries[0]:
                return entries[0]
            heapq.heappop(entries)
        self._buckets.pop(bucket, None)
        return None


class Candidates:
    """The values that can leave.

    Args:
        everything: All values that may be among them, in the order of saving.
        can_leave: Whether a value can leave now.
        cost_ms: What leaving costs, in the cheaper way; infinity if there is none.
    """

    def __init__(
        self,
        everything: Iterable[Value],
        can_leave: Callable[[Value], bool],
        cost_ms: Callable[[Value], float],
    ) -> None:
        self._everything, self._can_leave, self._cost_ms = everything, can_leave, cost_ms
        self._entries: dict[Value, _Entry] = {}  # as they are valid: buckets have old ones as well
        self._buckets: dict[int, list[_Entry]] = {}
        self._entering: dict[Value, float | None] = {}  # with their prices, or None if these are to be computed
        self._staying: OrderedDict[Value, None] = OrderedDict()  # what could not leave when it was its turn
        self._serial = 0

    def add(self, value: Value) -> None:
        """Add a value, or have its price computed again, which may have shrunk."""
        self._entering[value] = None

    def discard(self, value: Value) -> None:
        """Remove a value, if it is there."""
        self._entering.pop(value, None)
        self._staying.pop(value, None)
        if self._entries.pop(value, None) is not None and not self._entries:
            self._buckets.clear()  # old entries would keep what has ended

    def cheapest(self, position: float) -> Iterator[Value]:
        """Yield values in the order in which they leave, each once. What is still here later is yielded again then.

        Args:
            position: of the backward pass, in the order of saving.
        """
        self._price_anew()
        yield from self._in_order(position)
        if self._look_at_the_rest():
            yield from self._in_order(position)

    def _in_order(self, position: float) -> Iterator[Value]:
        heads = _Heads(self._buckets, self._entries, position)
        while (entry := heads.pop()) is not None:
            bucket, value = heads.bucket, entry[-1]
            heapq.heappop(self._buckets[bucket])
            del self._entries[value]
            if value.storage is not None:
                if not self._can_leave(value):
                    self._staying[value] = None
                else:
                    price = self._price(value)
                    if (now := _bucket(price)) <= bucket:
                        self._entering[value] = price  # with the next look, if it is still there
                        yield value
                    else:
                        self._enter(value, price)
                        heads.push(now)
            heads.push(bucket)

    # Prices -----------------------------------------------------------------------------------------------------------

    def _price_anew(self) -> None:
        """Price what has come or may have become cheaper, and look at some of those that could not leave before."""
        entering, self._entering = self._entering, {}
        for value, price in entering.items():
            self._enter(value, price)
        for _ in range(min(_LOOKED_AT, len(self._staying))):
            self._enter_or_stay(self._staying.popitem(last=False)[0])

    def _look_at_the_rest(self) -> bool:
        """Look at all that has not had its turn, and return whether there is anything."""
        for value in [each for each in self._staying if not each.is_shared]:
            self._enter_or_stay(value)
        never = [entry[-1] for entry in self._buckets.pop(_NEVER, ()) if self._entries.get(entry[-1]) is entry]
        for value in never:
            self._enter(value)
        entries, entering, staying = self._entries, self._entering, self._staying
        for value in self._everything:  # where all are looked at, most are away, or stay for good
            if value.storage is None or value.is_shared:
                continue
            if not (value in entries or value in entering or value in staying):
                self._enter_or_stay(value)
        return any(bucket != _NEVER for bucket in self._buckets)

    def _enter_or_stay(self, value: Value) -> None:
        self._staying.pop(value, None)
        if value in self._entries or value in self._entering:
            return
        if self._can_leave(value):
            self._enter(value)
        elif value.storage is not None:
            self._staying[value] = None

    def _enter(self, value: Value, price: float | None = None) -> None:
        self._entries.pop(value, None)
        if value.storage is None:
            return
        if price is None or value.ticket is not None:  # with a copy it is cheaper as soon as that is done
            price = self._price(value)
        self._serial += 1
        entry = self._entries[value] = (value.saved_at, self._serial, price, value)
        heapq.heappush(self._buckets.setdefault(_bucket(price), []), entry)

    def _price(self, value: Value) -> float:
        return self._cost_ms(value) / (value.size_bytes or 1)


def ranked(
    everything: Iterable[Value],
    can_leave: Callable[[Value], bool],
    cost_ms: Callable[[Value], float],
    policy: EvictionPolicy,
    position: float,
) -> Iterator[Value]:
    """Yield values in the order in which they leave by a policy that scores each anew, or looks only at some.

    A score that has grown since it was computed is computed again.

    Args:
        everything: All values that may be among them, in the order of saving.
        can_leave: Whether a value can leave now.
        cost_ms: What leaving costs, in the cheaper way; infinity if there is none.
        policy: The policy.
        position: Of the backward pass, in the order of saving.
    """

    def score(value: Value) -> float:
        return policy.score(value, cost_ms(value), distance(position, value.saved_at))

    def scored() -> list[tuple[float, int, Value]]:
        looked_at = [value for value in everything if can_leave(value)]
        if policy.sample is not None:
            able = [value for value in looked_at if cost_ms(value) < NEVER_MS]
            looked_at = policy.sample(able) if able else []
        heap = [(score(value), place, value) for place, value in enumerate(looked_at)]
        heapq.heapify(heap)
        return heap

    heap = scored()
    while heap:
        before, place, value = heapq.heappop(heap)
        now = score(value)
        if heap and now > heap[0][0] and now > before:
            heapq.heappush(heap, (now, place, value))
            continue
        yield value
        if value.storage is None and policy.sample is not None:
            heap = scored()  # others may be looked at now


def _bucket(price: float) -> int:
    if price <= 0:
        return _FREE
    return _NEVER if price >= NEVER_MS else math.floor(math.log2(price) * _BUCKETS_PER_OCTAVE)
