"""The model that a recipe describes, and its training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.fuzz.pieces import PIECES
from benchmarks.fuzz.recipe import Part, Recipe
from tests.hostile.case import ROWS, WIDTH, Hostile
from tests.hostile.cases import CASES


class HostilePart(nn.Module):
    """A hostile case between two linear layers, since it has a width and a number of rows of its own."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, WIDTH), nn.Linear(WIDTH, width)
        self.case = CASES[kind].build()
        self.is_whole = type(self.case).forward is not Hostile.forward

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.enter(rows.float())[torch.arange(ROWS) % len(rows)].float()
        hidden = hidden * (1 + self.case(hidden)) if self.is_whole else self.case.layer(hidden).float()
        hidden = self.leave(torch.tanh(hidden)).to(rows.dtype)
        return rows + hidden.repeat(-(-len(rows) // ROWS), 1)[: len(rows)]


class Surrounded(nn.Module):
    """Pieces inside of something."""

    def __init__(self, inner: Sequence[nn.Module], kind: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.kind, self.options = nn.Sequential(*inner), kind, options
        self.number = 0

    def forward(self, rows: Tensor) -> Tensor:
        match self.kind:
            case "Residual":
                return rows + self.inner(rows)
            case "Checkpoint":
                return checkpoint(self.inner, rows, use_reentrant=False)
            case "Reentrant checkpoint":
                return checkpoint(self.inner, rows, use_reentrant=True)
            case "Twice":
                return self.inner(torch.tanh(self.inner(rows)))
            case "Autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    return self.inner(rows).to(rows.dtype)
            case "Half the rows":
                half = len(rows) // 2
                return torch.cat([self.inner(rows[:half].repeat(2, 1))[:half], rows[half:].sin()])
        late = self.number - int(self.options["from_step"])
        return self.inner(rows) if late >= 0 and late % self.options["every"] == 0 else rows.sin()


def _made(part: Part, width: int, dtype: torch.dtype) -> nn.Module:
    if part.is_hostile:
        return HostilePart(width, part.kind)
    if part.inner:
        return Surrounded([_made(inner, width, dtype) for inner in part.inner], part.kind, part.options)
    return PIECES[part.kind](width, **part.options).to(dtype)


class Fuzzed(Hostile):
    """The model of a recipe."""

    recipe: Recipe

    def add_parts(self) -> None:
        recipe = self.recipe
        del self.first, self.second
        self.dtype = getattr(torch, recipe.dtype)
        self.enter = nn.Linear(recipe.width, recipe.width).to(self.dtype)
        self.pieces = nn.ModuleList(_made(part, recipe.width, self.dtype) for part in recipe.parts)
        self.steps, self.accumulated = recipe.steps, recipe.accumulated
        self.cases = tuple(module for module in self.pieces.modules() if isinstance(module, Hostile))
        surrounded = (module for module in self.pieces.modules() if isinstance(module, Surrounded))
        self.numbered = (*self.cases, *surrounded)  # a tuple, so that modules are not registered twice
        self._optimizer: torch.optim.Optimizer | None = None

    def forward(self, rows: Tensor) -> Tensor:
        recipe = self.recipe
        with torch.autocast("cpu", torch.bfloat16) if recipe.autocast else nullcontext():
            rows = self.enter(rows)
            for piece in self.pieces:
                rows = piece(rows)
            rows = rows.float()
            if recipe.loss == "cross entropy":
                return functional.cross_entropy(rows, torch.arange(len(rows)) % recipe.width)
            if recipe.loss == "huber":
                return functional.smooth_l1_loss(rows, torch.ones_like(rows))
            return rows.square().mean()

    def batch(self, number: int) -> Tensor:
        count = self.recipe.rows
        if self.recipe.varied and number == self.steps - 1:
            count -= count // 2 // 8 * 8
        generator = torch.Generator().manual_seed(100 + number)
        return torch.randn(count, self.recipe.width, generator=generator, dtype=torch.float32).to(self.dtype)

    def optimizer(self) -> torch.optim.Optimizer:
        parameters = list(self.parameters())
        held = [] if self._optimizer is None else self._optimizer.param_groups[0]["params"]
        if [id(parameter) for parameter in held] != [id(parameter) for parameter in parameters]:
            self._optimizer = self._new_optimizer(parameters)
        assert self._optimizer is not None
        return self._optimizer

    def _new_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.recipe.optimizer == "adamw":
            return torch.optim.AdamW(parameters, 1e-3)
        return torch.optim.SGD(parameters, 0.02, momentum=0.9 if self.recipe.optimizer == "momentum" else 0.0)

    def before_step(self) -> None:
        for module in self.numbered:
            module.number = self.number
        for case in self.cases:
            case.before_step()

    def between(self) -> None:
        for case in self.cases:
            case.between()

    def after_step(self) -> None:
        for case in self.cases:
            case.after_step()

    def other_models(self) -> list[nn.Module]:
        return [other for case in self.cases for other in case.other_models()]


def builder(recipe: Recipe) -> Callable[[], Hostile]:
    """Return what builds the model of a recipe."""
    return type("Fuzzed", (Fuzzed,), {"recipe": recipe})
