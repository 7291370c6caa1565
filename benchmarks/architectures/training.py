"""A short training of a network, plainly or under a budget, and what it leaves behind."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy
import torch

from benchmarks.architectures.network import Network
from benchmarks.setups.counting import LiveBytes
from benchmarks.setups.record import Record

Make = Callable[[], Network]
STEPS, PLAIN_STEPS_AFTER = 12, 4
LOOKED_AT = (1, 5, 8)  # steps whose gradients are compared, besides those of the last one
WAIT_AFTER = (3, 6)  # steps: for a plan that is made beside them, which come too late in a training as short as this
LONGEST_WAIT_S = 20.0
SMALLEST_PEAK_BYTES = 16 * 2**20
SHARE_THAT_STAYS = 0.25
PROBED_SIZE, LARGEST_SIZE, LONGEST_STEP_MS = 4, 256, 600.0
SUMMARY = (
    "steps", "steps_on_plan", "steps_online", "steps_in_core", "steps_left_plan", "steps_over_budget", "peak_bytes",
    "between_peak_bytes", "swapped_bytes", "recomputed_ops", "ungoverned",
)  # fmt: skip


def fitting_size(make: Make, counter: LiveBytes) -> int:
    """A number of samples whose activations take most of the memory, unless a step takes too long then."""
    found = train(make, PROBED_SIZE, counter, steps=2)
    steps = found["steps"]
    peak_bytes, stays_bytes = (max(step[what] for step in steps) for what in ("peak_bytes", "live_bytes"))
    sample_bytes = max(1, peak_bytes - stays_bytes) / PROBED_SIZE
    wanted = (max(SMALLEST_PEAK_BYTES, stays_bytes / SHARE_THAT_STAYS) - stays_bytes) / sample_bytes
    in_time = PROBED_SIZE * LONGEST_STEP_MS / found["thread_ms"][-1]
    return max(2, min(round(wanted), round(in_time), LARGEST_SIZE))


def train(
    make: Make,
    size: int,
    counter: LiveBytes,
    *,
    steps: int = STEPS,
    budget_bytes: int | None = None,
    by_finder: bool = False,
) -> dict[str, Any]:
    """Train from the same seed as ever, and tell what came of it.

    Args:
        make: makes the network.
        size: number of samples in a batch.
        counter: of live bytes.
        steps: number of steps.
        budget_bytes: None for plain training.
        by_finder: whether the model is found as under `pooch exec`, rather than given to `pooch.auto`.
    """
    gc.collect()
    random.seed(0)
    numpy.random.seed(0)  # noqa: NPY002 - networks of others read the global state
    torch.manual_seed(0)
    torch.seed = _seeded  # type: ignore[assignment]
    record, told, thread_ms = Record(counter), list[str](), list[float]()
    with ExitStack() as stack:
        if by_finder:
            governing = _finder(budget_bytes, told, stack)
        network = make()
        if network.fixed_size:
            size = 1
        optimizer = torch.optim.AdamW(network.model.parameters(), lr=1e-3)
        if budget_bytes is not None and not by_finder:
            governing = _auto(network, budget_bytes, optimizer, told, stack)
        if budget_bytes is not None:
            record.pause = lambda done: _wait_for_a_plan(governing, done)
        record.begin()
        for number in range(steps):
            begin_s = time.thread_time()
            loss = network.step_loss(network.batch(size))
            loss.backward()
            if number in LOOKED_AT or number == steps - 1:
                gradients = {name: each.grad for name, each in network.model.named_parameters()}
                record.state("gradients", gradients)
                del gradients
            optimizer.step()
            optimizer.zero_grad()
            thread_ms.append((time.thread_time() - begin_s) * 1000)
            record.step(loss)
            del loss
        summary = None if budget_bytes is None else governing().summary()
    record.state("parameters and buffers", network.model)
    record.state("optimizer", optimizer.state_dict())
    found = {**record.finish(), "told": told, "thread_ms": thread_ms}
    if summary is None:
        return found
    counts = {name: getattr(summary, name) for name in SUMMARY}
    return {**found, "pooch": {**counts, "verdict": str(summary).splitlines()[0]}}


def _seeded() -> int:
    """What `torch.seed` does, with a number that repeats: reversible networks of transformers begin layers with it."""
    number = random.getrandbits(63)
    torch.manual_seed(number)
    return number


def _auto(
    network: Network, budget_bytes: int, optimizer: torch.optim.Optimizer, told: list[str], stack: ExitStack
) -> Callable[[], Any]:
    """`pooch.auto`, until the stack is left."""
    import pooch

    auto = stack.enter_context(pooch.auto(network.model, budget_bytes, optimizer, tell=told.append))
    return lambda: auto


def _finder(budget_bytes: int | None, told: list[str], stack: ExitStack) -> Callable[[], Any]:
    """What `pooch exec` starts before a script, until the stack is left."""
    from pooch.autopilot.finding import ModelFinder

    finder = ModelFinder(str(budget_bytes), tell=told.append)
    finder.start()
    stack.callback(finder.stop)

    def found() -> Any:
        if finder.auto is None:
            raise RuntimeError("; ".join(finder.refusals) or "pooch exec has found no model")
        return finder.auto

    return found


def _wait_for_a_plan(governing: Callable[[], Any], done: int) -> None:
    """Wait between two steps until there is a first plan, or none is being made."""
    if done not in WAIT_AFTER:
        return
    auto, end_s = governing(), time.monotonic() + LONGEST_WAIT_S
    while auto.is_planning and not auto.plans and time.monotonic() < end_s:
        time.sleep(0.05)
