"""The state of optimizers comes back while the backward pass frees memory, so that their steps wait for less of it.

Where parameters and gradients stay, nothing that is away is used before an optimizer steps, and its slices could bring
back one another alone: then they take as long as the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from .persistent import PersistentValue, PersistentValues

_COPIES_AHEAD = 4


class StateAhead:
    """Begins copies of what will be used first, as long as there is room.

    Args:
        values: What outlives steps.
        bring: Starts to bring values back until there is no room, and returns those that come.

    Attributes:
        here_bytes: Of what has come in this step and was there when this last went on.
    """

    def __init__(
        self, values: PersistentValues, bring: Callable[[Iterable[PersistentValue]], list[PersistentValue]]
    ) -> None:
        self._values, self._bring = values, bring
        self._coming: list[PersistentValue] = []
        self.here_bytes = 0

    def begin_step(self) -> None:
        """Note that a step begins."""
        self._coming, self.here_bytes = [], 0

    def go_on(self) -> int:
        """Begin further copies, and return the bytes of what has come and left again before it was used."""
        lost_bytes = self._values.has_lost_state()
        if lost_bytes:
            self.here_bytes = self._values.unused_bytes()
        else:
            self._coming = [each for each in self._coming if each.ticket is not None and not each.ticket.is_done()]
            count = max(0, _COPIES_AHEAD - len(self._coming))
            begun = self._bring(islice(self._values.coming_state(), count))
            self._values.comes_ahead(begun)
            self._coming += begun
            self.here_bytes += sum([value.size_bytes for value in begun])
        return lost_bytes
