"""One setup in a process of its own, which writes one JSON line.

    python -m benchmarks.setups.child NAME [BUDGET_BYTES]
    pooch exec --budget BUDGET_BYTES -m benchmarks.setups.child NAME

With a budget, it trains under Pooch, and then plainly once more: times within one process can be compared, and what
Pooch left behind would show.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import sys
import warnings
from typing import TYPE_CHECKING, Any

import numpy
import torch

from benchmarks.setups.catalogue import SETUPS
from benchmarks.setups.counting import LiveBytes
from benchmarks.setups.record import Record
from benchmarks.setups.setup import Setup
from benchmarks.setups.way import Way
from pooch.torchtools.calls import PLACE

if TYPE_CHECKING:
    from pooch.autopilot.finding import ModelFinder


def train(
    setup: Setup, counter: LiveBytes, budget_bytes: int | None, finder: ModelFinder | None = None
) -> dict[str, Any]:
    """Train once from the same seed, and tell what came of it."""
    gc.collect()
    random.seed(0)
    numpy.random.seed(0)  # noqa: NPY002 - frameworks seed and read the global state
    torch.manual_seed(0)
    way = Way(Record(counter), budget_bytes, finder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        setup.train(way)
        summaries = way.finish()
    told = dict.fromkeys(str(warning.message) for warning in caught if "pooch" in warning.filename)
    return {**way.record.finish(), "lines": way.lines, "pooch": summaries, "warnings": list(told)}


def main() -> None:
    """Train plainly, or under a budget and then plainly."""
    name, *budget = sys.argv[1:]
    setup, counter = SETUPS[name], LiveBytes()
    finder = vars(torch.nn.Module).get(PLACE)  # of `pooch exec`, if that runs this module
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    logging.disable(logging.WARNING)
    if setup.ranks > 1:
        torch.distributed.init_process_group("gloo")
    done = {"trained": train(setup, counter, int(budget[0]) if budget else None, finder)}
    if budget or finder is not None:
        done["plain again"] = train(setup, counter, None)
    if setup.ranks > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    sys.stdout.write(json.dumps({"done": done}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads of frameworks need not be waited for


if __name__ == "__main__":
    main()
