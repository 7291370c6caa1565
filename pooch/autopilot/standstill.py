"""Where a daemon thread that trains stands still when the interpreter ends.

Python ends such a thread wherever it next asks for the interpreter's lock. In the middle of PyTorch that aborts the
process, with a trace of the stack. A thread that waits in Python, and is never woken, does no harm.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

_IN_STEP_S, _BETWEEN_STEPS_S = 2.0, 0.2  # what the end of the program waits for it at most


class Standstill:
    """Has the thread that trains stand still where it next passes by, once the interpreter ends.

    Args:
        look: Called then, so that the thread passes by in its next step as well, and `is_in_step` is known.

    Attributes:
        is_ending: Whether the interpreter ends.
        is_in_step: Whether a step is running.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self.is_ending = self.is_in_step = False
        self._trains: threading.Thread | None = None
        self._stands = threading.Event()

    def begin(self) -> None:
        """Expect the end of the interpreter."""
        atexit.register(self._await)

    def pass_by(self, *, is_in_step: bool) -> None:
        """Hold the calling thread for ever if the interpreter ends, so no lock may be held.

        Args:
            is_in_step: Whether a step is running from here on.
        """
        self._trains, self.is_in_step = threading.current_thread(), is_in_step
        if self.is_ending:
            self._stands.set()
            threading.Event().wait()

    def end(self) -> None:
        """Expect it no longer."""
        atexit.unregister(self._await)

    def _await(self) -> None:
        trains = self._trains
        if trains is None or trains is threading.current_thread() or not trains.is_alive():
            return
        self.is_ending = True
        self._look()
        self._stands.wait(_IN_STEP_S if self.is_in_step else _BETWEEN_STEPS_S)
