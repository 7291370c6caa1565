"""A budget that bounds what the caching allocator reserves, rather than the bytes of tensors alone."""

from __future__ import annotations

import torch

from ..ground.units import format_bytes
from ..torchtools import accelerators
from ..torchtools.free_budget import FreeBudget, less_a_margin
from ..torchtools.reserved_limit import ReservedLimit
from .remarks import Remarks

_FIRST_LIMITED_STEP = 2
_GROWTH = 1.5
_NOT_YET = (
    "that much was reserved before it was known what single ops need; the allocator reserves no more beyond the budget "
    "from here on"
)
_IN_USE = (
    "that much is reserved in blocks that hold tensors, which the allocator cannot return: call "
    "torch.cuda.empty_cache() before what stays is built"
)
_RETRIES_IN_A_ROW = 3  # steps: those before them fill a cache that earlier ones have left otherwise


class ReservedMemory:
    """What tensors may take of what the allocator may reserve; the rest is for the holes between them.

    From the second step on the allocator itself holds the limit, so it is never passed. The first step shows what
    single ops need, which nothing knows before: under the limit, memory could run out in it where later steps have
    room. Where the holes need more than the margin, memory runs out in a step, or the allocator has to empty its cache
    in each of several steps: then the margin grows.

    Args:
        device: The device.
        size_bytes: What may be reserved.
        remarks: Tells what tensors may take.

    Raises:
        UsageError: The device has no allocator with such a limit.

    Attributes:
        size_bytes: What may be reserved.
        held: The budget of tensors.
    """

    def __init__(self, device: torch.device, size_bytes: int, remarks: Remarks) -> None:
        self._device, self.size_bytes, self._remarks = device, size_bytes, remarks
        self._limit = ReservedLimit(device, size_bytes)
        self._retries, self._failures = self._counted()
        self._retrying_steps = self._steps = 0
        self._is_passed = False  # although the limit is held
        self.held = less_a_margin(size_bytes)
        self._tell()

    def look(self, *, is_quiet: bool) -> FreeBudget | None:
        """Return the budget of tensors from now on, or None if it stays.

        Args:
            is_quiet: Not used.
        """
        self._steps += 1
        if self._steps == _FIRST_LIMITED_STEP or self._is_passed:
            self._limit.hold()
        retries, failures = self._counted()
        self._retrying_steps = self._retrying_steps + 1 if retries > self._retries else 0
        is_tight = failures > self._failures or self._retrying_steps >= _RETRIES_IN_A_ROW
        self._retries, self._failures = retries, failures
        margin_bytes = min(int(_GROWTH * self.held.margin_bytes), self.size_bytes // 2)
        if not is_tight or margin_bytes <= self.held.margin_bytes:
            return None
        self._retrying_steps = 0
        self.held = FreeBudget(self.size_bytes - margin_bytes, margin_bytes)
        self._tell()
        return self.held

    def step_ended(self) -> int:
        """Return what is reserved, and tell if that passes the budget."""
        reserved_bytes = self._limit.reserved_bytes()
        self._is_passed = reserved_bytes > self.size_bytes and self._steps >= _FIRST_LIMITED_STEP
        if reserved_bytes > self.size_bytes:
            self._remarks.over_budget(reserved_bytes, self.size_bytes, _IN_USE if self._is_passed else _NOT_YET)
        return reserved_bytes

    def stop(self) -> None:
        """Bound nothing any longer."""
        self._limit.lift()

    def _tell(self) -> None:
        bound = f"of {format_bytes(self.size_bytes)} that PyTorch's allocator may reserve"
        self._remarks.free_memory(self.held.size_bytes, self.held.told(bound))

    def _counted(self) -> tuple[int, int]:
        """How often the allocator has emptied its cache to go on, and how often memory ran out."""
        counters = accelerators.memory_counters(self._device)
        return counters.get("num_alloc_retries", 0), counters.get("num_ooms", 0)
