"""When to do what takes long and may be in vain."""

from __future__ import annotations

_MUCH = 16  # of so many parts of the budget one


class Help:
    """Whether what was found in a step has helped: the budget was held in it, or much was found.

    Much would become more from step to step, so it is worth finding though the budget is exceeded without it too.
    """

    def __init__(self) -> None:
        self.has_found = self._has_found_much = False  # in the step that runs

    def found(self, found_bytes: int, budget_bytes: int) -> None:
        """Note that so many bytes were found."""
        self.has_found = True
        self._has_found_much = self._has_found_much or found_bytes * _MUCH >= budget_bytes

    def step_ends(self, *, is_held: bool) -> bool:
        """Return whether anything has helped, given whether the budget was held."""
        has_helped = self._has_found_much or (self.has_found and is_held)
        self.has_found = self._has_found_much = False
        return has_helped


class Seldom:
    """Says when to do what takes long: the first, second, fourth time and so on, and the next time after it has helped.

    Within a step it is done again as long as it finds something.
    """

    def __init__(self) -> None:
        self._times, self._next = 0, 1
        self._help = Help()

    def is_due(self) -> bool:
        """Whether to do it this time."""
        if self._help.has_found:
            return True
        self._times += 1
        if self._times < self._next:
            return False
        self._next = 2 * self._times
        return True

    def has_found(self, found_bytes: int, budget_bytes: int) -> None:
        """Note that it has found something."""
        self._help.found(found_bytes, budget_bytes)

    def step_ends(self, *, is_held: bool) -> None:
        """Note whether the budget was held in the step."""
        if self._help.step_ends(is_held=is_held):
            self._times, self._next = 0, 1
