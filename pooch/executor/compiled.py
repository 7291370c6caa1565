"""Steps in which compiled graphs run.

What a compiled graph reads and writes is not seen: its kernels take addresses. So nothing is made again in such a step,
whatever leaves is copied. A value only leaves once nothing but autograd holds it, so no graph can write to it then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..torchtools.accelerators import has_streams
from ..torchtools.standing_aside import COMPILED, compiled_name
from .step import Step

Options = Callable[[], Mapping[str, Any]]
CUDA_GRAPHS = (
    "what is compiled into CUDA graphs keeps what it saves on the device, at fixed addresses: compile with "
    'mode="default" or mode="max-autotune-no-cudagraphs"'
)


class CopiedCalls:
    """Compiled calls of a step in which everything that leaves is copied: what their graphs save may leave as well.

    Args:
        step: The step. It replays nothing.
    """

    def __init__(self, step: Step) -> None:
        self._evictor = step.evictor

    def begins(self, options: Options) -> bool:
        """Make room where allocations do not ask for it. CUDA graphs use what nobody seems to hold: they keep all."""
        if has_streams(self._evictor.device) and options().get("triton.cudagraphs"):
            self._evictor.warn_once("CUDA graphs", CUDA_GRAPHS)
            return False
        self._evictor.look(0)
        return True

    def stand_aside(self) -> None:
        """Make no room: that is Python, which Dynamo would compile."""
        self._evictor.rest()

    def come_back(self) -> None:
        """Make room again."""
        self._evictor.hold()


class FirstCall:
    """The first compiled call of a step that expects none.

    Args:
        step: The step.
        expect: Has another step go on in its place that replays nothing.
    """

    def __init__(self, step: Step, expect: Callable[[], None]) -> None:
        self._step, self._expect = step, expect

    def begins(self, options: Options) -> bool:
        """Have nothing made again that was made before the call. Operators of higher order are left alone."""
        if compiled_name() != COMPILED:
            return False
        self._step.replay_nothing()
        self._expect()
        return True

    def stand_aside(self) -> None:
        """Do nothing: this step sees no compiled call."""

    def come_back(self) -> None:
        """Do nothing."""
