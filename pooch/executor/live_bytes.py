"""How many bytes are live now: from an allocator that counts, on every device."""

from __future__ import annotations

import ctypes
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial

import torch

from ..ground.errors import UsageError
from ..machine.account import LiveBytes, MakeRoom
from ..torchtools import accelerators
from ..torchtools.cpu_allocator import CountingAllocator, counting_allocator
from ..torchtools.endings import end_with
from ..torchtools.function_modes import past_subclasses
from ..torchtools.memory_trace import live_bytes, live_tensors
from ..torchtools.ranks import EarlierBuckets
from ..torchtools.tensors import has_own_memory, storage_key, storage_of
from ..torchtools.watch import address_of, is_away

_TIMES_A_WALK = 5  # the time between two walks over all tensors


class CountedBytes(LiveBytes):
    """Live bytes of the CPU, from the counting allocator.

    What was alive before the allocator was installed, and what something else has allocated, is counted once. If it is
    freed later, the count is too high by that until `recount`.

    Args:
        allocator: The allocator. It is removed by `close`, or when this is freed, as where making a budget failed.
        reads_peak: Whether `peak` and `reset_peak` are used: of all who count, one may.
        live_now_bytes: What is live now, where that is known. None: it is counted.

    Attributes:
        is_in_place: Whether the allocator could be installed: False if another one than PyTorch's is in place.
        addresses: Where live bytes, the peak, and what was missed are counted.
        has_given_up: Whether nobody is asked for room, as nothing could leave.
    """

    asks = True

    def __init__(
        self, allocator: CountingAllocator, *, reads_peak: bool = True, live_now_bytes: int | None = None
    ) -> None:
        self._allocator, self._reads_peak = allocator, reads_peak
        self._live, self._peak, self._missed = allocator.live, allocator.peak, allocator.missed
        self.addresses = tuple(ctypes.addressof(each) for each in (self._live, self._peak, self._missed))
        user = object()
        self._remove = end_with(self, allocator.remove, user)
        # What was counted, by where it was, with its bytes. Storages: PyTorch swaps no tensors with weak references.
        self._earlier: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._earlier_bytes = 0
        self._given: set[int] = set()  # of these addresses, those of what steps were given
        self._told: set[int] = set()  # addresses of what somebody else tells the end of
        self._counted_at: set[int] | None = set()  # the addresses of what was counted; None: they are not known
        self._buckets = EarlierBuckets()
        self._make_room: MakeRoom | None = None
        self._budget_bytes = 0
        self.has_given_up = False
        self.is_in_place = allocator.install(user, reads_peak=reads_peak)
        if self.is_in_place and live_now_bytes is None:
            self.recount()
        elif self.is_in_place and live_now_bytes is not None:
            self._earlier_bytes = live_now_bytes - allocator.live_bytes()  # below zero, if others count more
            self._counted_at = None

    @past_subclasses
    def recount(self, *, if_less: bool = False) -> None:
        """Count again what is alive from before the installation. It walks all Python objects.

        Args:
            if_less: Only if some of what was counted is gone. With large libraries loaded, a walk can take as long as a
                step.
        """
        if if_less and all(map(self._is_where_it_was, self._earlier)) and not self._buckets.has_changed("cpu"):
            return
        found = {storage_key(tensor): tensor for tensor in live_tensors()}
        there = [storage_of(tensor) for key, tensor in found.items() if not is_away(key)]
        unknown = [storage for storage in there if not self._allocator.knows(address_of(storage))]
        unknown.sort(key=torch.UntypedStorage.nbytes)  # of several on the same memory the largest counts
        self._earlier = {address_of(storage): (weakref.ref(storage), storage.nbytes()) for storage in unknown}
        self._earlier_bytes = sum(size_bytes for _, size_bytes in self._earlier.values()) + self._buckets.count("cpu")
        self._counted_at = set(self._earlier)
        self._given &= self._counted_at
        self._told &= self._counted_at  # others have ended without a word

    def count_given(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count what a step is given and no allocation has told of, and no longer what is gone of that.

        Args:
            tensors: What it is given.
        """
        if self._counted_at is None:
            return
        change_bytes = 0
        for address in [each for each in self._given if not self._is_where_it_was(each)]:
            self._given.discard(address)
            self._counted_at.discard(address)
            change_bytes -= self._earlier.pop(address)[1]
        for tensor in tensors:
            if tensor.device.type != "cpu" or not has_own_memory(tensor) or is_away(storage_key(tensor)):
                continue
            storage = storage_of(tensor)
            address = address_of(storage)
            if self._allocator.knows(address) or address in self._told:
                continue
            self._given.add(address)
            if address not in self._earlier:
                self._earlier[address] = weakref.ref(storage), storage.nbytes()
                self._counted_at.add(address)
                change_bytes += storage.nbytes()
        if change_bytes:
            self._add_earlier(change_bytes)

    def _is_where_it_was(self, address: int) -> bool:
        """Whether a storage is alive and has the memory that it had. It may have been given other memory."""
        storage = self._earlier[address][0]()
        return storage is not None and address_of(storage) == address

    def now(self) -> int:
        """Live bytes."""
        return self._earlier_bytes + self._live.value

    def peak(self) -> int:
        """Highest live bytes since `reset_peak`."""
        return self._earlier_bytes + self._peak.value

    def reset_peak(self) -> None:
        """Begin to look for the highest live bytes from now on."""
        if self._reads_peak:
            self._peak.value = self._live.value
        self._missed.value = 0

    def give_up(self) -> None:
        """Ask for no room until `resume`, as nothing can leave: a plain step allocates thousands of times."""
        self.has_given_up = True
        self._allocator.give_up()

    def resume(self) -> None:
        """Ask for room again."""
        if self.has_given_up:
            self.has_given_up = False
            self._allocator.resume()

    def missed_bytes(self) -> int:
        """The most by which the budget was passed since `reset_peak` while room was given up."""
        return self._missed.value

    def uncounted(self, address: int, size_bytes: int) -> Callable[[int], None] | None:
        """Return what is to be called when bytes end that were there before the allocator, or came past it.

        Those that came since the last count, as by unpickling, are counted now.
        """
        if self._allocator.knows(address):
            return None
        self._given.discard(address)
        self._told.add(address)
        if self._counted_at is not None and address not in self._counted_at:
            self._counted_at.add(address)
            self._add_earlier(size_bytes)
        return partial(self._ended, address)

    def _ended(self, address: int, ended_bytes: int) -> None:
        """Count bytes no longer, whose end somebody else has told."""
        self._told.discard(address)
        self._earlier.pop(address, None)
        if self._counted_at is not None:
            self._counted_at.discard(address)
        self._add_earlier(-ended_bytes)

    def _add_earlier(self, size_bytes: int) -> None:
        self._earlier_bytes += size_bytes
        if size_bytes < 0 and self._reads_peak:
            self._peak.value -= size_bytes  # what has ended was there at the peak
        if self._make_room is not None:
            self._allocator.set_limit(self._budget_bytes - self._earlier_bytes, self._make_room)

    def look(self) -> tuple[int, int] | None:
        """Return None, since allocations ask for room by themselves."""
        return None

    def hold(self, budget_bytes: int, make_room: MakeRoom) -> None:
        """Ask for room before live bytes pass the budget, in threads that `ask`."""
        self._budget_bytes, self._make_room = budget_bytes, make_room
        self.has_given_up = False
        self._allocator.set_limit(budget_bytes - self._earlier_bytes, make_room)

    def ask(self, asks: bool) -> None:
        """Set whether the calling thread asks for room."""
        self._allocator.ask_for_room(asks)

    def let_go(self) -> None:
        """Have no room asked for from now on; counting goes on."""
        if self._make_room is not None:
            self._allocator.lift_limit(self._make_room)

    def raise_failure(self) -> None:
        """Raise what went wrong while an allocation asked for room, in the middle of an op that could not raise it."""
        self._allocator.raise_failure()

    def close(self) -> None:
        """Stop counting."""
        if self._remove.alive:
            self.let_go()
            self._buckets.close()
            self._remove()


class DeviceBytes(LiveBytes):
    """Live bytes of a device whose caching allocator keeps counters. Nothing asks: room is made before each op."""

    asks = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak_bytes = accelerators.peak_allocated_bytes(device)

    def look(self) -> tuple[int, int] | None:
        """Live bytes now, and by how much they were higher since the last look."""
        now = accelerators.allocated_bytes(self._device)
        since = accelerators.peak_allocated_bytes(self._device)
        self._peak_bytes = max(self._peak_bytes, since)
        accelerators.reset_peaks(self._device)
        return now, since - now

    def now(self) -> int:
        """Live bytes."""
        return accelerators.allocated_bytes(self._device)

    def peak(self) -> int:
        """Highest live bytes since `reset_peak`."""
        return max(self._peak_bytes, accelerators.peak_allocated_bytes(self._device))

    def reset_peak(self) -> None:
        """Begin to look for the highest live bytes from now on."""
        self._peak_bytes = 0
        accelerators.reset_peaks(self._device)


class WalkedBytes(LiveBytes):
    """Live bytes of a CPU without the counting allocator: a walk over all tensors, now and then.

    Between two walks the last figure stands, so a budget is only held with a margin.
    """

    asks = False

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._peak_bytes = self._last_bytes = 0
        self._again_s = 0.0

    def _is_due(self) -> bool:
        """Whether the last walk took only a small share of the time since."""
        return time.perf_counter() >= self._again_s

    def look(self) -> tuple[int, int] | None:
        """Live bytes now, unless the last walk took a large share of the time since."""
        return (self.now(), 0) if self._is_due() else None

    def recent(self) -> int:
        """Live bytes at the last walk, or now if the next one is due."""
        return self.now() if self._is_due() else self._last_bytes

    def now(self) -> int:
        """Live bytes of the tensors that Python knows."""
        begin_s = time.perf_counter()
        self._last_bytes = live_bytes(self._device)
        end_s = time.perf_counter()
        self._again_s = end_s + _TIMES_A_WALK * (end_s - begin_s)
        self._peak_bytes = max(self._peak_bytes, self._last_bytes)
        return self._last_bytes

    def peak(self) -> int:
        """Highest of the figures since `reset_peak`."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Begin to look for the highest live bytes from now on."""
        self._peak_bytes = 0

    def blind_ms(self) -> float | None:
        """The time of a walk, and of what may come between two of them."""
        begin_s = time.perf_counter()
        self.now()
        return (1 + _TIMES_A_WALK) * (time.perf_counter() - begin_s) * 1000


def live_bytes_of(device: torch.device) -> CountedBytes | DeviceBytes | WalkedBytes:
    """Return the best counter for a device.

    Raises:
        UsageError: If it is neither a CPU nor a device with streams.
    """
    if accelerators.has_streams(device):
        return DeviceBytes(device)
    if device.type != "cpu":
        raise UsageError(f"the memory of devices of type {device.type!r} cannot be counted: use a CPU or a GPU")
    allocator = counting_allocator()
    if isinstance(allocator, str):
        why = allocator
    elif (counted := CountedBytes(allocator)).is_in_place:
        return counted
    else:
        why = "another CPU allocator is in place"
    _warn(why)
    return WalkedBytes()


@cache
def _warn(why: str) -> None:
    warnings.warn(
        f"no counting allocator ({why}): bytes are counted between ops only, so peaks within ops may exceed the budget",
        stacklevel=4,
    )
