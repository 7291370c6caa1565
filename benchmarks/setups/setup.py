"""A setup: a training script in a function, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.setups.way import Way

Train = Callable[[Way], None]
USUAL_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Setup:
    """A training script.

    Attributes:
        name: in tables and on the command line.
        shows: what is special about it, in a few words.
        train: the script. It seeds nothing: the runner does.
        needs: the package that it needs besides torch, "" for none.
        ranks: number of processes.
        share: where the budget lies between what stays from step to step (0) and the peak of plain training (1).
        by_exec: whether `pooch exec` runs it, so that no line of the script is Pooch's.
    """

    name: str
    shows: str
    train: Train
    needs: str = ""
    ranks: int = 1
    share: float = USUAL_SHARE
    by_exec: bool = False


REGISTERED: dict[str, Setup] = {}


def setup(shows: str, *, needs: str = "", ranks: int = 1, share: float = USUAL_SHARE) -> Callable[[Train], Train]:
    """Registers a function as the setup of its name."""

    def registered(train: Train) -> Train:
        name = train.__name__.replace("_", "-")
        REGISTERED[name] = Setup(name, shows, train, needs, ranks, share)
        return train

    return registered
