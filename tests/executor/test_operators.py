"""A fixed small part of the operator sweep (`python -m benchmarks.operators` runs all of it)."""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="PyTorch's operator database needs the package expecttest")

from benchmarks import operators
from pooch.ground.live_objects import freeze_known

# One of each kind: plain maths, reductions, views, scatters, random ops, losses, factorizations, transforms, complex
# numbers, empty and scalar samples, results of several tensors, and those in the table of refusals.
NAMES = [
    "acos", "addmm", "cat", "cdist", "chunk", "complex", "conj", "cumprod", "diagonal", "einsum", "exp", "expand",
    "fft.ifft", "fft.irfft", "gather", "index_put", "kthvalue", "linalg.det", "linalg.eigh", "linalg.inv",
    "linalg.lstsq", "logcumsumexp", "lu_solve", "masked_fill", "max", "nn.functional.conv2d", "nn.functional.ctc_loss",
    "nn.functional.dropout2d", "nn.functional.embedding", "nn.functional.fractional_max_pool2d", "nn.functional.gelu",
    "nn.functional.instance_norm", "nn.functional.max_unpool2d", "nn.functional.multi_head_attention_forward",
    "nn.functional.rrelu", "nn.functional.scaled_dot_product_attention", "nn.functional.unfold", "norm", "put",
    "renorm", "roll", "scatter_reduce", "select_scatter", "sort", "svd", "to_sparse", "unbind", "where",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def frozen_database() -> None:
    """As `python -m benchmarks.operators` does: PyTorch's database is nobody's garbage, and large."""
    operators.entries()
    gc.collect()
    freeze_known()


def swept(names: list[str], most_samples: int) -> list[operators.Outcome]:
    device = torch.get_default_device().type
    return operators.sweep(names, ["float64"], most_samples, device=device)


def test_operators_are_bitwise_equal_under_every_choice() -> None:
    outcomes = swept(NAMES, most_samples=1)
    assert len({outcome.name for outcome in outcomes}) >= len(NAMES)
    assert [f"{o.name}: {o.reason}" for o in outcomes if o.status == "fail"] == []
    passed = [outcome for outcome in outcomes if outcome.status == "pass"]
    lacking = [o for o in outcomes if any(operators.NO_DETERMINISTIC_KERNEL in reason for reason in o.incomparable)]
    assert not (lacking and torch.get_default_device().type == "cpu")
    assert len(passed) > 0.9 * (len(outcomes) - len(lacking)) > 0.75 * len(outcomes)
    assert all(outcome.compared > 0 for outcome in passed)
    assert sum(outcome.swapped_bytes > 0 for outcome in passed) > 0.5 * len(passed)
    assert sum(outcome.replayed_ops > 0 for outcome in passed) > 0.5 * len(passed)


def test_a_sample_that_cannot_be_compared_is_no_pass() -> None:
    """GIVEN operators of which some samples, or all, cannot be trained plainly or give other bits each time"""
    outcomes = swept(["as_strided"], most_samples=1000)
    partial = next(outcome for outcome in outcomes if outcome.name == "as_strided_partial_views")
    assert partial.incomparable["plain training raises RuntimeError"] > 0
    assert partial.status == ("pass" if partial.compared else "incomparable")


@pytest.mark.parametrize("share", ["all", "one", "none"])
def test_samples_are_counted_by_whether_they_could_be_compared(share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, step = operators._train, 0

    def noisy(*given: Any) -> list[torch.Tensor]:
        """Plain training of a sample gives something else each time."""
        nonlocal step
        made = real(*given)
        step += 1
        is_noisy = share == "all" or (share == "one" and step <= 2)
        return [made[0] + step, *made[1:]] if is_noisy and given[1] is None else made

    monkeypatch.setattr(operators, "_train", noisy)
    (outcome,) = swept(["exp"], most_samples=2)
    incomparable = {"all": 2, "one": 1, "none": 0}[share]
    assert (outcome.compared, outcome.incomparable.total()) == (2 - incomparable, incomparable)
    assert outcome.status == ("incomparable" if share == "all" else "pass")


def test_the_table_counts_and_names_what_did_not_pass(tmp_path: Path) -> None:
    outcomes = [
        operators.Outcome("one", "float64", compared=3, kept=Counter({"it writes noise": 2})),
        operators.Outcome("two", "float64", "fail", "swap: the loss differs"),
        operators.Outcome("three", "float64", compared=4, incomparable=Counter({"plain training raises Oops": 2})),
        operators.Outcome("four", "float64", "incomparable", "noise", incomparable=Counter({"noise": 5})),
    ]
    text = operators.table(outcomes)
    operators.write(outcomes, text, "4 entries", tmp_path)
    assert text in (tmp_path / "operators-cpu.md").read_text()
    written = json.loads((tmp_path / "operators-cpu.json").read_text())["outcomes"]
    assert [outcome["kept"] for outcome in written] == [{"it writes noise": 2}, {}, {}, {}]
    assert [outcome["compared"] for outcome in written] == [3, 0, 4, 0]
    assert [sum(outcome["incomparable"].values()) for outcome in written] == [0, 0, 2, 5]
    assert "| float64 | 2 | 0 | 1 | 0 | 1 | 7 | 7 |" in text
    assert "| two | float64 | fail | 0 | 0 | swap: the loss differs |" in text
    assert "| three | float64 | pass | 4 | 2 | plain training raises Oops (2) |" in text
    assert "| four | float64 | incomparable | 0 | 5 | noise (5) |" in text
