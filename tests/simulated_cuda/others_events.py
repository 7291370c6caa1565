"""A plugin of pytest for `others`: what becomes of each test, a line of JSON when it begins and when it has ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.simulated_cuda.mistakes import take_mistakes

EVENTS = "POOCH_OTHERS_EVENTS"
CHOSEN = "POOCH_OTHERS_CHOSEN"


def write(**event: object) -> None:
    """Add a line; a process that dies leaves what came before."""
    with Path(os.environ[EVENTS]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tell which tests there are, or keep those that were asked for."""
    names = {item: item.nodeid.partition("::")[2] for item in items}
    if config.option.collectonly:
        write(collected=list(names.values()))
        return
    chosen = set(json.loads(Path(os.environ[CHOSEN]).read_text(encoding="utf-8")))
    items[:] = [item for item in items if names[item] in chosen]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """One test, from its set-up to its end; what the device found wrong meanwhile goes with it."""
    name = item.nodeid.partition("::")[2]
    write(begins=name)
    take_mistakes()
    result = yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    write(ends=name, mistakes=take_mistakes())
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """What one of its phases came to; of those that pass, the call alone."""
    name = report.nodeid.partition("::")[2]
    if hasattr(report, "wasxfail"):
        write(test=name, outcome="passed" if report.skipped else "failed", why="is expected to fail")
    elif report.skipped:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        write(test=name, outcome="skipped", why=why)
    elif report.failed:
        last = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
        write(test=name, outcome="failed", why=" ".join(line[1:].strip() for line in last[:3]))
    elif report.when == "call":
        write(test=name, outcome="passed", why="")
