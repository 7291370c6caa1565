"""One training in a process of its own, whose end it does not outlive."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch

from benchmarks.architectures.floor import Needs
from benchmarks.loops.catalogue import LOOPS
from benchmarks.loops.loop import Loop
from benchmarks.setups.counting import LiveBytes
from benchmarks.setups.record import Record

Job = dict[str, Any]


def run(job: Job, answer: Connection) -> None:
    """Do a job, answer, and end the process: threads of others need not be waited for.

    Args:
        job: "name" of the loop, "way" ("plain", "needs", "auto" or "exec"), and "budget_bytes", None without a budget.
        answer: Where the result goes.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    counter = LiveBytes()
    try:
        found = needs(job, counter) if job["way"] == "needs" else trained(job, counter)
        if job["budget_bytes"] is not None:  # times of one process can be compared, and what was left behind shows
            found["plain again"] = trained({**job, "way": "plain", "budget_bytes": None}, counter)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the result
        found = {"failure": _told(error)}
    answer.send(found)
    os._exit(0)


def trained(job: Job, counter: LiveBytes, begins: Callable[[], None] | None = None) -> Job:
    """Train once from the same seed as ever, and tell what came of it; `begins` is called when training begins."""
    gc.collect()
    random.seed(0)
    numpy.random.seed(0)  # noqa: NPY002 - frameworks seed and read the global state
    torch.manual_seed(0)
    told, record, finder = list[str](), Record(counter), None
    if job["way"] == "exec":
        from pooch.autopilot.finding import ModelFinder

        finder = ModelFinder(str(job["budget_bytes"]), tell=told.append)
        finder.start()
    run_of = Loop(record, job["budget_bytes"], finder, told)
    run_of.begins = begins or run_of.begins
    LOOPS[job["name"]](run_of)
    held_bytes = run_of.held_bytes
    figures = run_of.finish()
    return {**record.finish(), "told": told, "thread_ms": run_of.thread_ms, "held_bytes": held_bytes, "pooch": figures}


def needs(job: Job, counter: LiveBytes) -> Job:
    """What the script holds, and what the operator needs beside it that needs most.

    Operators over all parameters at once are left out, as the optimizer's: Pooch runs them in slices.
    """
    operators = Needs(counter, {}, ignored="_foreach")
    with operators:
        found = trained({**job, "way": "plain"}, counter, operators.begin)
    need_bytes = operators.most_bytes + found["held_bytes"]
    return {"need_bytes": need_bytes, "need_operator": operators.operator, "held_bytes": found["held_bytes"]}


def _told(error: BaseException) -> str:
    """An error in one line, with the place that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:300]
    folders = "/".join(place.filename.split("/")[-3:])
    return f"{type(error).__name__}: {text} ({folders}, line {place.lineno})"
