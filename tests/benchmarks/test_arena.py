"""The benchmark of arenas: its tables follow from what is stored, and its child trains under each allocator alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import arena
from benchmarks.tables import LAYOUT

STORED = Path(__file__).parents[2] / "benchmarks" / "results" / f"{arena.NAME}.json"
SMALL = {"workload": "lstm", "settings": {"batch_size": 4, "sequence_length": 8, "width": 32}, "threads": 1}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(STORED.read_text())
    return found


def test_the_tables_are_what_the_samples_say(document: dict[str, Any]) -> None:
    assert document["layout"] == LAYOUT
    assert document["rows"] == json.loads(json.dumps(arena.memory_rows(document["results"])))
    assert document["more"] == json.loads(json.dumps(arena.more_of(document["results"])))


def test_all_losses_were_the_same_and_the_arena_served(document: dict[str, Any]) -> None:
    for result in document["results"]:
        losses = {tuple(step["loss"] for step in found["steps"]) for found in result["allocators"].values()}
        assert len(losses) == 1, (result["workload"], result["kind"])
        assert result["allocators"]["arena"]["arena"]["counters"]["placed"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_child_trains_alike_with_and_without_an_arena() -> None:
    losses, ends = {}, {}
    for name in ("glibc", "arena"):
        with arena.process({**SMALL, "plan": None, "allocator": name, "warm_steps": 7}, None) as child:
            base = child.answer()
            assert base["base_rss_bytes"] > base["base_live_bytes"] > 0
            losses[name] = [child.ask({"step": turn})["loss"] for turn in range(3)]
            ends[name] = child.ask({"end": True})
    assert losses["glibc"] == losses["arena"]
    assert ends["glibc"]["arena"] is None
    with arena.process(
        {**SMALL, "plan": None, "allocator": "glibc", "warm_steps": 2, "room_bytes": 2**16}, None
    ) as child:
        assert child.answer()["survived"] is False
    counters = ends["arena"]["arena"]["counters"]
    assert counters["placed"] > 100
    assert counters["unrecognised"] + counters["collided"] + counters["beyond"] == 0
