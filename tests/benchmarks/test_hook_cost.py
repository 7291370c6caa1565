"""The measurement of what a plan costs measures what it says (how much that is decides nothing here)."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from benchmarks import hook_cost
from pooch.executor import apply_plan


def test_every_way_of_training_the_chain_is_a_row_with_its_target() -> None:
    rows = {str(row["what"]): row for row in hook_cost.per_op_rows(12, 2)}
    assert len(rows) == 7
    told = {name: row["target"] for name, row in rows.items() if row["target"]}
    assert set(told.values()) == {"at most 2", "at most 15"}


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
    (row,) = hook_cost.in_core_rows(1)
    assert str(row["overhead"]).endswith("%")
