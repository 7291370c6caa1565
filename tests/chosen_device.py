"""The device that tests of either kind of device use: POOCH_TEST_DEVICE, or the CPU."""

from __future__ import annotations

import os

import torch


def chosen_device() -> torch.device:
    """For what is made once for several tests; within a test it is the default device."""
    return torch.device(os.environ.get("POOCH_TEST_DEVICE", "cpu"))
