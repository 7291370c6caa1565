"""Trains the model of a recipe plainly, under a plan and under `pooch.auto`, and compares bit by bit."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fuzz.model import builder
from benchmarks.fuzz.recipe import Recipe, written
from pooch.ir import Choice
from tests.hostile.case import Case
from tests.hostile.governors import DEAR, FREE, Automatic, Decide
from tests.hostile.harness import Judge, NotReproducible, Outcome, told

WAYS = ("apply", "auto")
REPEATS = 3  # of plain training, before a difference is taken for a failure
RIGHT = ("same", "nothing happened", "refused", "same error")


@dataclass(frozen=True)
class Verdict:
    """What became of a seed.

    Attributes:
        seed: The seed.
        discarded: Why there is nothing to compare with, or "".
        outcomes: For each way, unless it was discarded.
        hostile: The hostile pieces of the model.
        parts: The pieces of the model, in words.
    """

    seed: int
    discarded: str = ""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    hostile: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    @property
    def failures(self) -> dict[str, Outcome]:
        """The ways that gave other numbers, or an error that plain training does not raise."""
        return {way: outcome for way, outcome in self.outcomes.items() if outcome.kind not in RIGHT}

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Verdict:
        outcomes = {way: Outcome(**outcome) for way, outcome in told["outcomes"].items()}
        return cls(told["seed"], told["discarded"], outcomes, tuple(told["hostile"]), tuple(told["parts"]))


def verdict(seed: int) -> Verdict:
    """Judge the model that a seed writes."""
    return verdict_of(written(seed))


def verdict_of(recipe: Recipe) -> Verdict:
    """Judge the model of a recipe."""
    hostile = tuple(sorted(recipe.hostile_kinds()))
    parts = tuple(map(str, recipe.parts))

    def discarded(why: str) -> Verdict:
        return Verdict(recipe.seed, why[:200], {}, hostile, parts)

    try:
        judge = Judge(Case(f"seed {recipe.seed}", "written at random", builder(recipe)), is_patient=False)
        if judge.plain.error is not None:
            return discarded(f"plain training raises {told(judge.plain.error)}")
        outcomes = {
            "apply": judge.applied(decided(recipe.choices)),
            "auto": judge.automatic(automatic(recipe)),
        }
        if any(outcome.kind not in RIGHT for outcome in outcomes.values()):
            judge.check_reproducible(REPEATS)
    except NotReproducible as error:
        return discarded(f"plain training does not repeat: {error}")
    return Verdict(recipe.seed, "", outcomes, hostile, parts)


def decided(choices: tuple[str, ...]) -> Decide:
    """Return what takes the choices in turns. What cannot be replayed is swapped."""

    def decide(values: list[int], replayable: set[int]) -> dict[int, Choice]:
        turns: dict[int, Choice] = dict(zip(values, itertools.cycle(choices), strict=False))  # type: ignore[arg-type]
        return {
            value: "swap" if choice == "recompute" and value not in replayable else choice
            for value, choice in turns.items()
        }

    return decide


def automatic(recipe: Recipe) -> Automatic:
    """Return the governor of the second way."""
    cost = {"dear": DEAR, "free": FREE, "by size": _by_size}[recipe.copies]
    return Automatic(cost, recipe.records, recipe.budget, recounts=False)


def _by_size(size_bytes: int) -> float:
    """Every third size is copied, the same ones each time, whatever was measured."""
    return FREE if size_bytes // 64 % 3 == 0 else DEAR * size_bytes
