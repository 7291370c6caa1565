"""Shared actions: a search lowers hundreds of schedules that differ in only a few actions."""

from __future__ import annotations

from functools import lru_cache

from ..ir import Action
from ..ir.schedule import ActionKind


@lru_cache(maxsize=1 << 16)
def action(
    slot: int, kind: ActionKind, target: int, outputs: tuple[int, ...] = (), in_place: tuple[int, ...] = ()
) -> Action:
    """Return the action with these fields; equal actions are one object."""
    return Action(slot, kind, target, outputs, in_place)
