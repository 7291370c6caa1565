"""Makes the recipe of a failure smaller, as long as it fails in the same way."""

from __future__ import annotations

from benchmarks.fuzz.recipe import Part, Recipe
from benchmarks.fuzz.verdict import Verdict, verdict_of


def failing(found: Verdict) -> set[tuple[str, str]]:
    """Return each way that failed, and how."""
    return {(way, outcome.kind) for way, outcome in found.failures.items()}


def shrunk(recipe: Recipe) -> tuple[Recipe, Verdict]:
    """Take pieces away, one after the other, as long as any of the ways still fails as it did.

    Args:
        recipe: A recipe whose model fails.

    Returns:
        The smallest one found, and what became of it.
    """
    found = verdict_of(recipe)
    wanted = failing(found)
    number = 0
    while number < len(recipe.parts) and wanted:
        smaller = recipe.without(number)
        verdict = verdict_of(smaller)
        if failing(verdict) & wanted:
            recipe, found = smaller, verdict
        else:
            number += 1
    return recipe, found


def kind_of(parts: tuple[Part, ...]) -> str:
    """Return what is left in a shrunk recipe, without its options."""
    return " + ".join(sorted(_names(part) for part in parts)) or "nothing but a linear layer"


def _names(part: Part) -> str:
    return part.kind + (f"[{' -> '.join(map(_names, part.inner))}]" if part.inner else "")
