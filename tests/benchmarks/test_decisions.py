"""The table of what decisions take: made of what is stored, and of steps in which values do leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.decisions import ORDERS, VALUES, LongStep, rows_of, turn

ROOT = Path(__file__).parents[2]
STORED = json.loads((ROOT / "benchmarks/results/decisions.json").read_text())


def test_the_stored_table_is_made_of_the_stored_turns() -> None:
    assert STORED["rows"] == rows_of(STORED["results"])
    assert [(each["values"], each["order"]) for each in STORED["results"]] == [(n, o) for n in VALUES for o in ORDERS]


@pytest.mark.parametrize("order", ORDERS)
def test_values_leave_in_each_turn_and_the_step_stays_within_its_budget(order: str) -> None:
    step = LongStep(200, ORDERS[order])
    budget_bytes = step.memory.live_bytes
    for phase in ("forward", "backward"):
        found = turn(step, phase, 20)
        assert found.evictions >= 20
        assert found.cpu_us > 0
        assert step.memory.live_bytes <= budget_bytes


def test_both_orders_are_of_one_rule() -> None:
    steps = [LongStep(300, ORDERS[order]) for order in ORDERS]
    for step in steps:
        turn(step, "forward", 100)
    here = [{value.number for value in step.saved.values() if value.storage is not None} for step in steps]
    assert len(here[0] & here[1]) > 0.7 * max(map(len, here))
