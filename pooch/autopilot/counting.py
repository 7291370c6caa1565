"""By how much a step may pass its budget where bytes are only counted now and then."""

from __future__ import annotations

from ..ir import Profile
from ..machine.account import LiveBytes


def margin_bytes(live: LiveBytes, profile: Profile) -> int:
    """Return by how many bytes a step like a recorded one may pass the budget because nobody counts meanwhile.

    Args:
        live: The counter.
        profile: The recorded step.
    """
    blind_ms = live.blind_ms()
    return 0 if blind_ms is None else highest_rise_bytes(profile, blind_ms)


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
