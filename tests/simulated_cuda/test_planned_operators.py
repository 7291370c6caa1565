"""The sweep of operators under plans: what the device finds wrong during an entry fails it."""

from __future__ import annotations

import os

import pytest

from tests.simulated_cuda.mistakes import is_simulated

pytest.importorskip("expecttest", reason="PyTorch's operator database needs the package expecttest")

from benchmarks import operators
from pooch.executor.engines.streams import StreamTicket
from tests.simulated_cuda.planned_operators import swept

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not is_simulated(), reason="about the simulated CUDA device: python -m tests.simulated_cuda pytest"
    ),
    pytest.mark.skipif(
        os.environ.get("SIMULATED_CUDA_NUMBERS") != "1", reason="kernels compute nothing in memory mode"
    ),
]


@pytest.mark.parametrize("is_broken", [False, True])
def test_an_entry_during_which_the_device_found_a_mistake_fails(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN an engine whose compute does not wait for copies, or that of Pooch"""
    if is_broken:
        monkeypatch.setattr(StreamTicket, "wait", lambda self: 0.0)
        # Who asks whether a copy has ended, and hears that it has, is ordered after it as one who waited.
        monkeypatch.setattr(StreamTicket, "is_done", lambda self: False)
    index = next(number for number, op in enumerate(operators.entries()) if op.name == "addmm")
    outcome = swept(index, "float64", 1)
    assert outcome.status == ("fail" if is_broken else "pass"), outcome.reason
    assert outcome.reason.startswith("the device found: ") == is_broken
