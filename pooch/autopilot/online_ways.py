"""How steps without a plan run: whether values may be made again, or all that leaves is copied."""

from __future__ import annotations

from collections import deque

from ..executor.owner import Effort

_TRIED_STEPS = 2  # of each way
_CLEAR = 2.0  # times as much as the other way took shows in one step
_CHOSEN_STEPS = 50  # after which both are tried again


class OnlineWays:
    """Chooses by what both ways have taken in steps of one family.

    Where values may be made again, each op is recorded, and a replay takes more than the ops that it runs again; copies
    that are made ahead of need take next to nothing. So both ways are tried, unless copies are bound to be slower.
    """

    def __init__(self) -> None:
        self._coming: deque[bool] = deque()  # whether they replay
        self._is_trying = self._only_copies = False
        self._shares: dict[bool, list[float]] = {}  # what Pooch took in tried steps, over what else they took

    def next_replays(self) -> bool:
        """Whether the step that begins records its ops, so that values can be made again."""
        if self._only_copies:
            return False
        if not self._coming:
            self._is_trying, self._shares = True, {True: [], False: []}
            self._coming.append(True)
        return self._coming.popleft()

    def only_copy(self) -> None:
        """Copy from here on. A step passed the budget: a replay needs room for all that it reads, a copy for itself."""
        self._only_copies = True

    def took(self, effort: Effort, step_ms: float, own_ms: float | None, *, replays: bool) -> None:
        """Note what a step took.

        Args:
            effort: What being able to replay has cost it, and gained by what copies are expected to take.
            step_ms: Its time.
            own_ms: What of its time Pooch took, or None if that is not known.
            replays: Whether values could be made again in it.
        """
        if replays and effort.recording_ms > effort.gained_ms:
            self._choose(replays=False)
        elif self._is_trying and own_ms is not None and own_ms < step_ms:
            self._shares[replays].append(own_ms / (step_ms - own_ms))
            if not replays:
                self._compare()
            elif effort.gained_ms < own_ms:
                self._coming.append(False)
            else:
                self._choose(replays=True)

    def _compare(self) -> None:
        if not self._shares[True]:
            return
        replayed, copied = min(self._shares[True]), min(self._shares[False])
        is_clear = max(replayed, copied) > _CLEAR * min(replayed, copied)
        if is_clear or len(self._shares[False]) == _TRIED_STEPS:
            self._choose(replays=replayed <= copied)
        else:
            self._coming.append(True)

    def _choose(self, *, replays: bool) -> None:
        self._is_trying = False
        self._coming = deque([replays] * _CHOSEN_STEPS)
