"""search.cpp in Python, draw by draw: the same offsets for the same rounds. Change both or none."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .instance import Instance

_DECODES = 30  # of one round of the search over orders, fewer if blocks are many
_PLACEMENTS = 15_000  # in one round of the search over orders, about
_MANY_BLOCKS = 3000  # of so many, each round draws one more weighing: moves gain little then
_LOOKS = 1000  # at neighbours, per block, of one round of ejections
_MOST_LOOKS = 2_000_000
_STALE_ROUNDS = 60  # without a better order, after which the search starts again
_SHIFTS = 2  # of neighbours, after a block took its place
_STEPS = 20  # the ceiling falls by this part of the way to the bound
_WORD = 2**64 - 1
_WHEN_LATE = 2**63 - 2  # a stop that only the clock meets
_PLACED_BETWEEN_LOOKS = 256  # at the clock, while a skyline is decoded


def decode(instance: Instance, order: Sequence[int]) -> list[int]:
    """Return the offsets of one order."""
    found = _Skyline(_Blocks(instance, float("inf"))).decode(order, None)
    assert found is not None, "nothing stops it"
    return found[1]


def search(
    instance: Instance,
    orders: Sequence[list[int]],
    seed: int,
    max_rounds: int,
    limit_s: float,
    start: list[int] | None = None,
) -> tuple[list[int], int]:
    """Return the offsets of the best layout that is found, and the rounds that were begun."""
    blocks = _Blocks(instance, time.thread_time() + limit_s)
    random, best = _Random(seed), _Best()
    order_search = _OrderSearch(blocks, orders, best)
    if start is not None:
        arena = max(offset + size for offset, size in zip(start, blocks.size, strict=True))
        if arena < best.arena:
            best.arena, best.offsets = arena, list(start)
    rounds = 0
    if best.arena > blocks.bound and max_rounds > 0 and not blocks.is_late():
        ejections = _Ejections(blocks, instance.granule_bytes, best)
        while rounds < max_rounds and best.arena > blocks.bound and not blocks.is_late():
            order_search.round(random)
            ejections.round(random)
            rounds += 1
    return best.offsets, rounds


def exhaust(instance: Instance, ceiling: int, max_nodes: int) -> list[int] | Literal[False] | None:
    """Return the offsets of an arena of at most `ceiling` bytes, False if there is none, None after `max_nodes`."""
    return _Exhaustive(_Blocks(instance, float("inf")), ceiling, max_nodes).visit(len(instance.sizes), 0, -1)


class _Exhaustive:
    """All layouts in which every block lies on another one or on the bottom, each once.

    Blocks are placed by ascending offset, on the skyline. A block is passed over only for one that begins below its
    top, since otherwise it could fall into the gap that is left.
    """

    def __init__(self, blocks: _Blocks, ceiling: int, max_nodes: int) -> None:
        self._in, self._ceiling, self._left = blocks, ceiling, max_nodes
        self._heights = [0] * blocks.n_times
        self._waiting_bytes = [0] * blocks.n_times
        self._is_placed = [False] * blocks.n
        self._offsets = [0] * blocks.n
        for block in range(blocks.n):
            self._wait(block, blocks.size[block])

    def _wait(self, block: int, size_bytes: int) -> None:
        for t in range(self._in.lower[block], self._in.upper[block]):
            self._waiting_bytes[t] += size_bytes

    def visit(self, waiting: int, floor: int, last: int) -> list[int] | Literal[False] | None:
        if waiting == 0:
            return self._offsets
        if self._left <= 0:
            return None
        self._left -= 1
        both = zip(self._heights, self._waiting_bytes, strict=True)
        if any(bytes_ > 0 and max(height, floor) + bytes_ > self._ceiling for height, bytes_ in both):
            return False
        blocks, heights = self._in, self._heights
        spans = {k: slice(blocks.lower[k], blocks.upper[k]) for k in range(blocks.n) if not self._is_placed[k]}
        lowest = {block: blocks.aligned(max(heights[span]), block) for block, span in spans.items()}
        tops = [offset + blocks.size[block] for block, offset in lowest.items()]
        lowest_top = min(tops)
        if max(tops) > self._ceiling:
            return False
        able = sorted((offset, block) for block, offset in lowest.items() if (offset, block) > (floor, last))
        for offset, block in able:
            if offset >= lowest_top:
                break
            before = heights[spans[block]]
            heights[spans[block]] = [offset + blocks.size[block]] * len(before)
            self._wait(block, -blocks.size[block])
            self._is_placed[block], self._offsets[block] = True, offset
            found = self.visit(waiting - 1, offset, block)
            if found is not False:
                return found
            self._is_placed[block] = False
            self._wait(block, blocks.size[block])
            heights[spans[block]] = before
        return False


class _Random:
    """SplitMix64."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, limit: int) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _WORD
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
        return ((mixed ^ (mixed >> 31)) >> 33) % limit


