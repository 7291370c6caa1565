"""Measures, in a process of its own, what copies and hooks cost on a machine whose device is the CPU.

It ends when its input does, and so with the program that trains.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ..api.children import end_with_the_parent
from ..api.device_links import measure_device_link
from ..api.hook_costs import with_hook_costs
from ..ir import Profile
from ..progress import silent
from .planning_process import begin_aside


def main(path: Path) -> None:
    """Complete the profile in a file."""
    from dataclasses import replace

    begin_aside()
    end_with_the_parent()
    torch.set_num_threads(1)
    profile = Profile.load(path)
    with_hook_costs(replace(profile, link=measure_device_link(torch.device("cpu"))), silent).save(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
