"""Large inputs at a size that a test has time for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import scale

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    "large",
    [
        lambda: scale.many_modules(300, nested=100),
        lambda: scale.many_activations(2000),
        lambda: scale.many_plans(60, 12),
    ],
    ids=["modules", "activations", "plans"],
)
@pytest.mark.slow
def test_large_inputs_get_an_answer(large: Callable[[], dict[str, float]]) -> None:
    assert large()
