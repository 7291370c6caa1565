"""The stored bytes of packed steps beside what PyTorch reserves for the same steps."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import simulated_arena

STORED = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / f"{simulated_arena.NAME}.json").read_text())


def test_the_stored_tables_are_made_of_the_stored_results() -> None:
    assert STORED["rows"] == simulated_arena.rows_of(STORED["results"])
    assert list(STORED["more"].values()) == [simulated_arena.served_rows(STORED["results"])]
    found = [(result["workload"], result["batch_size"]) for result in STORED["results"][::2]]
    assert found == list(simulated_arena.WORKLOADS.items())


def test_every_allocator_was_asked_for_the_same() -> None:
    for result in STORED["results"]:
        requested = {way: result[way]["rest"]["requested"] for way in simulated_arena.WAYS}
        assert len(set(requested.values())) == 1, (result["workload"], result["kind"], requested)


def test_what_is_served_from_an_arena_takes_what_stays_and_the_arena() -> None:
    for result in STORED["results"]:
        own = result["arena"]
        arena = own["arena"]
        assert arena["state"] == "serving"
        assert arena["counters"]["placed"] == arena["counters"]["steps"] * arena["blocks"]
        assert own["staying_bytes"] + arena["bound_bytes"] == own["rest"]["allocated"]
        assert own["rest"]["reserved"] == simulated_arena.packed_bytes(result)
