"""One training in a process of its own, whose end it does not outlive."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.architectures.catalogue import network_of
from benchmarks.architectures.floor import largest_need
from benchmarks.architectures.training import PLAIN_STEPS_AFTER, fitting_size, train
from benchmarks.setups.counting import LiveBytes

Job = dict[str, Any]


def run(job: Job, answer: Connection) -> None:
    """Do a job, answer, and end the process: threads of others need not be waited for."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found = plainly(job) if job["budget_bytes"] is None else governed(job)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the result
        found = {"failure": told(error)}
    answer.send(found)
    os._exit(0)


def plainly(job: Job) -> Job:
    """Train plainly, in batches of a size that is found first."""
    counter = LiveBytes()

    def make() -> Any:
        return network_of(job["name"])

    size = job["size"] or fitting_size(make, counter)
    trained = train(make, size, counter)
    network = make()
    need_bytes, operator = largest_need(network, network.batch(size), counter)
    return {
        "size": size,
        "parameters": sum(each.numel() for each in network.model.parameters()),
        "modules": sum(1 for _ in network.model.modules()),
        "need_bytes": need_bytes,
        "need_operator": operator,
        **trained,
    }


def governed(job: Job) -> Job:
    """Train under a budget, and then plainly: times of one process can be compared, and what was left behind shows."""
    counter = LiveBytes()

    def make() -> Any:
        return network_of(job["name"])

    by_finder = job["way"] == "exec"
    found = train(make, job["size"], counter, budget_bytes=job["budget_bytes"], by_finder=by_finder)
    return {**found, "plain again": train(make, job["size"], counter, steps=PLAIN_STEPS_AFTER)}


def told(error: BaseException) -> str:
    """An error in one line, with the place that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:300]
    folders = "/".join(place.filename.split("/")[-3:])
    return f"{type(error).__name__}: {text} ({folders}, line {place.lineno})"
