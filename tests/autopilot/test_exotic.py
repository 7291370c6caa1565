"""`pooch.auto` around what it cannot watch: the same bits, the rest stays governed, and one line tells."""

from __future__ import annotations

import pytest
import torch

import pooch
from tests.exotic_kinds import KINDS, ROWS, WIDTH, Sandwich
from tests.exotic_training import APART, Outcome, outcome_of

TOLD = {
    "nested_strided": "a nested tensor",
    "nested_jagged": "a NestedTensor",
    "wrapped": "a Scaled",
    "wrapped_flattened": "a Flattened",
    "backed": "a Backed",
    "sparse": "a tensor of layout sparse_coo",
    "sparse_rows": "a tensor of layout sparse_csr",
    "opaque": "a tensor of layout mkldnn",
    "func_grad": "torch.func",
    "func_vjp": "torch.func",
    "func_jacobians": "torch.func",
    "func_call": "torch.func",
    "branch": "torch.cond",
    "loop": "torch.while_loop",
    "flexible": "torch.flex_attention",
}


def check(name: str, outcome: Outcome) -> None:
    """Judge what a kind gave."""
    assert outcome.differs == ()
    assert outcome.recomputed_ops + outcome.swapped_bytes > 0, "the rest of the network is governed"
    told = [line for line in outcome.lines if "governed" in line]
    if name in TOLD:
        assert told == [f"{TOLD[name]} in module 'part' is not governed: what it saves stays on the device"]
        assert outcome.ungoverned > 0
    else:
        assert len(told) <= 1
        assert (outcome.ungoverned > 0) == bool(told)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in APART])
def test_any_part_trains_with_the_same_bits_and_the_rest_is_governed(name: str) -> None:
    check(name, outcome_of(name, "auto"))


def test_hooks_of_the_programs_own_are_refused_by_a_transform_as_in_plain_training() -> None:
    model, rows = Sandwich(KINDS["func_grad"]), torch.randn(ROWS, WIDTH)
    with pooch.auto(model, "1MiB", tell=lambda line: None):
        with (
            pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"),
            torch.autograd.graph.save_on_cpu(),
        ):
            model(rows)
        model(rows).backward()  # and the loop can go on


def test_a_line_names_the_module_once_however_often_it_runs() -> None:
    model = torch.nn.Sequential(Sandwich(KINDS["func_grad"], repeats=1), torch.nn.Identity())
    lines: list[str] = []
    with pooch.auto(model, "1MiB", tell=lines.append) as auto:
        for _ in range(3):
            model(torch.randn(ROWS, WIDTH)).backward()
        assert auto.summary().ungoverned == 3
        assert "3 saved tensors and calls" in str(auto.summary())
    told = [line for line in lines if "governed" in line]
    assert told == ["torch.func in module '0.part' is not governed: what it saves stays on the device"]
