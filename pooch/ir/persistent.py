"""What outlives the step: the tensors of which a step uses each at known slots, and how a plan moves them. No torch.

A step repeats, so its end is its beginning. Its *positions* are the slots of the profile, and after them one for each
slice of the optimizer's step, of which each steps one parameter. What is away at the last position is away at the
first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["parameter", "buffer", "gradient", "state"]
Moves = Literal["activations", "all"]  # what plans let leave


@dataclass(frozen=True, slots=True)
class PersistentTensor:
    """A storage that outlives the step, or all of the optimizer's state for one parameter.

    Attributes:
        name: of the parameter or buffer. A gradient and a state have the name of their parameter.
        kind: what it is.
        size_bytes: of the storage, which is what a copy moves.
        allocated_bytes: that the allocator takes for it (rounded up on a GPU).
        uses: slots that read or write it, ascending. Those of a gradient begin with the one that makes it.
        is_written: whether a step changes it, its optimizer's step included. The copy of what is never written stays
            right.
        is_stepped: whether the optimizer's step uses it, in the slice of its parameter.
    """

    name: str
    kind: Kind
    size_bytes: int
    allocated_bytes: int
    uses: tuple[int, ...]
    is_written: bool
    is_stepped: bool


@dataclass(frozen=True, slots=True)
class PersistentMove:
    """How one tensor leaves and comes back in each step.

    Attributes:
        name: of the tensor, as in the profile.
        kind: what it is.
        size_bytes: that each copy moves.
        away: (position at whose entry it leaves, position at whose entry its copy back starts, position that needs it),
            in order of leaving. Where the second is not after the first, it is away across the end of the step. Both
            are -1 for a gradient that nothing uses again.
        copies_out: in each step; 0 where the copy in the tier stays right.
    """

    name: str
    kind: Kind
    size_bytes: int
    away: tuple[tuple[int, int, int], ...]
    copies_out: int


@dataclass(frozen=True, slots=True)
class PersistentPlan:
    """What of parameters, gradients, buffers and the optimizer's state leaves in each step.

    Attributes:
        moves: of the tensors that leave.
        staying_bytes: of those that never do.
        allowance_bytes: what of the budget is theirs at any time; where activations leave more, they have that too.
        copied_out_bytes: in each step.
        copied_in_bytes: in each step.
        optimizer_ms: what of the predicted step comes after the backward pass: copies for the optimizer's step.
        tier_bytes: room in the tier that they need.
    """

    moves: tuple[PersistentMove, ...]
    staying_bytes: int
    allowance_bytes: int
    copied_out_bytes: int
    copied_in_bytes: int
    optimizer_ms: float
    tier_bytes: int
