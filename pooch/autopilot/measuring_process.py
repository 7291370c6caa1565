"""Measures, in a process of its own, what copies and hooks cost on a machine whose device is the CPU.

It ends when its input does, and so with the program that trains.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from ..api.children import received, send
from ..api.device_links import measure_device_link
from ..api.hook_costs import measure_hook_costs
from ..api.wire import WIRE
from ..errors import PoochError
from ..torchtools.memory_trace import earlier_objects_exempt
from .planning_process import begin_aside


def main() -> None:
    """Measure, and tell the costs of copies and those of hooks, or None for those that cannot be measured."""
    begin_aside()
    received()
    torch.set_num_threads(1)
    link, hooks = measure_device_link(torch.device("cpu")), None
    with suppress(PoochError), earlier_objects_exempt():
        hooks = measure_hook_costs("cpu")
    send({"done": WIRE.plain((link, hooks))})


if __name__ == "__main__":
    main()
