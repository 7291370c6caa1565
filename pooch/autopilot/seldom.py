"""When to do what takes long and may be in vain."""

from __future__ import annotations


class Seldom:
    """Says when to do what takes long: the first, second, fourth time and so on, and the next time after it has helped.

    It has helped if the budget was held in that step, or if much was found, which would become more from step to step.
    Within a step it is done again as long as it finds something.
    """

    def __init__(self) -> None:
        self._times, self._next = 0, 1
        self._has_found = self._has_found_much = False  # in the step that runs

    def is_due(self) -> bool:
        """Whether to do it this time."""
        if self._has_found:
            return True
        self._times += 1
        if self._times < self._next:
            return False
        self._next = 2 * self._times
        return True

    def has_found(self, found_bytes: int, budget_bytes: int) -> None:
        """Note that it has found something."""
        self._has_found = True
        self._has_found_much = self._has_found_much or is_much(found_bytes, budget_bytes)

    def step_ends(self, *, is_held: bool) -> None:
        """Note whether the budget was held in the step."""
        if self._has_found_much or (self._has_found and is_held):
            self._times, self._next = 0, 1
        self._has_found = self._has_found_much = False


def is_much(found_bytes: int, budget_bytes: int) -> bool:
    """Whether so many bytes are worth a look through all objects, though the budget is exceeded without them too."""
    return found_bytes * _MUCH >= budget_bytes


_MUCH = 16  # of so many parts of the budget one
