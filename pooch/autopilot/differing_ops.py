"""Whether the ops of a family's steps differ from one to the next, so that a plan of one is none of another."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_MOST_DIFFERENT = 8  # steps of one kind whose ops differ, that are remembered
_IN_A_ROW = 3  # steps that repeat no earlier one, after which none is expected to; and that do, after which all are
_COMPARED_STEPS = 6  # after which steps that record nothing are no longer looked at
_MOST_LOOKED_AT = 40  # of these where sizes never come again
_SELDOM = 8  # how many steps there are to one that is looked at, where ops differ


def different_ops() -> deque[int]:
    """Return room for what tells the ops of the last different steps of a kind."""
    return deque(maxlen=_MOST_DIFFERENT)


@dataclass
class DifferingOps:
    """Compares the ops of steps of one family, as far as they are of the same kind. Recorded ones are left out.

    Attributes:
        is_told: Whether it was told that they differ.
    """

    is_told: bool = False
    _unseen: int = 0
    _seen: int = 0
    _compared: int = 0
    _asked: int = 0

    @property
    def differs(self) -> bool:
        """Whether steps each have ops that no earlier step of their kind had."""
        return self._unseen >= _IN_A_ROW

    def looks(self) -> bool:
        """Whether it has to be seen which ops the step that begins has, if nothing else needs that."""
        self._asked += 1
        if self.differs:
            return self._seen > 0 or self._asked % _SELDOM == 0
        return self._compared < _COMPARED_STEPS and self._asked <= _MOST_LOOKED_AT

    def _compare(self, *, is_seen: bool) -> None:
        self._seen = self._seen + 1 if is_seen else 0
        if not is_seen:
            self._unseen += 1
        elif self._seen >= _IN_A_ROW or not self.differs:
            self._unseen = 0

    def saw(self, before: deque[int], ops: int) -> None:
        """Compare the ops of a step with those of earlier ones.

        Args:
            before: What tells those of the same kind. It gets that of this step.
            ops: What tells its own.
        """
        if before:
            self._compared += 1
            self._compare(is_seen=ops in before)
        if ops not in before:
            before.append(ops)
