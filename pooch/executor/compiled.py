"""Steps in which compiled graphs run.

What a compiled graph reads and writes is not seen: its kernels take addresses. So nothing is made again in such a step,
whatever leaves is copied. Without a plan, a value only leaves once nothing but autograd holds it, so no graph can write
to it then. In a plan a graph is an op of its own, which makes what it saves; a parameter or an input counts as made by
the first graph that saves it, and stays, as the program holds it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from ..ground.weakly import weakly
from ..ir.plan import GRAPH, ExpectedOp
from ..torchtools.accelerators import has_streams
from ..torchtools.standing_aside import COMPILED, CompiledCalls, compiled_name
from ..torchtools.tensors import can_be_dropped, fingerprint, storage_of
from .evictor import Evictor
from .plan_guide import PlanGuide
from .step import Step

Options = Callable[[], Mapping[str, Any]]
CUDA_GRAPHS = (
    "what is compiled into CUDA graphs keeps what it saves on the device, at fixed addresses: compile with "
    'mode="default" or mode="max-autotune-no-cudagraphs"'
)


_END = ExpectedOp("", "the end of the region", ())


class GraphRecorder(Protocol):
    """Records a step in which compiled graphs run."""

    def graph_begins(self) -> None:
        """Begin to record a graph."""

    def graph_ends(self) -> None:
        """Record the graph that ran, if any."""


class CopiedCalls(CompiledCalls):
    """Compiled calls of a step in which everything that leaves is copied: what their graphs save may leave as well.

    Args:
        step: The step. It replays nothing.
    """

    def __init__(self, step: Step) -> None:
        self._evictor = step.evictor

    def begins(self, options: Options) -> bool:
        """Make room where allocations do not ask for it."""
        self._evictor.look(0)
        return not _are_cuda_graphs(self._evictor, options)

    def stand_aside(self) -> None:
        """Make no room: that is Python, which Dynamo would compile."""
        self._evictor.rest()

    def come_back(self, *, runs_graph: bool) -> None:
        """Make room again."""
        self._evictor.hold()


class FirstCall(CompiledCalls):
    """The first compiled call of a step that expects none.

    Args:
        step: The step.
        expect: A method that has another step go on in its place that replays nothing. Its object is not kept alive.
    """

    def __init__(self, step: Step, expect: Callable[[], None]) -> None:
        self._step, self._expect = step, weakly(expect)

    def begins(self, options: Options) -> bool:
        """Have nothing made again that was made before the call. Operators of higher order are left alone."""
        if compiled_name() != COMPILED:
            return False
        self._step.replay_nothing()
        self._expect()
        return True


class KeptCalls(CompiledCalls):
    """Compiled calls of a step in which nothing leaves."""

    def begins(self, options: Options) -> bool:
        """Do nothing."""
        return True


class RecordedGraphs(CompiledCalls):
    """Compiled calls of a step that is recorded: each graph is an op, which makes what it saves.

    Args:
        evictor: Makes room.
        recorder: Records the step.
        changed: A method that is called where something was compiled, as the step is not like later ones then. Hooks
            and modes stay. Its object is not kept alive.
    """

    def __init__(self, evictor: Evictor, recorder: GraphRecorder, changed: Callable[[], None]) -> None:
        self._evictor, self._recorder, self._changed = evictor, recorder, weakly(changed)
        self._compiled = compilations()

    def begins(self, options: Options) -> bool:
        """Note what was compiled so far."""
        self._compiled = compilations()
        return not _are_cuda_graphs(self._evictor, options)

    def stand_aside(self) -> None:
        """End the graph that ran, if any."""
        self._recorder.graph_ends()
        self._evictor.rest()

    def come_back(self, *, runs_graph: bool) -> None:
        """Record the graph that is about to run."""
        self._evictor.hold()
        if runs_graph:
            self._recorder.graph_begins()
        elif compilations() != self._compiled:
            self._changed()

    def saved_within(self) -> None:
        """Record the part of the graph that ran, and the next one."""
        self._recorder.graph_ends()
        self._recorder.graph_begins()


class PlannedGraphs(CompiledCalls):
    """Compiled calls of a step whose plan knows them. Each graph is an op, which makes what it saves.

    Args:
        step: The step.
        leave: A method that has another step go on in its place that replays nothing, where this one has left its plan.
            Its object is not kept alive. None: there is nobody who has.
    """

    def __init__(self, step: Step, leave: Callable[[], None] | None = None) -> None:
        self._step, self._evictor = step, step.evictor
        self._leave = None if leave is None else weakly(leave)
        self._texts: list[str] = []
        self._ahead: list[int] = []  # values that the graph which is running has yet to save

    def begins(self, options: Options) -> bool:
        """Go on without the plan if the step has left it."""
        guide = self._step.guide
        if guide is None or not guide.on_path:
            self._step.replay_nothing()
            if self._leave is not None:
                self._leave()
        return not _are_cuda_graphs(self._evictor, options)

    def stand_aside(self) -> None:
        """End the graph that ran, if any."""
        if self._step.graph is not None:
            self._step.graph = None
            self._ended(graph_text(self._texts))
        self._evictor.rest()

    def saved_within(self) -> None:
        """End the part of the graph that ran, and begin the next one."""
        if self._step.graph is not None and self._texts:
            self._ended(graph_text(self._texts))
            self._begins()

    def _ended(self, text: str) -> None:
        guide = self._step.guide
        if guide is None or not guide.on_path or not self._texts:
            return
        expected = _next_op(guide)
        if expected.fingerprint == text and not self._ahead:
            guide.cursor.position += 1
        else:
            self._step.leave_path(expected.fingerprint, text)

    def come_back(self, *, runs_graph: bool) -> None:
        """Do what is due before the graph that is about to run."""
        self._evictor.hold()
        if runs_graph:
            self._step.graph = self
            self._begins()

    def _begins(self) -> None:
        self._texts = []
        self._ahead = list(reversed(self._expected_of_graph()))

    def _expected_of_graph(self) -> tuple[int, ...]:
        """Do what is due before a graph, and return the values that it makes."""
        guide = self._step.guide
        if guide is None or not guide.on_path or (expected := _next_op(guide)).name != GRAPH:
            return ()
        if guide.slot in guide.table.actions:
            self._step.act(guide, guide.slot)
        return expected.writes if guide.on_path else ()

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of what the graph saves, whose storage holds no value yet, or None if it has none."""
        self._texts.append(fingerprint("", [tensor]))
        step, guide = self._step, self._step.guide
        if guide is not None and guide.on_path and self._ahead:
            number = self._ahead.pop()
            storage = storage_of(tensor)
            step.values.bind(storage, number)
            if number < 0:
                return number
            guide.values.made(number, storage)
            return number if can_be_dropped(tensor) or number in guide.values.planned else None
        if not can_be_dropped(tensor) or (guide is not None and guide.on_path):
            return None
        number = int(step.cursor.next_number())
        step.values.bind(storage_of(tensor), number)
        return number


def _are_cuda_graphs(evictor: Evictor, options: Options) -> bool:
    """Whether a call records or replays CUDA graphs, which use memory that nobody seems to hold: all of it stays."""
    if not has_streams(evictor.device) or not options().get("triton.cudagraphs"):
        return False
    evictor.warn_once("CUDA graphs", CUDA_GRAPHS)
    return True


def _next_op(guide: PlanGuide) -> ExpectedOp:
    expected = guide.table.expected
    return expected[guide.cursor.position] if guide.cursor.position < len(expected) else _END


def graph_text(texts: Iterable[str]) -> str:
    """Return what tells a graph from others: what it saves that was not there before it."""
    return f"{GRAPH}{'|'.join(texts)}"


def compilations() -> int:
    """Return how often Dynamo has begun to compile something so far."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["total"])
