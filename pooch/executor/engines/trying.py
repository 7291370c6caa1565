"""Tries the copies of an engine: whether bytes come back as they left, and whether `wait` waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Literal

import torch

from ...machine.values import Ticket
from ...torchtools.accelerators import synchronize
from .measurement import noise
from .protocol import Arena, CopyEngine

Outcome = Literal["right", "other bytes", "not awaited"]

_LONGEST_S = 30.0  # of waiting for a copy that was said to have ended
_OVERWRITTEN = 0xAB


def try_copies(engine: CopyEngine, device: torch.device, size_bytes: int) -> Outcome:
    """Copy random bytes out, write over them, copy them back, and compare.

    First the host waits for each copy to end, so that what comes back depends on the bytes alone. Then only `wait` is
    called, as in a step: where compute goes on before a copy has ended, it writes over what is still being read, or
    reads what has not come back yet. These are other bytes than before, which a late copy would find in its place.

    Args:
        engine: The engine.
        device: The device of the storages.
        size_bytes: Size of the copy. It should take long enough for compute to come too early.

    Raises:
        TierError: If the tier cannot be used, or has noticed by itself that it gave back other bytes.
    """
    with closing(engine.open_arena(size_bytes)) as arena:
        first = noise(size_bytes, device).view(torch.uint8)
        if not _comes_back(engine, arena, first, lambda ticket: _ended(ticket, device)):
            return "other bytes"
        del first
        other = noise(size_bytes, device).view(torch.uint8).bitwise_not_()
        if not _comes_back(engine, arena, other, lambda ticket: None):
            return "not awaited"
    return "right"


def _ended(ticket: Ticket, device: torch.device) -> None:
    """Let the host wait until a copy has ended, whatever its engine says."""
    deadline_s = time.monotonic() + _LONGEST_S
    while not ticket.is_done() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    synchronize(device)


def _comes_back(engine: CopyEngine, arena: Arena, value: torch.Tensor, settle: Callable[[Ticket], None]) -> bool:
    expected = value.clone()
    returned = torch.zeros_like(value)
    out = arena.copy_out(value.untyped_storage(), 0)
    _await(out, engine, settle)
    value.fill_(_OVERWRITTEN)
    back = arena.copy_in(returned.untyped_storage(), 0)
    _await(back, engine, settle)
    is_same = torch.equal(returned, expected)
    for ticket in (out, back):  # memory that a copy still uses must not go
        _ended(ticket, value.device)
    return is_same


def _await(ticket: Ticket, engine: CopyEngine, settle: Callable[[Ticket], None]) -> None:
    ticket.wait()
    settle(ticket)
    if ticket.error is not None:
        raise engine.health.explain(ticket.error)
