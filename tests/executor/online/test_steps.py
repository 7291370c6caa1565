"""Steps under the online policy: bitwise those of plain training, at every budget."""

from __future__ import annotations

import pytest

from tests.executor.online.support import copies_cost, run_online, run_plainly
from tests.executor.online.zoo import ZOO
from tests.executor.support import assert_same

pytestmark = pytest.mark.cpu
SHARES = (0.7, 0.4, 0.0)  # of the plain peak; nothing fits into the last


@pytest.mark.parametrize("way", ["copied", "replayed", "either"])
@pytest.mark.parametrize("kind", ZOO)
def test_steps_are_those_of_plain_training(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_plainly(ZOO[kind])
    if way != "either":
        copies_cost(monkeypatch, 1e-9 if way == "copied" else 1e9)
    swapped_bytes = replayed_ops = 0
    for share in SHARES:
        budget_bytes = int(share * plain.peak_bytes)
        seen = run_online(ZOO[kind], budget_bytes)
        assert_same(plain.found, seen.found)
        assert seen.peak_bytes <= budget_bytes + seen.missing_bytes
        swapped_bytes += seen.stats.swapped_out_bytes
        replayed_ops += seen.stats.recomputed_ops
    assert swapped_bytes if way == "copied" else replayed_ops if way == "replayed" else swapped_bytes or replayed_ops
