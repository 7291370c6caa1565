"""The measurement of what a plan costs measures what it says (how much that is decides nothing here)."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from benchmarks import hook_cost
from pooch.executor import apply_plan


def test_every_way_of_training_the_chain_is_a_row_with_its_target() -> None:
    costs = hook_cost.per_op_costs(12, 2)
    assert all(len(one["us_an_op"]) == 2 for one in costs)
    rows = {str(row["what"]): row for row in hook_cost.per_op_rows(costs)}
    assert len(rows) == 9
    told = {name: row["target"] for name, row in rows.items() if row["target"]}
    assert set(told.values()) == {"at most 0.6", "at most 2", "at most 15"}


@pytest.mark.filterwarnings("ignore:the model runs outside")
def test_the_hooks_alone_give_the_gradients_of_plain_training() -> None:
    chain = hook_cost.Chain(20)
    with apply_plan(hook_cost.chain_plan(chain, "swap", 1), chain) as run:
        found = []
        for way in (nullcontext, lambda: hook_cost._hooks_alone(run)):
            with way():
                loss = chain()
            loss.backward()
            assert chain.start.grad is not None
            found.append(chain.start.grad.clone())
            chain.start.grad = None
    assert torch.equal(*found)


def test_a_plan_for_all_of_the_memory_moves_nothing() -> None:
    times = hook_cost.in_core_times(1)
    assert len(times) == hook_cost.IN_CORE_TURNS_FACTOR
    (row,) = hook_cost.in_core_rows(times)
    assert str(row["overhead"]).endswith("%")


def test_a_budget_that_is_far_away_is_compared_with_steps_without_pooch() -> None:
    times = hook_cost.far_away_times(1)
    assert len(times) == hook_cost.IN_CORE_TURNS_FACTOR
    assert all(len(turn[name]) == 2 for turn in times for name in ("plain_us", "counted_us", "auto_us"))
    turns = [
        {"plain_us": [100.0, 100.0], "counted_us": [101.0, 103.0], "auto_us": [share, 110.0]} for share in (98, 110)
    ]
    counted, auto = hook_cost.far_away_rows(turns)
    assert (counted["overhead"], counted["us a step"], counted["kept"]) == ("+2.0%", "+2", "")
    assert (auto["overhead"], auto["us a step"], auto["kept"]) == ("+7.0%", "+7", "NO")


def test_costs_are_told_above_the_plain_steps_of_the_same_turn_with_their_spread() -> None:
    costs = [
        {"what": "plain", "us_an_op": [5.0, 6.0, 9.0]},
        {"what": "hooks in Python without the mode", "us_an_op": [6.0, 9.0, 14.0]},
    ]
    plain, hooks = hook_cost.per_op_rows(costs)
    assert (plain["us an op"], plain["least to most"], plain["kept"]) == ("6.00", "5.00 to 9.00", "")
    assert (hooks["us an op"], hooks["least to most"], hooks["kept"]) == ("3.00", "1.00 to 5.00", "NO")
    assert hooks["middle half of the turns"] == "2.00 to 4.00"


def test_the_overhead_of_a_plan_that_moves_nothing_is_the_median_of_the_turns() -> None:
    turns = [
        {"plain_ms": [1.0, 1.0], "planned_ms": [1.0, share]} for share in (1.0, 1.01, 1.4)
    ]  # fmt: skip
    (row,) = hook_cost.in_core_rows(turns)
    assert (row["overhead"], row["least to most"], row["kept"]) == ("+0.50%", "+0.00% to +20.00%", "yes")
