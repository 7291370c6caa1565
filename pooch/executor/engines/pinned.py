"""Page-locked host memory of exactly the requested size, and keeping it from one engine to the next.

What cannot be locked is ordinary memory, if whoever asks takes that: copies there are slower, and the host waits for
them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from ...ground.errors import TierError
from ...ground.units import format_bytes
from ...torchtools import accelerators, cuda_only
from ...torchtools.device_memory import free_bytes
from ...torchtools.endings import end_with
from ...torchtools.touched_pages import touch_pages

_HOST = torch.device("cpu")


PART_BYTES = 4 * 2**30  # of what is locked at once; much larger parts are refused on some systems
# Left to the system and the program: a machine whose memory is locked to the last page swaps, or ends somebody.
RESERVE_BYTES = 256 * 2**20
_LEAST_PART_BYTES = 2**20  # where PyTorch locks, which rounds each part up to a power of two
VARIABLE = "POOCH_PAGE_LOCKED"  # "0": nothing is locked
SWITCHED_OFF = f"{VARIABLE}=0"
Locking = Literal["must", "try", "never"]


class PinnedBlock:
    """Page-locked host memory that copy streams access directly.

    PyTorch rounds its own pinned blocks up to a power of two. On CUDA this block consists of anonymous mappings
    instead: each begins at a page boundary (a page cannot be locked twice), returns to the system at once, and is
    shared with forks rather than copied while the device uses it. Other accelerators cannot lock existing memory, and
    use PyTorch's, in parts that are powers of two.

    Args:
        size_bytes: Number of bytes to lock. They lie in parts of at most `PART_BYTES`.
        device: A device with streams, synchronized before the memory is unlocked.
        locking: "must": nothing but locked memory will do. "try": from the first part on that cannot be locked, the
            rest is ordinary memory. "never": all of it is.

    Attributes:
        pageable_bytes: How much of it is ordinary memory.
        why_pageable: Why, in a few words.

    Raises:
        TierError: If the process cannot have that much memory, or it cannot be locked and has to be.
    """

    def __init__(self, size_bytes: int, device: torch.device, locking: Locking = "must") -> None:
        self.size_bytes, self.device, self.fitted_at = size_bytes, device, 0
        self.pageable_bytes, self.why_pageable = 0, SWITCHED_OFF if locking == "never" else ""
        self.in_use_until: tuple[torch.Event, ...] = ()  # ends of the last copies, which the next step waits for
        _refuse_more_than_there_is(size_bytes)
        take, sizes = (
            (_locked, _exact_sizes(size_bytes))
            if cuda_only.locks_in_place(device)
            else (_from_pytorch, _powers_of_two(size_bytes))
        )
        self._parts: list[_Part] = []
        try:
            for part_bytes in sizes:
                self._parts.append(self._taken(take, part_bytes, locking))
        except TierError:
            self.unlock()
            raise

    def _taken(self, take: Take, part_bytes: int, locking: Locking) -> _Part:
        """Take a part. All that follow one that cannot be locked are not tried, which takes time."""
        if not self.why_pageable:
            try:
                return take(self, part_bytes)
            except _NotLocked as error:
                if locking == "must":
                    raise
                self.why_pageable = error.why
        self.pageable_bytes += part_bytes
        return _Part(_mapped(part_bytes, self.device)[1], _nothing)

    @property
    def parts(self) -> list[torch.Tensor]:
        """The bytes, in their order."""
        return [part.bytes for part in self._parts]

    def pieces(self, offset_bytes: int, size_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Give the bytes from an offset on, part by part, each with its distance from the offset."""
        begin, place = offset_bytes, 0
        for part in self._parts:
            length = min(part.bytes.numel() - begin, size_bytes - place)
            if begin < part.bytes.numel() and length > 0:
                yield place, part.bytes[begin : begin + length]
                place += length
            begin = max(0, begin - part.bytes.numel())

    def unlock(self) -> None:
        """Unlock and release all parts."""
        for part in self._parts:
            part.unlock()


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes, and the function that unlocks them."""

    bytes: torch.Tensor
    unlock: Callable[[], object]


Take = Callable[[PinnedBlock, int], _Part]


class _NotLocked(TierError):
    """Memory is there, and cannot be locked.

    Args:
        size_bytes: How much of it.
        why: In a few words.
    """

    def __init__(self, size_bytes: int, why: str) -> None:
        text = f"{size_bytes} bytes of host memory cannot be page-locked ({why}): set a smaller host budget"
        super().__init__(text, "locking")
        self.why = why


def locking_wanted() -> Locking:
    """How engines lock memory that are not told otherwise."""
    return "never" if os.environ.get(VARIABLE) == "0" else "try"


def _nothing() -> None:
    """Do nothing: the memory goes with the last reference to it."""


def _exact_sizes(size_bytes: int) -> list[int]:
    """Return the sizes of parts that are as large as possible."""
    whole, rest = divmod(size_bytes, PART_BYTES)
    return [PART_BYTES] * whole + ([rest] if rest else [])


def _powers_of_two(size_bytes: int) -> list[int]:
    """Return powers of two that add up to a size, but for the last one, which is rounded up to a small one."""
    sizes = []
    while size_bytes > 0:
        part_bytes = min(PART_BYTES, 1 << (size_bytes.bit_length() - 1))
        sizes.append(size_bytes if part_bytes < _LEAST_PART_BYTES else part_bytes)
        size_bytes -= sizes[-1]
    return sizes


def _refuse_more_than_there_is(size_bytes: int) -> None:
    """Refuse what the process cannot have.

    Raises:
        TierError: It names the largest host budget that there is room for now.
    """
    available_bytes = free_bytes(_HOST)
    reserve_bytes = RESERVE_BYTES if size_bytes > RESERVE_BYTES else 0
    if size_bytes + reserve_bytes > available_bytes:
        most_bytes = max(0, available_bytes - RESERVE_BYTES)
        room = f"at most {format_bytes(most_bytes)} ({most_bytes} bytes)" if most_bytes else "less"
        raise TierError(
            f"swapping needs {size_bytes} bytes of host memory, {available_bytes} are available: "
            f"set a smaller host budget, {room}",
            "host memory",
        )


def _locked(block: PinnedBlock, part_bytes: int) -> _Part:
    """Return a locked mapping."""
    mapping, contents = _mapped(part_bytes, block.device)
    code = cuda_only.lock_pages(contents.data_ptr(), part_bytes, block.device)
    if code != 0:
        raise _NotLocked(block.size_bytes, f"CUDA error {code}")
    return _Part(contents, end_with(block, _unlock, contents.data_ptr(), block.device, mapping, os.getpid()))


def _mapped(part_bytes: int, device: torch.device) -> tuple[mmap.mmap, torch.Tensor]:
    """Return an anonymous mapping, and its bytes. Its pages are there, in the memory that is nearest to the device.

    Raises:
        TierError: If there is no memory for it.
    """
    try:
        mapping = mmap.mmap(-1, part_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise TierError(
            f"no {part_bytes} bytes of host memory for swapping: set a smaller host budget", "host memory"
        ) from error
    contents = torch.frombuffer(mapping, dtype=torch.uint8)
    touch_pages(
        contents.data_ptr(), part_bytes, cuda_only.near_cores(device)
    )  # where it cannot, whatever uses a page touches it
    return mapping, contents


def _from_pytorch(block: PinnedBlock, part_bytes: int) -> _Part:
    """Return PyTorch's pinned memory, which returns to its cache together with the block."""
    try:
        return _Part(torch.empty(part_bytes, dtype=torch.uint8, device=_HOST, pin_memory=True), _nothing)
    except RuntimeError as error:
        raise _NotLocked(block.size_bytes, str(error).partition("\n")[0]) from error


