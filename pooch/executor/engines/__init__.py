"""Copy engines behind one protocol: for the CPU (a thread and a file), and for streams (with pinned memory)."""

from __future__ import annotations

from pathlib import Path

import torch

from ...ground.errors import UsageError
from ...torchtools.accelerators import has_streams, refuse_uncounted
from .protocol import CopyEngine


def make_engine(
    device: torch.device, spill_directory: str | Path | None = None, *, check_copies: bool = True
) -> CopyEngine:
    """Create the engine for a device.

    Args:
        device: The device of the activations.
        spill_directory: Directory of the CPU engine's spill file. None uses the system's temporary directory.
        check_copies: Whether the CPU engine compares checksums of what it reads back. Pinned memory is not checked.

    Raises:
        TierError: If the tier cannot be set up.
        UsageError: If the device is neither a CPU nor has streams, or if its allocator counts nothing.
    """
    if has_streams(device):
        refuse_uncounted(device)
        from .streams import StreamEngine

        return StreamEngine(device)
    if device.type not in ("cpu", "meta"):
        raise UsageError(
            f"PyTorch exposes no streams for devices of type {device.type!r}, so nothing can be swapped beside compute "
            "there: move the model to the CPU, or to an accelerator with streams"
        )
    from .cpu import CpuEngine

    return CpuEngine(spill_directory, check=check_copies)
