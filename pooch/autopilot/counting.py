"""What follows from the way in which live bytes are counted: what the user has to be told, and what was not raised."""

from __future__ import annotations

import time

from ..executor.online.live_bytes import _TIMES_A_WALK, CountedBytes, DeviceBytes, WalkedBytes
from ..ir import Profile
from ..torchtools.cpu_allocator import CountingAllocator, counting_allocator

Counter = CountedBytes | DeviceBytes | WalkedBytes


def raise_failure(live: Counter) -> None:
    """Raise what went wrong while an allocation asked for room, in the middle of an op where nothing can be raised.

    Args:
        live: The counter.
    """
    if isinstance(live, CountedBytes):
        allocator = counting_allocator()
        assert isinstance(allocator, CountingAllocator)
        allocator.raise_failure()


def margin_bytes(live: Counter, profile: Profile) -> int:
    """Return by how many bytes a step like a recorded one may pass the budget because nobody counts meanwhile.

    Args:
        live: The counter.
        profile: The recorded step.
    """
    if not isinstance(live, WalkedBytes):
        return 0
    begin_s = time.perf_counter()
    live.now()
    return highest_rise_bytes(profile, (1 + _TIMES_A_WALK) * (time.perf_counter() - begin_s) * 1000)


def highest_rise_bytes(profile: Profile, blind_ms: float) -> int:
    """Return the most by which live bytes rise above their number before an op, within it and some time after it.

    Args:
        profile: The step.
        blind_ms: The time.
    """
    highest_bytes = 0
    for first, op in enumerate(profile.ops):
        left_ms = blind_ms
        for later in profile.ops[first:]:
            highest_bytes = max(highest_bytes, later.peak_bytes - op.entry_bytes)
            left_ms -= later.time_ms
            if left_ms <= 0:
                break
    return highest_bytes
