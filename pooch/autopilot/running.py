"""The step that is running."""

from __future__ import annotations

import time

from ..executor.evictor import Evictor
from ..executor.statistics import RunStats
from ..torchtools.threads import OwnThread
from .backward_graphs import BackwardGraphs
from .known import Known
from .quiet import QuietKind
from .signature import StepKey
from .steps import DrivenStep
from .summary import Decision


class RunningStep:
    """What was decided for the step that is running, and what to look at when it ends.

    Args:
        key: Its key.
        decision: How it runs.
        known: What is known about this kind of step.
        step: What runs it.
        stats: What is counted meanwhile.
        outlasts: Whether hooks and modes can stay in place after the call, until the backward pass.
        start_bytes: Bytes that are live before it.

    Attributes:
        begin_s: When it began.
        moving_ms: What moving what outlives steps took as it began.
        beginning_ms: What all of its beginning took, before its first op.
        away_bytes: What outlives steps and was away as it began.
        thread: The thread that it began in.
        is_quiet: Whether nothing was prepared for it, as it is far away from the budget.
        far_bytes: Up to which peak it is far away from the budget, if it is quiet.
        kind: What later steps of its kind are compared with, if it is far away from the budget.
        earlier_peak_bytes: Its peak before the budget was held over it.
        is_open: Whether its forward pass is not over.
        is_whole: Whether no model was added while it ran, so that it can be recorded.
        is_in_backward: Whether its backward pass has begun, and has not told its end.
        is_ending: Whether its end has begun.
        is_read_elsewhere: Whether another thread runs a backward pass, perhaps that of this step.
        calls: Number of outermost calls of governed modules.
        is_in_call: Whether one of them goes on.
        has_part_begun: Whether the call of a part on its own has begun the step.
        beside: Number of steps that other threads have begun meanwhile.
        graphs: What governs the graphs that its backward pass builds, once that has begun.
    """

    def __init__(
        self,
        key: StepKey,
        decision: Decision,
        known: Known,
        step: DrivenStep,
        stats: RunStats,
        outlasts: bool,
        start_bytes: int,
    ) -> None:
        self.key, self.decision, self.known, self.step, self.stats = key, decision, known, step, stats
        self.outlasts, self.start_bytes = outlasts, start_bytes
        self.begin_s, self.moving_ms, self.beginning_ms = time.perf_counter(), 0.0, 0.0
        self.away_bytes = 0
        self.thread = OwnThread()
        self.is_quiet, self.far_bytes = False, 0.0
        self.kind: QuietKind | None = None
        self.earlier_peak_bytes = 0
        self.is_open = True
        self.is_whole = True
        self.is_in_backward = self.is_ending = self.is_read_elsewhere = False
        self.calls = self.beside = 0
        self.is_in_call = self.has_part_begun = False
        self.graphs: BackwardGraphs | None = None

    def as_quiet(self) -> RunningStep:
        """Return what runs later steps of its thread for which nothing is to be done, one after the other."""
        quiet = RunningStep(self.key, "in-core", self.known, self.step, RunStats(), self.outlasts, self.start_bytes)
        quiet.is_quiet, quiet.has_part_begun = True, self.has_part_begun
        return quiet

    def begin_again(self, kind: QuietKind, start_bytes: int, far_bytes: float) -> None:
        """Begin a further step, which is quiet as the one before.

        Args:
            kind: Its kind.
            start_bytes: Bytes that are live before it.
            far_bytes: Up to which peak it is far away from the budget.
        """
        self.begin_s = time.perf_counter()
        self.key, self.known, self.kind = kind.key, kind.known, kind
        self.start_bytes, self.far_bytes = start_bytes, far_bytes
        self.is_open = self.is_whole = True
        self.is_in_backward = self.is_ending = self.is_read_elsewhere = False
        self.calls = 1

    def take_over(
        self, kind: QuietKind, start_bytes: int, begin_s: float, far_bytes: float, is_in_backward: bool
    ) -> None:
        """Go on with a step that began natively.

        Args:
            kind: Its kind.
            start_bytes: Bytes that were live before it.
            begin_s: When it began.
            far_bytes: Up to which peak it is far away from the budget.
            is_in_backward: Whether its backward pass has begun.
        """
        self.begin_again(kind, start_bytes, far_bytes)
        self.begin_s, self.is_in_backward, self.is_open = begin_s, is_in_backward, not is_in_backward

    @property
    def elapsed_ms(self) -> float:
        """Time since it began."""
        return (time.perf_counter() - self.begin_s) * 1000

    @property
    def is_of_this_thread(self) -> bool:
        """Whether it began in the calling thread."""
        return self.thread.is_here

    def is_over(self, most_calls: int) -> bool:
        """Whether no backward pass is to be expected in its thread: it is elsewhere, or there were too many calls.

        Between two calls it is not in the middle of one, nor of its end, unless those were interrupted.
        """
        is_elsewhere = self.is_read_elsewhere or self.thread.has_ended
        return self.calls >= most_calls or is_elsewhere or self.is_in_backward or self.is_ending

    def is_left_open(self) -> bool:
        """Whether its thread waits outside of a call while another one trains, as after a call to look at shapes."""
        is_idle = not (self.is_in_call or self.is_in_backward or self.is_ending or self.is_quiet)
        return is_idle and self.beside > 1 and self.decision != "record" and self.thread.waits

    def close_forward(self) -> None:
        """Take hooks and modes away, if they are in place."""
        if self.is_open:
            self.step.close_forward()
            self.is_open = False

    def open_backward(self, evictor: Evictor) -> None:
        """Have what its backward pass saves leave, unless hooks of the program are in place around it."""
        if self.graphs is None and BackwardGraphs.are_possible():
            self.graphs = BackwardGraphs(evictor)
            self.graphs.open()

    def close_backward(self) -> None:
        """Take away what governs the graphs of its backward pass, if it is in place."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
