"""Page-locked host memory of exactly the requested size, and keeping it from one engine to the next."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ...ground.errors import TierError
from ...torchtools import accelerators, cuda_only
from ...torchtools.device_memory import free_bytes
from ...torchtools.endings import end_with

_HOST = torch.device("cpu")


class PinnedBlock:
    """Page-locked host memory that copy streams access directly.

    PyTorch rounds its own pinned blocks up to a power of two. On CUDA this block is an anonymous mapping instead: it
    begins at a page boundary (a page cannot be locked twice), returns to the system at once, and is shared with forks
    rather than copied while the device uses it. Other accelerators cannot lock existing memory, and use PyTorch's.

    Args:
        size_bytes: Number of bytes to lock.
        device: A device with streams, synchronized before the memory is unlocked.

    Raises:
        TierError: If the process cannot have that much memory, or it cannot be locked.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes, self.device, self.fitted_at = size_bytes, device, 0
        self.in_use_until: tuple[torch.Event, ...] = ()  # ends of the last copies, which the next step waits for
        available = free_bytes(_HOST)
        if size_bytes > available:
            raise TierError(
                f"swapping needs {size_bytes} bytes of host memory, {available} are available: "
                "set a smaller host budget",
                "host memory",
            )
        self.bytes, self.unlock = (_locked if cuda_only.locks_in_place(device) else _from_pytorch)(self)


def _locked(block: PinnedBlock) -> tuple[torch.Tensor, Callable[[], object]]:
    """Return a locked mapping, and the function that unlocks it."""
    try:
        mapping = mmap.mmap(-1, block.size_bytes)
    except (OSError, OverflowError) as error:
        raise TierError(
            f"no {block.size_bytes} bytes of host memory for swapping: set a smaller host budget", "host memory"
        ) from error
    contents = torch.frombuffer(mapping, dtype=torch.uint8)
    code = cuda_only.lock_pages(contents.data_ptr(), block.size_bytes, block.device)
    if code != 0:
        raise _not_locked(block, f"CUDA error {code}")
    unlock = end_with(block, _unlock, contents.data_ptr(), block.device, mapping, os.getpid())
    return contents, unlock


def _from_pytorch(block: PinnedBlock) -> tuple[torch.Tensor, Callable[[], object]]:
    """Return PyTorch's pinned memory, which returns to its cache together with the block."""
    try:
        return torch.empty(block.size_bytes, dtype=torch.uint8, device=_HOST, pin_memory=True), lambda: None
    except RuntimeError as error:
        raise _not_locked(block, str(error).partition("\n")[0]) from error


def _not_locked(block: PinnedBlock, why: str) -> TierError:
    return TierError(
        f"{block.size_bytes} bytes of host memory cannot be page-locked ({why}): set a smaller host budget", "locking"
    )


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


def take_block(size_bytes: int, device: torch.device) -> PinnedBlock:
    """Return a kept block of at least `size_bytes`, or a new one of exactly this size.

    Kept blocks of the device that are too small are unlocked first, so that the host never has both.

    Raises:
        TierError: If the process cannot have that much memory, or it cannot be locked.
    """
    for block in sorted(_KEPT, key=lambda block: block.size_bytes):
        if block.device == device and block.size_bytes >= size_bytes and _is_taken(block):
            return block
    _unlock_kept(lambda block: block.device == device)
    return PinnedBlock(size_bytes, device)


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
