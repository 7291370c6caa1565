"""The harness sees what it is there to see: other bits, foreign errors, errors that are missing, and idle ways."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pooch.errors import PoochError
from tests.hostile.case import Case, Hostile
from tests.hostile.harness import WAYS, Judge, NotReproducible

pytestmark = pytest.mark.cpu


def is_governed() -> bool:
    """Whether saved tensors go through hooks, as they do under whatever governs a step."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class Ordinary(Hostile):
    pass


class OtherBits(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return super().layer(rows * (1 + 2**-23) if is_governed() and self.number == 3 else rows)


class OtherBuffer(Hostile):
    def add_parts(self) -> None:
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def layer(self, rows: Tensor) -> Tensor:
        if is_governed():
            self.seen.fill_(1)
        return super().layer(rows)


class DrawsMore(Hostile):
    def between(self) -> None:
        if self.is_watched:
            torch.rand(())

    def layer(self, rows: Tensor) -> Tensor:
        self.is_watched = is_governed()
        return super().layer(rows)


class LeavesASetting(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        if is_governed():
            torch.set_float32_matmul_precision("high")
        return super().layer(rows)


class RaisesWhenGoverned(Hostile):
    def between(self) -> None:
        if self.is_watched:
            raise RuntimeError("watched")

    def layer(self, rows: Tensor) -> Tensor:
        self.is_watched = is_governed()
        return super().layer(rows)


class StopsWhenGoverned(RaisesWhenGoverned):
    def between(self) -> None:
        if self.is_watched:
            raise PoochError("a replay differs")


class RaisesUnlessGoverned(RaisesWhenGoverned):
    def between(self) -> None:
        if not self.is_watched:
            raise RuntimeError("unwatched")


class NothingToSave(Hostile):
    def forward(self, rows: Tensor) -> Tensor:
        return self.first.bias.sum()


class NeverTheSame(Hostile):
    calls = 0

    def forward(self, rows: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(rows) * self.calls


def kinds(build: type[Hostile], *, raises: bool = False) -> set[str]:
    judge = Judge(Case(build.__name__, "", build, raises=raises))
    return {judge.outcome(way).kind for way in WAYS}


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (Ordinary, "same"),
        (OtherBits, "DIFFERENT"),
        (OtherBuffer, "DIFFERENT"),
        (DrawsMore, "DIFFERENT"),
        (LeavesASetting, "DIFFERENT"),
        (RaisesWhenGoverned, "foreign error"),
        (StopsWhenGoverned, "stopped"),
        (NothingToSave, "nothing happened"),
    ],
)
def test_each_kind_of_outcome_is_recognized(build: type[Hostile], kind: str) -> None:
    assert kinds(build) == {kind}


def test_an_error_that_does_not_come_is_recognized() -> None:
    assert kinds(RaisesUnlessGoverned, raises=True) == {"no error"}


def test_what_does_not_repeat_itself_proves_nothing() -> None:
    with pytest.raises(NotReproducible, match="step 0: loss"):
        Judge(Case("NeverTheSame", "", NeverTheSame))


def test_the_ways_do_what_they_are_named_for() -> None:
    judge = Judge(Case("Ordinary", "", Ordinary))
    found = {way: judge.outcome(way) for way in WAYS}
    replayed = {way for way, outcome in found.items() if outcome.replayed_ops}
    moved = {way for way, outcome in found.items() if outcome.moved_bytes}
    assert replayed == {"recompute", "alternate", "auto"}
    assert moved >= {"swap", "alternate", "auto copying"}
