"""A fixed small part of the operator sweep (`python -m benchmarks.operators` runs all of it)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("expecttest", reason="PyTorch's operator database needs the package expecttest")

from benchmarks import operators

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


def test_operators_are_bitwise_equal_under_every_choice() -> None:
    outcomes = operators.sweep(NAMES, ["float64"], most_samples=1)
    assert len({outcome.name for outcome in outcomes}) >= len(NAMES)
    assert [f"{o.name}: {o.reason}" for o in outcomes if o.status == "fail"] == []
    passed = [outcome for outcome in outcomes if outcome.status == "pass"]
    assert len(passed) > 0.9 * len(outcomes)
    assert sum(outcome.swapped_bytes > 0 for outcome in passed) > 0.5 * len(passed)
    assert sum(outcome.replayed_ops > 0 for outcome in passed) > 0.5 * len(passed)


def test_the_table_counts_and_names_what_did_not_pass(tmp_path: Path) -> None:
    outcomes = [
        operators.Outcome("one", "float64", kept=Counter({"it writes noise": 2})),
        operators.Outcome("two", "float64", "fail", "swap: the loss differs"),
    ]
    text = operators.table(outcomes)
    operators.write(outcomes, text, "2 entries", tmp_path)
    assert text in (tmp_path / "operators-cpu.md").read_text()
    written = json.loads((tmp_path / "operators-cpu.json").read_text())["outcomes"]
    assert [outcome["kept"] for outcome in written] == [{"it writes noise": 2}, {}]
    assert "| float64 | 1 | 0 | 0 | 1 |" in text
    assert "| two | float64 | fail | swap: the loss differs |" in text
