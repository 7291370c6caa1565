"""What the ranks of a training agree on under `pooch.auto`. None of it makes a step wait.

Each rank decides by itself how a step runs: recording, plans and copies add no collective, and every op of the program
runs once, so ranks may differ. What they share is the machine: its swap tier, and the way there.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from ..ground.units import format_bytes
from ..torchtools.ranks import Ranks, is_distributed
from .cache import Seat
from .node import TierShare

PATIENCE_S = 5.0  # other ranks may need no plan, and so never measure


def ranks_of(process_group: Any) -> Ranks | None:
    """Return the ranks that train together, or None if there is only this process.

    Args:
        process_group: Their process group. None: the default one, if there is one.

    Raises:
        UsageError: `process_group` is no group, or this rank is not in it.
    """
    if process_group is None and not is_distributed():
        return None
    return Ranks("auto", process_group)


class Team:
    """The ranks that train together, as one of them sees them.

    Args:
        ranks: The ranks, or None if there is only this process.
        share: What they may take of the swap tier.
        tell: Called with one line each.
    """

    def __init__(self, ranks: Ranks | None, share: TierShare, tell: Callable[[str], None]) -> None:
        self._ranks, self.share, self._tell = ranks, share, tell
        is_told = share.node_bytes is not None and (share.ranks > 1 or share.asked_bytes is not None)
        if is_told and (ranks is None or ranks.is_first_here()):
            tell(str(share))

    @property
    def gather(self) -> Callable[[], object] | None:
        """What waits a little for the other ranks, so that all of them measure the same shared bus. None if alone."""
        ranks = self._ranks
        return None if ranks is None or ranks.count == 1 else lambda: ranks.meet("measuring", PATIENCE_S)

    @property
    def is_first(self) -> bool:
        """Whether this rank tells what concerns all of them."""
        return self._ranks is None or self._ranks.is_first()

    @property
    def seat(self) -> Seat:
        """Which of the ranks this is."""
        return Seat() if self._ranks is None else Seat(self._ranks.number, self._ranks.count)

    def ended(self, tier_bytes: int) -> None:
        """Tell what all ranks of this machine have taken of the swap tier, in the rank that ends last.

        Args:
            tier_bytes: The most that this rank has taken.
        """
        if self._ranks is None or self.share.ranks == 1:
            return
        total_bytes = self._ranks.sum_if_last(f"tier of {platform.node()}", tier_bytes, self.share.ranks)
        if total_bytes is not None:
            limit = "" if self.share.node_bytes is None else f", of {format_bytes(self.share.node_bytes)}"
            self._tell(
                f"the {self.share.ranks} ranks of this machine took {format_bytes(total_bytes)} of swap tier{limit}"
            )
