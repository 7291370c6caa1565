"""The table of packing: made of what is stored, and of what is packed now."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.packing import LARGE, instances_in, measure, peer_runs, rows_of
from benchmarks.packing_instances import random_blocks, training_step

STORED = json.loads((Path(__file__).parents[2] / "benchmarks/results/packing.json").read_text())


def test_the_stored_table_is_made_of_the_stored_results() -> None:
    assert STORED["rows"] == rows_of(STORED["results"])


def test_no_stored_arena_is_below_its_bound_and_none_of_ours_is_above_sekiyama() -> None:
    for result in STORED["results"]:
        runs = [*result["runs"], *result.get("peers", [])]
        assert all(run["arena_bytes"] >= result["bound_bytes"] for run in runs)
        (sekiyama,) = (run["arena_bytes"] for run in runs if run["policy"] == "sekiyama")
        assert all(run["arena_bytes"] <= sekiyama for run in runs if run["policy"] == "ours")


def test_the_instances_of_our_own_are_the_same_every_time(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,lower,upper,size\n1,0,2,3\n")
    first, again = instances_in(tmp_path), instances_in(tmp_path)
    assert first == again
    assert [len(blocks) for blocks in first.values()] == [1, LARGE, LARGE, LARGE, LARGE]


def test_an_instance_is_measured_into_a_row() -> None:
    (row,) = rows_of([measure("step", training_step(6), [0.01, 0.02])])
    assert list(row) == ["instance", "blocks", "sekiyama", "greedy_by_size", "ours, 0.01 s", "ours, 0.02 s"]
    assert float(str(row["ours, 0.02 s"]).split()[0]) >= 1


def test_the_peer_is_packed_where_it_is_installed() -> None:
    pytest.importorskip("omnimalloc", reason="the peer is an extra: pip install omnimalloc")
    runs = peer_runs(sys.executable, random_blocks(20), 0.2)
    assert len(runs) == 3
