"""Steps under the online policy: bitwise those of plain training, at every budget."""

from __future__ import annotations

import pytest

from tests.executor.online.support import copies_cost, run_online, run_plainly
from tests.executor.online.zoo import ZOO
from tests.executor.support import assert_same

pytestmark = pytest.mark.cpu
SHARES = (0.0, 0.4, 0.7)  # of the plain peak; nothing fits into the first, so that all leaves that can
# Steps whose plain peak is mostly what can leave, and not gradients, copies for the test and what single ops need.
FIT = {
    "convolutions", "attention", "recurrent", "dropout", "own results", "views", "several outputs", "several forwards",
    "overlapping steps", "changing buffer", "running statistics", "checkpoint",
}  # fmt: skip


@pytest.mark.parametrize("way", ["copied", "replayed", "either"])
@pytest.mark.parametrize("kind", ZOO)
def test_steps_are_those_of_plain_training(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_plainly(ZOO[kind])
    if way != "either":
        copies_cost(monkeypatch, 1e-9 if way == "copied" else 1e9)
    swapped_bytes = replayed_ops = floor_bytes = 0
    for share in SHARES:
        budget_bytes = int(share * plain.peak_bytes)
        seen = run_online(ZOO[kind], budget_bytes)
        assert_same(plain.found, seen.found)
        assert seen.peak_bytes <= budget_bytes + seen.missing_bytes
        floor_bytes = floor_bytes or seen.peak_bytes
        assert seen.peak_bytes <= max(budget_bytes, floor_bytes)
        assert seen.missing_bytes == 0 or share < 0.7 or kind not in FIT
        swapped_bytes += seen.stats.swapped_out_bytes
        replayed_ops += seen.stats.recomputed_ops
    assert swapped_bytes if way == "copied" else replayed_ops if way == "replayed" else swapped_bytes or replayed_ops
