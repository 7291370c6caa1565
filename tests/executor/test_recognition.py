"""An op is known again by name, shapes and dtypes, also when it was seen before."""

from __future__ import annotations

import pytest
import torch

from pooch.executor.table import OpRecogniser
from pooch.ir import ExpectedOp

SIN, COS = torch.ops.aten.sin.default, torch.ops.aten.cos.default
NAME = "aten.sin.default"


def recogniser() -> OpRecogniser:
    return OpRecogniser((ExpectedOp(NAME, "aten.sin.default(float32[2,3])", (0,)),))


@pytest.mark.parametrize("seen_before", [False, True])
def test_the_planned_op_and_no_other(seen_before: bool) -> None:
    known, right = recogniser(), torch.rand(2, 3)
    if seen_before:
        assert known.is_expected(0, SIN, NAME, [right])
    assert known.is_expected(0, SIN, NAME, [right.t().contiguous().t()])  # strides are not part of it
    assert not known.is_expected(0, SIN, NAME, [torch.rand(3, 2)])
    assert not known.is_expected(0, SIN, NAME, [right.double()])
    assert not known.is_expected(0, SIN, NAME, [right, right])
    assert not known.is_expected(0, SIN, NAME, [])
    assert not known.is_expected(0, COS, "aten.cos.default", [right])
    assert known.is_expected(0, SIN, NAME, [right])
