"""What compiled graphs may make again in their backward graphs, and what they do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

from ..ground.errors import UsageError
from ..ground.units import format_bytes, plural

if TYPE_CHECKING:
    import torch

    from ..torchtools.graph_gaps.recompute import GraphMemory, Room

AllowRecompute = Literal["exact", "rounding"]


@dataclass(frozen=True, slots=True)
class MadeAgain:
    """What compiled graphs make again rather than saving it.

    Attributes:
        graphs: How many make anything again.
        saved_bytes: What one call of each of them saves.
        whole_bytes: What they would save otherwise.
    """

    graphs: int = 0
    saved_bytes: int = 0
    whole_bytes: int = 0

    def __str__(self) -> str:
        again = format_bytes(self.whole_bytes - self.saved_bytes)
        return (
            f"{plural(self.graphs, 'compiled graph')} save {format_bytes(self.saved_bytes)} and make {again} again "
            '(allow_recompute="rounding"), so numbers may differ in their last digits from those without it'
        )

    def with_graph(self, whole: GraphMemory, memory: GraphMemory) -> MadeAgain:
        """Return it with one graph more.

        Args:
            whole: What the graph takes by itself.
            memory: What it takes.
        """
        if memory.saved_bytes >= whole.saved_bytes:
            return self
        saved_bytes, whole_bytes = self.saved_bytes + memory.saved_bytes, self.whole_bytes + whole.saved_bytes
        return MadeAgain(self.graphs + 1, saved_bytes, whole_bytes)


def compiled_parts(models: Iterable[torch.nn.Module]) -> int:
    """Return how many modules are compiled that are not within others which are."""
    from ..torchtools.calls import is_compiled

    found, ahead = 0, list(models)
    while ahead:
        module = ahead.pop()
        if is_compiled(module):
            found += 1
        else:
            ahead.extend(module.children())
    return found


def calls_of_graph(models: Iterable[torch.nn.Module], static_bytes: int) -> int:
    """Return how often a graph is called in a step, as far as it can be told: by as many modules as have so many bytes
    of parameters and buffers, or are compiled.

    Dynamo compiles the blocks of a model once, if they are alike, whether they or all of the model were to be compiled.

    Args:
        models: The models.
        static_bytes: Of the parameters and buffers that the graph reads.
    """
    models = list(models)
    found, ahead = 0, list(models)
    while ahead:
        module = ahead.pop()
        size_bytes = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
        if size_bytes and size_bytes == static_bytes:
            found += 1
        else:
            ahead.extend(module.children())
    return max(1, found or compiled_parts(models))


def check_allowed(allow_recompute: str) -> None:
    """Check what is allowed.

    Raises:
        UsageError: It is nothing that there is.
    """
    if allow_recompute not in get_args(AllowRecompute):
        raise UsageError(
            f"allow_recompute={allow_recompute!r}: give 'exact' (only what gives the same bits is made again) or "
            "'rounding' (compiled graphs may make values again as well, which rounds in another way)"
        )


@contextmanager
def made_again_within(budget_bytes: int | None, model: torch.nn.Module) -> Iterator[list[MadeAgain]]:
    """Have graphs that are compiled inside of this context make values again, as far as they have to.

    Args:
        budget_bytes: The budget, or None if nothing is made again.
        model: The model.

    Returns:
        What was made of graphs, in a list that is filled.
    """
    found: list[MadeAgain] = []
    if budget_bytes is None:
        yield found
        return
    from ..torchtools.graph_gaps.recompute import ROOMS, Room
    from ..torchtools.memory_trace import live_bytes
    from ..torchtools.training_state import model_device

    taken_bytes = live_bytes(model_device(model))

    def note(whole: GraphMemory, memory: GraphMemory, calls: int) -> None:
        found[:] = [(found[0] if found else MadeAgain()).with_graph(whole, memory)]

    def room() -> Room:
        return Room(budget_bytes, 1.0, taken_bytes, partial(calls_of_graph, [model]), note)

    ROOMS.append(room)
    try:
        yield found
    finally:
        ROOMS.remove(room)
