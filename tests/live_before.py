"""What earlier tests of the process have left, which counts towards the budgets of those after them."""

from __future__ import annotations

import gc

import torch

from pooch.executor.live_bytes import live_bytes_of


def live_bytes() -> int:
    """Bytes on the CPU that are live by now, with garbage, and with what the collector does not see."""
    live = live_bytes_of(torch.device("cpu"))
    try:
        return live.now()
    finally:
        live.close()


def live_before() -> int:
    """Bytes on the CPU that are live by now, without garbage."""
    gc.collect()
    return live_bytes()
