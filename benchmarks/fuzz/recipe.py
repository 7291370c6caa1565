"""What a random model is made of, written from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from benchmarks.fuzz.pieces import PIECES
from tests.hostile.case import Hostile
from tests.hostile.cases import CASES, Case

AROUND = ("Residual", "Checkpoint", "Reentrant checkpoint", "Twice", "Autocast", "Half the rows", "Now and then")
DTYPES = ("float32", "float32", "float32", "float64", "bfloat16")
BUDGETS = (1, 20_000, 50_000, 100_000)


@dataclass(frozen=True)
class Part:
    """A piece of a model.

    Attributes:
        kind: The name of an ordinary piece, of a hostile case, or what surrounds the `inner` pieces.
        options: Of an ordinary piece, or of what surrounds others.
        inner: The pieces inside.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    inner: tuple[Part, ...] = ()

    @property
    def is_hostile(self) -> bool:
        return self.kind in CASES

    def hostile_kinds(self) -> set[str]:
        """Return the hostile cases in it."""
        return ({self.kind} if self.is_hostile else set()).union(*(part.hostile_kinds() for part in self.inner))

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        inner = " -> ".join(map(str, self.inner))
        return self.kind + (f"({told})" if told else "") + (f"[{inner}]" if inner else "")


@dataclass(frozen=True)
class Recipe:
    """A random model and how it is trained. `str()` describes it whole.

    Attributes:
        seed: Of the random numbers from which it was written.
        rows: Number of rows in a batch.
        width: Width of the rows.
        dtype: Of the ordinary pieces.
        autocast: Whether the model's forward pass is under autocast.
        loss: How the loss is computed.
        optimizer: "sgd", "momentum", or "adamw".
        accumulated: Number of steps whose gradients are added up before the optimizer's.
        steps: Number of training steps.
        varied: Whether the last step has fewer rows.
        parts: The pieces, first to last.
        choices: Of keep, swap and recompute, taken in turns by the activations.
        budget: For `pooch.auto`, in bytes of what is allocated from the first model on.
        copies: What copies cost `pooch.auto`: "dear", "free" or "by size".
        records: Number of steps that `pooch.auto` records.
    """

    seed: int
    rows: int
    width: int
    dtype: str
    autocast: bool
    loss: str
    optimizer: str
    accumulated: int
    steps: int
    varied: bool
    parts: tuple[Part, ...]
    choices: tuple[str, ...]
    budget: int
    copies: str
    records: int

    def hostile_kinds(self) -> set[str]:
        """Return the hostile cases in it."""
        return set().union(*(part.hostile_kinds() for part in self.parts))

    def without(self, number: int) -> Recipe:
        """Return the recipe without one of its pieces, or with what that surrounds in its place."""
        return replace(self, parts=(*self.parts[:number], *self.parts[number].inner, *self.parts[number + 1 :]))

    def __str__(self) -> str:
        said = {name: value for name, value in vars(self).items() if name != "parts"}
        about = ", ".join(f"{name}={value!r}" for name, value in said.items())
        return "\n".join([about, *(f"  {number}: {part}" for number, part in enumerate(self.parts))])


def fits_in(case: Case) -> bool:
    """Whether a hostile case can be a piece of a larger model: it trains, and surrounds no calls of the whole model."""
    kind = case.build
    assert isinstance(kind, type)
    whole = kind.around is not Hostile.around or case.name == "TwoForwards"
    return not (case.raises or case.is_alone or case.moves_nothing or whole)


HOSTILE_PARTS = tuple(name for name, case in CASES.items() if fits_in(case))


def written(seed: int) -> Recipe:
    """Write a random recipe, the same for each seed."""
    drawing = Random(seed)
    hostile = drawing.choices((0, 1, 2), (45, 40, 15))[0]
    parts = [_ordinary(drawing, depth=0) for _ in range(drawing.choice((1, 2, 2, 3)))]
    for _ in range(hostile):
        part = Part(drawing.choice(HOSTILE_PARTS))
        if drawing.random() < 0.3:
            part = _surrounded(drawing, (part,))
        parts.insert(drawing.randint(0, len(parts)), part)
    choices = drawing.choice((("recompute",), ("swap",), ("recompute", "swap"), ("recompute", "swap", "keep")))
    return Recipe(
        seed=seed,
        rows=drawing.choice((8, 16, 32, 48)),
        width=drawing.choice((16, 32, 48)),
        dtype=drawing.choice(DTYPES),
        autocast=drawing.random() < 0.15,
        loss=drawing.choice(("square", "cross entropy", "huber")),
        optimizer=drawing.choice(("sgd", "sgd", "sgd", "momentum", "momentum", "adamw")),
        accumulated=drawing.choice((1, 1, 1, 2)),
        steps=drawing.choice((3, 3, 3, 4)),
        varied=drawing.random() < 0.1,
        parts=tuple(parts),
        choices=tuple(drawing.choices(choices, k=7)),
        budget=drawing.choice(BUDGETS),
        copies=drawing.choice(("dear", "dear", "by size", "free")),
        records=drawing.choice((0, 0, 0, 0, 0, 0, 0, 3)),
    )


def _ordinary(drawing: Random, depth: int) -> Part:
    if depth < 2 and drawing.random() < 0.25:
        inner = tuple(_ordinary(drawing, depth + 1) for _ in range(drawing.choice((1, 1, 2))))
        return _surrounded(drawing, inner)
    kind = drawing.choice(list(PIECES))
    return Part(kind, PIECES[kind].drawn(drawing))


def _surrounded(drawing: Random, inner: tuple[Part, ...]) -> Part:
    kind = drawing.choice(AROUND)
    options = {"from_step": drawing.randint(1, 2), "every": drawing.randint(1, 2)} if kind == "Now and then" else {}
    return Part(kind, options, inner)
