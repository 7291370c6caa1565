"""The timeline: what the simulator predicts. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy

from ..ground.plugins import view
from ..ground.units import format_bytes, format_ms
from .plan import Choice

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Stream = Literal["compute", "copy_out", "copy_in"]


@dataclass(frozen=True, slots=True)
class Interval:
    """Something that a stream does or waits for.

    Attributes:
        stream: which stream.
        kind: what it is; "move": a copy of something that outlives the step.
        slot: at which it was issued.
        target: op index, or value id for copies and stalls. For moves, the place among what outlives the step; -1 for
            stalls because of one.
        start_ms: since the step began.
        end_ms: since the step began.
    """

    stream: Stream
    kind: Literal["op", "replay", "stall", "copy", "move"]
    slot: int
    target: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Prediction for one step under a schedule.

    Attributes:
        step_ms: predicted duration.
        stall_ms: part of it in which compute waits for copies.
        replay_ms: part of it that replays take.
        peak_bytes: highest live device bytes.
        point_bytes: live bytes at each point, int64 array of shape (2 * ops,); entries include the peaks of the actions
            there.
        slot_start_ms: start of each op and end of the step, float array of shape (ops + 1,).
        host_bytes: taken in the swap tier.
        intervals: what the three streams do (empty if simulated without detail).
    """

    step_ms: float
    stall_ms: float
    replay_ms: float
    peak_bytes: int
    point_bytes: numpy.ndarray
    slot_start_ms: numpy.ndarray
    host_bytes: int
    intervals: tuple[Interval, ...] = ()

    def __repr__(self) -> str:
        parts = {"stalled": self.stall_ms, "replaying": self.replay_ms}
        spent = " and ".join(f"{format_ms(part_ms)} {what}" for what, part_ms in parts.items() if part_ms > 0)
        tier = f", {format_bytes(self.host_bytes)} in the tier" if self.host_bytes else ""
        of_it = f", of it {spent}" if spent else ""
        return f"Timeline({format_ms(self.step_ms)}{of_it}: {format_bytes(self.peak_bytes)} peak{tier})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return str(view("timeline_html")(self))

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw live bytes over time, and what the three streams do; needs matplotlib.

        Args:
            path: a file to write the picture to (.png, .pdf or .svg). None: it is only returned.

        Returns:
            The figure, which a notebook shows.

        Raises:
            UsageError: the file ends in something else.
            FileFormatError: the file cannot be written.
        """
        figure: Figure = view("timeline_figure")(self, path)
        return figure

    def memory_curve(self) -> pandas.DataFrame:
        """The predicted memory over time: columns `time_ms` and `live_bytes`.

        Two rows per slot: its entry, and its body in the middle of the slot.
        """
        import pandas

        starts = numpy.asarray(self.slot_start_ms, dtype=float)
        times = numpy.empty(2 * (len(starts) - 1))
        times[0::2] = starts[:-1]
        times[1::2] = (starts[:-1] + starts[1:]) / 2
        return pandas.DataFrame({"time_ms": times, "live_bytes": self.point_bytes})

    def to_frame(self) -> pandas.DataFrame:
        """One row per interval, with its `duration_ms`."""
        import pandas

        columns = [field.name for field in fields(Interval)]
        frame = pandas.DataFrame([asdict(interval) for interval in self.intervals], columns=columns)
        frame["duration_ms"] = frame["end_ms"] - frame["start_ms"]
        return frame


@dataclass(frozen=True, slots=True)
class OnlineStep:
    """Prediction for one step without a plan.

    Attributes:
        step_ms: predicted duration.
        peak_bytes: highest live device bytes.
        over_bytes: by how much they passed the budget because nothing more could leave; 0: they never did.
        lost_ms: what it takes longer than in-core.
        decisions: by activation: how it left the last time, "keep" if it never did.
        stall_ms: part of the duration in which compute waits for copies.
        replay_ms: part of it that replays take.
        evictions: how often a value left.
        copies_out: how often one was copied out (what the tier has from an earlier time is not copied again).
        copies_in: how often one was copied in.
        replays: ops that ran again.
    """

    step_ms: float
    peak_bytes: int
    over_bytes: int
    lost_ms: float
    decisions: dict[int, Choice]
    stall_ms: float
    replay_ms: float
    evictions: int
    copies_out: int
    copies_in: int
    replays: int

    @property
    def feasible(self) -> bool:
        """Whether the budget held throughout."""
        return self.over_bytes == 0
