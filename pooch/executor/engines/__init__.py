"""Copy engines: one protocol, a CPU engine (thread and file) and one for devices with streams (and pinned memory)."""

from __future__ import annotations

from pathlib import Path

import torch

from pooch.errors import UsageError
from pooch.executor.engines.protocol import CopyEngine
from pooch.torchtools.accelerators import has_streams


def make_engine(
    device: torch.device, spill_directory: str | Path | None = None, *, check_copies: bool = True
) -> CopyEngine:
    """The engine for a device.

    Args:
        device: where the activations live.
        spill_directory: where the CPU engine puts its file; None: the system's directory for temporary files.
        check_copies: the CPU engine compares checksums of what it reads back; pinned memory is not checked.

    Raises:
        TierError: the tier cannot be set up.
        UsageError: the device is neither a CPU nor one with streams.
    """
    if has_streams(device):
        from pooch.executor.engines.streams import StreamEngine

        return StreamEngine(device)
    if device.type not in ("cpu", "meta"):
        raise UsageError(
            f"PyTorch gives nobody the streams of a device of type {device.type!r}, so nothing can be swapped beside "
            "compute there: move the model to the CPU, or to an accelerator with streams"
        )
    from pooch.executor.engines.cpu import CpuEngine

    return CpuEngine(spill_directory, check=check_copies)
