"""Loops of others: what is concluded from their trainings, and that they train in both ways."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.loops.__main__ import FOUND, PAGE, RESULTS, stored
from benchmarks.loops.page import page, row_of
from benchmarks.setups.counting import preloading

ROOT = Path(__file__).parents[2]
BOTH = """
import json, sys, torch
torch.set_num_threads(1)
from benchmarks.loops.child import trained
from benchmarks.setups.counting import LiveBytes
counter, found = LiveBytes(), []
for way, budget_bytes in (("plain", None), ("auto", 3 * 2**20), ("exec", 3 * 2**20)):
    found.append(trained({"name": "neural-style", "way": way, "budget_bytes": budget_bytes}, counter))
print(json.dumps([[each["values"], each["pooch"]] for each in found]))
"""


def test_a_loop_trains_plainly_and_in_both_ways_with_the_same_numbers() -> None:
    import os

    done = subprocess.run(
        [sys.executable, "-c", BOTH], cwd=ROOT, env=preloading(dict(os.environ)), capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (plain, _), *governed = json.loads(done.stdout.splitlines()[-1])
    assert len(plain["loss"]) == 5
    for values, figures in governed:
        assert values == plain
        assert figures["steps"] >= 5


def test_the_page_is_made_from_what_is_stored() -> None:
    lines = stored(ROOT / RESULTS)
    assert page(lines, (ROOT / FOUND).read_text()) == (ROOT / PAGE).read_text()


def test_no_stored_training_has_other_bits_or_passes_its_budget_silently() -> None:
    rows = [row_of(line) for line in stored(ROOT / RESULTS).values() if line["governed"]]
    assert len(rows) >= 30
    assert not [row for row in rows if "**" in str(row)]