class _Blocks:
    """The instance as lists, which Python reads faster than arrays."""

    def __init__(self, instance: Instance, deadline_s: float) -> None:
        self.n, self.n_times, self.bound = len(instance.sizes), instance.n_times, instance.bound_bytes
        self.lower: list[int] = instance.lower.tolist()
        self.upper: list[int] = instance.upper.tolist()
        self.size: list[int] = instance.sizes.tolist()
        self.alignment: list[int] = instance.alignments.tolist()
        self._deadline_s = deadline_s

    def is_late(self) -> bool:
        return time.thread_time() >= self._deadline_s

    def aligned(self, offset: int, block: int) -> int:
        return -(-offset // self.alignment[block]) * self.alignment[block]


class _Best:
    def __init__(self) -> None:
        self.arena = 2**63 - 1
        self.offsets: list[int] = []


@dataclass(slots=True, eq=False)
class _Segment:
    start: int
    end: int
    height: int
    before: _Segment | None = None
    after: _Segment | None = None
    is_there: bool = True


@dataclass(frozen=True, slots=True)
class _Weighing:
    """How a skyline weighs times: those at which the least room is left count most.

    Attributes:
        width: in thousandths of the bytes without a place: what is so far below the fullest time counts least.
        floor: weight of the times that count least; that of the fullest is 1024 more.
        parts: how often the times are weighed.
    """

    width: int
    floor: int
    parts: int

    @classmethod
    def drawn(cls, random: _Random) -> _Weighing:
        width, floor = 40 + random.below(81), 5 + random.below(36)
        return cls(width, floor, 100 + random.below(301))


class _Skyline:
    """Best fit on a skyline: the lowest segment takes the unplaced block of the highest key that lives within it."""

    def __init__(self, blocks: _Blocks) -> None:
        self._in = blocks
        by_lower: list[list[int]] = [[] for _ in range(blocks.n_times)]
        for block in range(blocks.n):
            by_lower[blocks.lower[block]].append(block)
        self._by_lower = by_lower

    def decode(self, order: Sequence[int], stop: int | None) -> tuple[int, list[int]] | None:
        """Return the height and the offsets, or None once the height reaches `stop`. The first block comes first.

        With a `stop`, also None once it is late.
        """
        self._begin()
        self._key = [0] * self._in.n
        for rank, block in enumerate(order):
            self._key[block] = self._in.n - rank
        return self._run(stop, lambda block: None)

    def decode_weighing(self, weighing: _Weighing, stop: int | None) -> tuple[int, list[int], list[int]] | None:
        """Decode with keys by the weight of the times at which a block lives.

        Returns the order in which blocks were placed on top; it gives the same layout in `decode`.
        """
        self._begin()
        blocks, order = self._in, list[int]()
        part = max(1, blocks.n // weighing.parts)
        self._weigh(weighing)

        def placed(block: int) -> None:
            order.append(block)
            if len(order) % part == 0 and len(order) < blocks.n:
                self._weigh(weighing)

        found = self._run(stop, placed)
        return None if found is None else (*found, order)

    def _begin(self) -> None:
        self._unplaced = [list(each) for each in self._by_lower]
        self._queue: list[tuple[int, int, int, _Segment]] = []
        self._pushed = 0
        self._push(_Segment(0, self._in.n_times - 1, 0))

    def _run(self, stop: int | None, placed: Callable[[int], None]) -> tuple[int, list[int]] | None:
        blocks = self._in
        offsets, height, left = [0] * blocks.n, 0, blocks.n
        while left:
            key_height, key_start, _, segment = heapq.heappop(self._queue)
            if not segment.is_there or segment.height != key_height or segment.start != key_start:
                continue
            first = self._first_within(segment)
            if first is None:
                self._lift(segment)
                continue
            block = first
            offsets[block] = blocks.aligned(segment.height, block)
            top = offsets[block] + blocks.size[block]
            height = max(height, top)
            if stop is not None and height >= stop:
                return None
            self._unplaced[blocks.lower[block]].remove(block)
            self._put(segment, block, top)
            left -= 1
            if left and left % _PLACED_BETWEEN_LOOKS == 0 and stop is not None and blocks.is_late():
                return None
            placed(block)
        return height, offsets

    def _weigh(self, weighing: _Weighing) -> None:
        blocks = self._in
        changes, heights = [0] * (blocks.n_times + 1), [0] * blocks.n_times
        for block in (block for beginning in self._unplaced for block in beginning):
            changes[blocks.lower[block]] += blocks.size[block]
            changes[blocks.upper[block]] -= blocks.size[block]
        waiting_bytes = list(accumulate(changes))[:-1]
        for _, _, _, each in self._queue:
            if each.is_there:
                heights[each.start : each.end] = [each.height] * (each.end - each.start)
        fullest = max(height + bytes_ for height, bytes_ in zip(heights, waiting_bytes, strict=True) if bytes_)
        fullest = max(fullest, blocks.bound)
        width = max(1, int(float(max(waiting_bytes)) * float(weighing.width) / 1000.0))
        sums = [0]
        for height, bytes_ in zip(heights, waiting_bytes, strict=True):
            within = height + bytes_ - (fullest - width)
            weight = int(1024.0 * float(within) / float(width)) if bytes_ > 0 and within > 0 else 0
            sums.append(sums[-1] + weighing.floor + weight)
        self._key = [sums[blocks.upper[block]] - sums[blocks.lower[block]] for block in range(blocks.n)]

    def _push(self, segment: _Segment) -> None:
        self._pushed += 1  # so that segments are never compared
        heapq.heappush(self._queue, (segment.height, segment.start, self._pushed, segment))

    def _first_within(self, segment: _Segment) -> int | None:
        upper, end = self._in.upper, segment.end
        inside = [b for beginning in self._unplaced[segment.start : end] for b in beginning if upper[b] <= end]
        return max(inside, key=self._key.__getitem__, default=None)  # the first of several

    def _lift(self, segment: _Segment) -> None:
        before, after = segment.before, segment.after
        segment.height = min(each.height for each in (before, after) if each is not None)
        if before is not None and before.height == segment.height:
            before.is_there = False
            segment.start, segment.before = before.start, before.before
            if before.before is not None:
                before.before.after = segment
        if after is not None and after.height == segment.height:
            after.is_there = False
            segment.end, segment.after = after.end, after.after
            if after.after is not None:
                after.after.before = segment
        self._push(segment)

    def _put(self, old: _Segment, block: int, top: int) -> None:
        """Split the segment into the part before the block, the block's top, and the part after it."""
        old.is_there = False
        begin, end = self._in.lower[block], self._in.upper[block]
        parts = [(old.start, begin, old.height)] if old.start < begin else []
        last, after = old.before, old.after
        if old.start == begin and last is not None and last.height == top:
            last.end = end
        else:
            parts.append((begin, end, top))
        if end < old.end:
            parts.append((end, old.end, old.height))
        for part in parts:
            added = _Segment(*part, before=last)
            if last is not None:
                last.after = added
            self._push(added)
            last = added
        assert last is not None, "there is a part, or the block's top went to the segment before"
        if end == old.end and after is not None and after.height == top:
            last.end = after.end
            after.is_there = False
            after = after.after
        last.after = after
        if after is not None:
            after.before = last


class _OrderSearch:
    """Local search over the decoder's orders: blocks are moved, rather those that end above the bound.

    Each round begins with skylines that weigh times, and goes on from one that is better.
    """

    def __init__(self, blocks: _Blocks, orders: Sequence[list[int]], best: _Best) -> None:
        self._in, self._skyline, self._orders, self._best = blocks, _Skyline(blocks), orders, best
        best_start = 0
        for k, order in enumerate(orders):
            if k > 0 and (best.arena <= blocks.bound or blocks.is_late()):
                break
            found = self._skyline.decode(order, best.arena if k else None)
            if found is not None:
                best.arena, best.offsets = found
                best_start = k
        self._order, self._height, self._current = orders[best_start], best.arena, best.offsets
        self._stale_rounds = 0

    def round(self, random: _Random) -> None:
        before = self._height
        for _ in range(1 + self._in.n // _MANY_BLOCKS):
            if self._best.arena <= self._in.bound or self._in.is_late():
                break
            drawn = self._skyline.decode_weighing(_Weighing.drawn(random), self._height)
            if drawn is not None:
                self._take(*drawn[:2])
                self._order = drawn[2]
        for _ in range(min(_PLACEMENTS // self._in.n, _DECODES)):
            if self._best.arena <= self._in.bound or self._in.is_late():
                break
            tried = list(self._order)
            for _ in range(1 + random.below(3)):
                self._move_one(tried, random)
            found = self._skyline.decode(tried, self._height + 1)
            if found is not None:
                self._take(*found)
                self._order = tried
        self._stale_rounds = 0 if self._height < before else self._stale_rounds + 1
        if self._stale_rounds >= _STALE_ROUNDS:
            self._stale_rounds = 0
            self._order = self._orders[random.below(len(self._orders))]
            found = self._skyline.decode(self._order, _WHEN_LATE)
            if found is not None:
                self._take(*found)

    def _take(self, height: int, offsets: list[int]) -> None:
        self._height, self._current = height, offsets
        if height < self._best.arena:
            self._best.arena, self._best.offsets = height, offsets

    def _move_one(self, order: list[int], random: _Random) -> None:
        blocks = self._in
        start = random.below(blocks.n)
        if random.below(2) == 1:
            tries = 0
            while tries < 200 and self._current[order[start]] + blocks.size[order[start]] <= blocks.bound:
                start = random.below(blocks.n)
                tries += 1
        end = random.below(start + 1 if random.below(2) == 1 else blocks.n)
        order.insert(end, order.pop(start))


class _Ejections:
    """Ejections under a ceiling below the best arena.

    A block that has no place takes the one where it ejects the blocks of the least weight, and gains weight itself;
    some of its neighbours shift. Once all have a place, the ceiling falls.
    """

    def __init__(self, blocks: _Blocks, granule: int, best: _Best) -> None:
        self._in, self._granule, self._best = blocks, granule, best
        self._known_arena: int | None = None
        self._by_lower = sorted(range(blocks.n), key=blocks.lower.__getitem__)

    def round(self, random: _Random) -> None:
        looks = k = 0
        while looks < min(_LOOKS * self._in.n, _MOST_LOOKS) and self._best.arena > self._in.bound:
            if k % 16 == 0 and self._in.is_late():
                return
            if self._known_arena != self._best.arena:
                self._lower_ceiling(self._best.arena)
            looks += 1 + self._place_one(random)
            if not self._homeless:
                self._settle()
            k += 1

    def _lower_ceiling(self, arena: int) -> None:
        blocks, granule = self._in, self._granule
        self._known_arena = arena
        self._offsets = list(self._best.offsets)
        self._ceiling = max(blocks.bound, arena - max(granule, (arena - blocks.bound) // _STEPS // granule * granule))
        self._weight = [1] * blocks.n
        self._is_placed = [self._offsets[each] + blocks.size[each] <= self._ceiling for each in range(blocks.n)]
        self._homeless = [block for block in range(blocks.n) if not self._is_placed[block]]

    def _settle(self) -> None:
        """Let every block fall as low as those under it permit, and keep that as the best layout."""
        blocks, offsets = self._in, self._offsets
        heights = [0] * blocks.n_times
        for block in sorted(range(blocks.n), key=offsets.__getitem__):
            start, end = blocks.lower[block], blocks.upper[block]
            offsets[block] = blocks.aligned(max(heights[start:end]), block)
            heights[start:end] = [offsets[block] + blocks.size[block]] * (end - start)
        self._best.arena, self._best.offsets = max(heights), list(offsets)

    def _neighbours(self, block: int) -> list[int]:
        blocks, start, end = self._in, self._in.lower[block], self._in.upper[block]
        return [b for b in self._by_lower if blocks.upper[b] > start and blocks.lower[b] < end and b != block]

    def _place_one(self, random: _Random) -> int:
        blocks, offsets, homeless = self._in, self._offsets, self._homeless
        chosen = len(homeless) - 1 if random.below(2) == 1 else random.below(len(homeless))
        block = homeless[chosen]
        homeless[chosen] = homeless[-1]
        homeless.pop()
        others = self._neighbours(block)
        position, weight = self._lightest_position(block, others, random)
        offsets[block] = start = position * blocks.alignment[block]
        end = start + blocks.size[block]
        for other in others:
            if self._is_placed[other] and start < offsets[other] + blocks.size[other] and offsets[other] < end:
                self._is_placed[other] = False
                homeless.append(other)
        self._weight[block] += weight > 0
        self._is_placed[block] = True
        if not others:
            return 0
        shifted = [others[random.below(len(others))] for _ in range(_SHIFTS)]
        return len(others) + sum(self._shift(other, random) for other in shifted)

    def _shift(self, block: int, random: _Random) -> int:
        """Move a block to another place where it is free to lie, so that the gaps about it change."""
        if not self._is_placed[block]:
            return 0
        others = self._neighbours(block)
        position, _ = self._lightest_position(block, others, random)
        self._offsets[block] = position * self._in.alignment[block]
        return len(others)

    def _lightest_position(self, block: int, others: list[int], random: _Random) -> tuple[int, int]:
        """Return a position, in units of the block's alignment, where it ejects the least weight, and that weight."""
        highest = (self._ceiling - self._in.size[block]) // self._in.alignment[block]
        weight, changes = self._conflicts(block, others, highest)
        lightest, least, ties = 0, weight, 1
        for key in [*sorted(changes), None]:
            # A conflict that begins at a position is open: the position itself is still free.
            after = weight if key is None else weight + changes[key]
            considered = weight if key is None or key % 2 == 1 else after
            position = highest if key is None else key // 2
            if considered < least:
                lightest, least, ties = position, considered, 1
            elif considered == least:
                ties += 1
                if random.below(ties) == 0:
                    lightest = position
            weight = after
        return lightest, least

    def _conflicts(self, block: int, others: list[int], highest: int) -> tuple[int, dict[int, int]]:
        """Return the weight in conflict at position 0 and its changes, at twice the position (+ 1 where one begins)."""
        blocks, unit = self._in, self._in.alignment[block]
        weight, changes = 0, dict[int, int]()
        for other in others:
            if not self._is_placed[other]:
                continue
            begin = (self._offsets[other] - blocks.size[block]) // unit
            end = -(-(self._offsets[other] + blocks.size[other]) // unit)
            if begin >= highest:
                continue
            if begin < 0:
                weight += self._weight[other]
            else:
                changes[2 * begin + 1] = changes.get(2 * begin + 1, 0) + self._weight[other]
            if end <= highest:
                changes[2 * end] = changes.get(2 * end, 0) - self._weight[other]
        return weight, changes
