"""Random models keep their bits, and the fuzzer writes, judges, shrinks and counts what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import Tensor

from benchmarks.fuzz import shrink, verdict, workers
from benchmarks.fuzz.model import builder
from benchmarks.fuzz.pieces import PIECES
from benchmarks.fuzz.recipe import AROUND, HOSTILE_PARTS, Part, Recipe, written
from benchmarks.fuzz.report import counts, page
from benchmarks.fuzz.verdict import Verdict
from tests.hostile.harness import Outcome
from tests.hostile.test_harness import is_governed
from tests.hostile.training import first_difference, train

pytestmark = pytest.mark.cpu
SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_keeps_its_bits(seed: int) -> None:
    found = verdict.verdict(seed)
    assert not found.failures, f"python -m benchmarks.fuzz_replays --seed {seed} --shrink: {found}"


def test_the_models_of_the_slice_are_swapped_and_replayed() -> None:
    judged = [found for found in map(verdict.verdict, range(1000, 1012)) if not found.discarded]
    assert len(judged) >= 8
    for way in verdict.WAYS:
        assert any(found.outcomes[way].replayed_ops for found in judged)
        assert any(found.outcomes[way].moved_bytes for found in judged)


def test_every_piece_is_written_sooner_or_later() -> None:
    def kinds(part: Part) -> set[str]:
        return {part.kind}.union(*map(kinds, part.inner))

    seen = set().union(*(kinds(part) for seed in range(3000) for part in written(seed).parts))
    assert seen == {*PIECES, *AROUND, *HOSTILE_PARTS}


def test_a_seed_writes_the_same_model_each_time() -> None:
    assert str(written(7)) == str(written(7)) != str(written(8))
    one, other = (train(builder(written(7))) for _ in range(2))
    assert one.error is None
    assert first_difference(one.found, other.found) is None


class _Watched(PIECES["Cast"]):  # type: ignore[misc]
    """A piece that computes something else when it is governed, so that a model with it always fails."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows * 2 if is_governed() else rows


del PIECES["_Watched"]  # which its class has put there: no seed may write it


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Part:
    monkeypatch.setitem(PIECES, "_Watched", _Watched)
    return Part("_Watched", {"to": "float64"})


def ordinary_seed() -> Recipe:
    return next(recipe for recipe in map(written, range(100)) if not recipe.hostile_kinds() and len(recipe.parts) > 1)


def test_a_failure_is_shrunk_to_the_piece_that_causes_it(watched: Part) -> None:
    recipe = ordinary_seed()
    around = Part("Residual", {}, (Part("Dense", PIECES["Dense"].drawn(Random(1))), watched))
    smaller, found = shrink.shrunk(replace(recipe, parts=(*recipe.parts, around)))
    assert smaller.parts == (watched,)
    assert {outcome.kind for outcome in found.failures.values()} == {"DIFFERENT"}


def test_a_run_is_continued_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "journal.jsonl", []

    def run(seeds: list[int], journal: workers.Journal) -> None:
        asked.append(seeds)
        for seed in seeds:
            journal.add(Verdict(seed, outcomes={"apply": Outcome("same", replayed_ops=1)}).as_json())

    monkeypatch.setattr(workers, "_run_worker", run)
    workers.judge_all([3, 4], 1, workers.Journal(path), lambda _: None)
    path.write_text(path.read_text() + '{"seed": 5, "disc')  # killed in the middle of a line
    journal = workers.Journal(path)
    workers.judge_all(range(8), 1, journal, lambda _: None)
    assert asked == [[3, 4], [0, 1, 2, 5, 6, 7]]
    assert sorted(journal.verdicts) == list(range(8))


def test_a_model_that_ends_the_process_is_a_failure_and_the_next_one_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(seeds: list[int], journal: workers.Journal) -> tuple[int, str] | None:
        for seed in seeds:
            if seed == 2:
                return seed, "exit code -11"
            journal.add(Verdict(seed, outcomes={"apply": Outcome("same")}).as_json())
        return None

    monkeypatch.setattr(workers, "_run_worker", run)
    journal = workers.Journal(tmp_path / "journal.jsonl")
    workers.judge_all(range(5), 1, journal, lambda _: None)
    assert sorted(journal.verdicts) == list(range(5))
    assert [seed for seed, found in journal.verdicts.items() if found.failures] == [2]


def test_a_worker_judges_its_row(tmp_path: Path) -> None:
    journal = workers.Journal(tmp_path / "journal.jsonl")
    assert workers._run_worker([1000, 1001], journal) is None
    assert sorted(journal.verdicts) == [1000, 1001]


def test_the_page_counts_failures_by_piece() -> None:
    bad: dict[str, Any] = {"apply": Outcome("DIFFERENT", "step 0: loss"), "auto": Outcome("same", "", 3, 5)}
    found = counts(
        [
            Verdict(0, outcomes={"apply": Outcome("same", "", 2, 0), "auto": Outcome("same")}),
            Verdict(1, outcomes=bad, hostile=("OwnNoise",)),
            Verdict(2, "plain training does not repeat: seed 2: loss"),
        ]
    )
    assert (found["models"], found["failing_models"], sum(found["discarded"].values())) == (3, 1, 1)
    assert found["failing_by_hostile_piece"] == {"OwnNoise": {"failing": 1, "of": 1, "seeds": [1]}}
    assert found["ways"]["auto"]["ops replayed"] == 3
    assert "| OwnNoise | 1 | 1 | 1 |" in page(found)
