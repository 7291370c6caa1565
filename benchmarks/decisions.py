"""What it takes to decide who leaves, by the number of saved values: processor time per eviction.

    python -m benchmarks.decisions [--values 1000 ...] [--turns 20] [--page-only]

The machine runs over a modelled device: storages are numbers, and copies take no time of the processor. A step of many
ops saves two of three results, of different sizes, until there are as many values as are asked for. From there on room
is short: in each turn, values leave so that the step can go on, and in the turns of the backward pass it reads what it
saved. Counted is the time in the machine: making room, copies ahead, bringing back. Beside the order that is kept
between decisions, the same rule with all values scored each time.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.samples import told
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.ir import Link
from pooch.machine import Call, CopySpeed, EvictionPolicy, Pressure, Recipes, Value
from pooch.machine.eviction import OURS, ours
from pooch.machine.recipes import Resolve
from pooch.machine.values import Place
from pooch.simulator.modelled import ModelledClock, ModelledCounters, ModelledMemory, ModelledStorage, ModelledTier

NAME, TITLE = "decisions", "What a decision takes who leaves"
VALUES = (1_000, 5_000, 20_000)
EVICTIONS = 100  # a turn
ORDERS: Mapping[str, EvictionPolicy] = {
    "kept order": OURS,
    "all scored each time": EvictionPolicy(score=lambda value, cost_ms, ahead: ours(value, cost_ms, ahead)),
}
FEWER_TURNS = {"all scored each time": 4}  # and evictions, by so many times ten
LINK = Link("a modelled tier", 0.01, 0.01, 1e7, 2e6)
MEGABYTE = 2**20


class LongStep:
    """A step of many ops: the owner of its values, and the kitchen of its recipes.

    Args:
        values: That are live when room runs short.
        policy: By what rule values leave.
        seed: Of sizes and times.

    Attributes:
        costs: How often the cost of a replay was computed so far.
        evictions: How often a value has left.
        cpu_ns: Processor time in the machine.
    """

    def __init__(self, values: int, policy: EvictionPolicy = OURS, seed: int = 0) -> None:
        self._random, self.thread = random.Random(seed), threading.get_ident()
        self.memory, self._counters = ModelledMemory(), ModelledCounters()
        self._tier = ModelledTier(ModelledClock(LINK))
        speed = CopySpeed(LINK.tier)
        speed.start_from(LINK)
        self.pressure = Pressure(2**60, self.memory, self.memory, self._tier, speed, self._counters, policy)
        self.saved: dict[int, Value] = {}
        self.recipes = Recipes(self.saved, self, speed)
        self.costs = self.evictions = self.cpu_ns = self._ops = 0
        self.pressure.store.on_move = self._moved
        self.pressure.begin(self._counters)
        while len(self.saved) < values:
            self.run_op()
        self.pressure.set_budget(self.memory.live_bytes)

    def run_op(self) -> None:
        """Run an op on what the one before has made. Autograd saves two of three results."""
        number, self._ops = self._ops, self._ops + 1
        size_bytes = self._random.choice((1, 2, 4, 8)) * MEGABYTE
        reads = (number - 1,) if number % 50 else ()
        self.recipes.add(Call(size_bytes, reads, (number,), self._random.choice((0.05, 0.2, 1.0, 5.0))))
        began_ns = time.thread_time_ns()
        storage = self.memory.new(size_bytes)
        if number % 3:
            value = self.saved[number] = Value(number, self, storage)
            value.handles = 1
            self.pressure.save(value)
        self.pressure.write_ahead()
        self.cpu_ns += time.thread_time_ns() - began_ns

    def read_op(self) -> None:
        """The backward pass reads what was saved last, and lets go of it."""
        value = self.saved[next(reversed(self.saved))]
        began_ns = time.thread_time_ns()
        self.pressure.make_room(4 * MEGABYTE)  # for a gradient
        with self.pressure.lock:
            self.pressure.reading(value)
            self.pressure.ensure(value)
            self.pressure.read_ahead(value)
        self.pressure.lock.end(value)
        self.cpu_ns += time.thread_time_ns() - began_ns

    def _moved(self, kind: str, value: Value, address: int) -> None:
        self.evictions += kind == "left"

    # What the machine asks: see `pooch.machine.values.Owner` and `pooch.machine.recipes.Kitchen`

    def take_place(self, size_bytes: int) -> Place | None:
        """Return room for a value."""
        return self._tier.take(size_bytes)

    def replay_ms(self, number: int) -> float:
        """Return the time to replay a value, and count how often that is computed."""
        self.costs += number not in self.recipes._costs_ms
        return self.recipes.replay_ms(number)

    def make_again(self, number: int) -> ModelledStorage:
        """Replay a value."""
        storage: ModelledStorage = self.recipes.make_again(number)
        return storage

    def moved(self, value: Value) -> Iterable[Value]:
        """Forget the costs of replays that need a value."""
        return self.recipes.moved(value)

    def returned(self, value: Value) -> None:
        """Note that a value is there again."""
        self.pressure.returned(value)

    def released(self, number: int) -> None:
        """Note that a value has ended."""
        self.saved.pop(number)

    def ensure(self, value: Value) -> ModelledStorage:
        """Return a value's storage."""
        storage: ModelledStorage = self.pressure.ensure(value)
        return storage

    def replay(self, size_bytes: int, resolve: Resolve) -> list[ModelledStorage]:
        """Run an op again, which reads nothing here: what chains cost is priced, not what they do."""
        return [self.memory.new(size_bytes)]

    def copied(self, storage: ModelledStorage) -> ModelledStorage:
        """Return a copy."""
        return self.memory.new(storage.nbytes())

    def remember(self, value: Value) -> None:
        """Compare nothing."""

    def check(self, value: Value, storage: ModelledStorage) -> None:
        """Compare nothing."""

    def gained(self, gained_ms: float) -> None:
        """Count nothing."""

    def is_banned(self, call: Call, number: int) -> bool:
        """Return False."""
        return False