def _unlock(pointer: int, device: torch.device, mapping: mmap.mmap, process: int) -> None:
    """Unlock and release the mapping. A fork has no device context and leaves the memory to its parent."""
    if os.getpid() == process:
        accelerators.synchronize(device)
        cuda_only.unlock_pages(pointer)
    del mapping


# From one engine to the next ------------------------------------------------------------------------------------------

# Lists, since their methods are atomic: finalizers close engines in any thread and at any point.
_KEEPERS: list[object] = []
_KEPT: list[PinnedBlock] = []


@contextmanager
def blocks_kept() -> Iterator[None]:
    """Keep the blocks of closed engines locked inside, for the next engine on the same device.

    Locking goes page by page and takes longer than many training steps. The blocks are unlocked at the end.
    """
    keeper = object()
    _KEEPERS.append(keeper)
    try:
        yield
    finally:
        _KEEPERS.remove(keeper)
        if not _KEEPERS:
            _unlock_kept(lambda block: True)


def take_block(size_bytes: int, device: torch.device, locking: Locking) -> PinnedBlock:
    """Return a kept block of at least `size_bytes`, or a new one of exactly this size.

    Kept blocks of the device that are too small are unlocked first, so that the host never has both.

    Raises:
        TierError: If the process cannot have that much memory.
    """
    kept = [block for block in _KEPT if locking != "never" or block.pageable_bytes == block.size_bytes]
    for block in sorted(kept, key=lambda block: block.size_bytes):
        if block.device == device and block.size_bytes >= size_bytes and _is_taken(block):
            return block
    _unlock_kept(lambda block: block.device == device)
    return PinnedBlock(size_bytes, device, locking)


def give_block(block: PinnedBlock) -> None:
    """Unlock a block that an engine no longer needs, or keep it inside `blocks_kept`."""
    if _KEEPERS:
        _KEPT.append(block)
    else:
        block.unlock()


def _is_taken(block: PinnedBlock) -> bool:
    try:
        _KEPT.remove(block)
    except ValueError:  # another thread took it
        return False
    return True


def _unlock_kept(wanted: Callable[[PinnedBlock], bool]) -> None:
    for block in list(_KEPT):
        if wanted(block) and _is_taken(block):
            block.unlock()
