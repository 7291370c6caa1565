"""Page-locked host memory of exactly the size that is asked for, and keeping it from one engine to the next."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pooch.errors import TierError
from pooch.torchtools import accelerators, cuda_only
from pooch.torchtools.device_memory import free_bytes

_HOST = torch.device("cpu")


class PinnedBlock:
    """Host memory that copy streams can reach by themselves. PyTorch's own pinned blocks are rounded up to a power of
    two; on CUDA this one is an anonymous mapping, so it begins at a page (a page cannot be locked twice), goes back to
    the system at once, and is shared with forks instead of being copied under the device's hands. On other accelerators
    it is PyTorch's, since they cannot lock memory that is there already.

    Args:
        size_bytes: exactly this many are locked.
        device: with streams; synchronized before the memory is unlocked.

    Raises:
        TierError: the process cannot have so much memory, or it cannot be locked.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes, self.device = size_bytes, device
        self.in_use_until: tuple[torch.Event, ...] = ()  # ends of the last copies, for whoever has it next
        available = free_bytes(_HOST)
        if size_bytes > available:
            raise TierError(
                f"swapping needs {size_bytes} bytes of host memory, {available} are available: set a smaller host "
                "budget"
            )
        self.bytes, self.unlock = (_locked if cuda_only.locks_in_place(device) else _from_pytorch)(self)


def _locked(block: PinnedBlock) -> tuple[torch.Tensor, Callable[[], object]]:
    """A mapping of its own, locked; and what unlocks it."""
    try:
        mapping = mmap.mmap(-1, block.size_bytes)
    except (OSError, OverflowError) as error:
        raise TierError(
            f"no {block.size_bytes} bytes of host memory for swapping: set a smaller host budget"
        ) from error
    contents = torch.frombuffer(mapping, dtype=torch.uint8)
    code = cuda_only.lock_pages(contents.data_ptr(), block.size_bytes, block.device)
    if code != 0:
        raise _not_locked(block, f"CUDA error {code}")
    unlock = weakref.finalize(block, _unlock, contents.data_ptr(), block.device, mapping, os.getpid())
    unlock.atexit = False  # the end of the process unlocks by itself
    return contents, unlock


def _from_pytorch(block: PinnedBlock) -> tuple[torch.Tensor, Callable[[], object]]:
    """PyTorch's pinned memory, which goes back to its cache with the block."""
    try:
        return torch.empty(block.size_bytes, dtype=torch.uint8, device=_HOST, pin_memory=True), lambda: None
    except RuntimeError as error:
        raise _not_locked(block, str(error).partition("\n")[0]) from error


def _not_locked(block: PinnedBlock, why: str) -> TierError:
    return TierError(
        f"{block.size_bytes} bytes of host memory cannot be page-locked ({why}): set a smaller host budget"
    )


def _unlock(pointer: int, device: torch.device, mapping: mmap.mmap, process: int) -> None:
    """Unlock, then let go of the mapping. A fork has no device context and leaves the memory to its parent."""
    if os.getpid() == process:
        accelerators.synchronize(device)
        cuda_only.unlock_pages(pointer)
    del mapping


# From one engine to the next ------------------------------------------------------------------------------------------

# Lists, whose methods are atomic: engines are also closed by finalizers, in any thread and in the middle of anything.
_KEEPERS: list[object] = []
_KEPT: list[PinnedBlock] = []


@contextmanager
def blocks_kept() -> Iterator[None]:
    """Inside, an engine that is closed leaves its blocks locked, and the next one on the same device takes them over:
    locking goes page by page and takes longer than many a step. At the end they are unlocked.
    """
    keeper = object()
    _KEEPERS.append(keeper)
    try:
        yield
    finally:
        _KEEPERS.remove(keeper)
        if not _KEEPERS:
            _unlock_kept(lambda block: True)


def take_block(size_bytes: int, device: torch.device) -> PinnedBlock:
    """A block of at least so many bytes: one that was kept, or a new one of exactly this size. Kept ones of the device
    that are too small are unlocked first, so that the host never has both.

    Raises:
        TierError: the process cannot have so much memory, or it cannot be locked.
    """
    for block in sorted(_KEPT, key=_size_of):
        if block.device == device and block.size_bytes >= size_bytes and _is_taken(block):
            return block
    _unlock_kept(lambda block: block.device == device)
    return PinnedBlock(size_bytes, device)


def give_block(block: PinnedBlock) -> None:
    """An engine has no more use for a block."""
    if _KEEPERS:
        _KEPT.append(block)
    else:
        block.unlock()


def _is_taken(block: PinnedBlock) -> bool:
    try:
        _KEPT.remove(block)
    except ValueError:  # by another thread
        return False
    return True


def _size_of(block: PinnedBlock) -> int:
    return block.size_bytes


def _unlock_kept(wanted: Callable[[PinnedBlock], bool]) -> None:
    for block in list(_KEPT):
        if wanted(block) and _is_taken(block):
            block.unlock()