@dataclass(frozen=True, slots=True)
class Turn:
    """Some evictions of one step.

    Attributes:
        phase: Of the step.
        evictions: How many values left.
        cpu_us: Processor time of all that the machine did meanwhile.
        costs: How often the cost of a replay was computed.
    """

    phase: str
    evictions: int
    cpu_us: float
    costs: int


def turn(step: LongStep, phase: str, evictions: int) -> Turn:
    """Run ops until so many values have left."""
    before, costs, began_ns = step.evictions, step.costs, step.cpu_ns
    while step.evictions < before + evictions:
        if phase == "forward":
            step.run_op()
        else:
            step.read_op()
    return Turn(phase, step.evictions - before, (step.cpu_ns - began_ns) / 1000, step.costs - costs)


def measure(values: int, order: str, turns: int) -> dict[str, Any]:
    """Turns of one step."""
    tell(f"{values} values, {order}")
    fewer = FEWER_TURNS.get(order, 1)
    step, evictions = LongStep(values, ORDERS[order]), EVICTIONS if fewer == 1 else EVICTIONS // 20
    samples = [turn(step, phase, evictions) for phase in ("forward", "backward") for _ in range(max(3, turns // fewer))]
    return {"values": values, "order": order, "turns": [vars_of(each) for each in samples]}


def vars_of(sample: Turn) -> dict[str, Any]:
    """A turn, for a file."""
    return {name: getattr(sample, name) for name in Turn.__slots__}


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Microseconds per eviction: the median over turns, and the middle half of them."""
    rows: list[Row] = []
    for result in results:
        row: dict[str, object] = {"values": result["values"], "order": result["order"]}
        for phase in ("forward", "backward"):
            turns = [each for each in result["turns"] if each["phase"] == phase]
            row[f"{phase}, us"] = told([each["cpu_us"] / each["evictions"] for each in turns], ".1f")
            row[f"{phase}, replays priced"] = told([each["costs"] / each["evictions"] for each in turns], ".1f")
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, action="append", help=f"default: {VALUES}")
    parser.add_argument("--turns", type=int, default=20, help="of 100 evictions each, in each pass")
    parser.add_argument("--page-only", action="store_true", help="measure nothing: make the tables of what is stored")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    if arguments.page_only:
        results = json.loads((arguments.output / f"{NAME}.json").read_text())["results"]
    else:
        counts = arguments.values or VALUES
        results = [measure(values, order, arguments.turns) for values in counts for order in ORDERS]
    rows = rows_of(results)
    write_results(NAME, TITLE, rows, results, arguments.output)
    sys.stdout.write(markdown_table(rows) + "\n")


if __name__ == "__main__":
    main()
