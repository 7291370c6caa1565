"""The stored bytes of packed steps beside what PyTorch reserves for the same steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import simulated_arena

STORED = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / f"{simulated_arena.NAME}.json").read_text())


def test_the_stored_tables_are_made_of_the_stored_results() -> None:
    assert STORED["rows"] == simulated_arena.rows_of(STORED["results"])
    assert list(STORED["more"].values()) == [simulated_arena.served_rows(STORED["results"])]
    found = [(result["workload"], result["batch_size"]) for result in STORED["results"][::2]]
    assert found == list(simulated_arena.WORKLOADS.items())


def outliving_bytes(result: Any) -> int:
    """The most bytes that blocks which outlive a step can have added: garbage that nobody has collected yet."""
    counters = result["arena"]["arena"]["counters"]
    return int(counters["other_bytes"] + 512 * counters["unplaced"])


def test_every_allocator_was_asked_for_the_same() -> None:
    for result in STORED["results"]:
        default, expandable, arena = (result[way]["rest"]["requested"] for way in simulated_arena.WAYS)
        assert default == expandable
        assert 0 <= arena - default <= outliving_bytes(result)  # its training has one step more


def test_what_is_served_from_an_arena_takes_what_stays_and_the_arena() -> None:
    for result in STORED["results"]:
        own = result["arena"]
        arena = own["arena"]
        assert arena["state"] == "serving"
        assert arena["counters"]["placed"] == arena["counters"]["steps"] * arena["blocks"]
        above_bytes = own["rest"]["allocated"] - own["staying_bytes"] - arena["bound_bytes"]
        assert 0 <= above_bytes <= outliving_bytes(result) <= 8192
        assert own["rest"]["reserved"] == simulated_arena.packed_bytes(result) + above_bytes
