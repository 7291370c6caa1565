"""What a budget for a training loop may be, and how a share of the first step becomes one."""

from __future__ import annotations

from typing import Literal

from ..api.budgets import is_free, is_smallest, parse_budget
from ..executor.evictor import Evictor
from ..ground.errors import UsageError
from ..ground.units import parse_bytes
from ..machine.growing import GrowingBudget
from .free_memory import FreeMemory
from .optimizers import OptimizerWatch
from .remarks import Remarks
from .reserved_memory import ReservedMemory

Bound = Literal["live", "reserved"]
STEPS_BEFORE_OPTIMIZER = 64  # steps in which gradients accumulate at most; beyond, no optimizer's state is waited for


def budget_of(budget: float | str) -> tuple[int | None, float | None]:
    """Return the budget in bytes, or the share of the first step's in-core peak; neither for what is free.

    Args:
        budget: Bytes, a text such as "16GiB", a share such as "60%", or "auto".

    Raises:
        UsageError: It does not parse.
    """
    if is_smallest(budget):
        raise UsageError(
            "the budget cannot be 'min' here, as nothing is known before the first step: give bytes, or a share such "
            "as 60%"
        )
    if isinstance(budget, str) and budget.strip().endswith("%"):
        parsed = parse_bytes(budget, whole_bytes=10**6)
        if parsed is None or not 0 < parsed <= 10**6:
            raise UsageError(f"the budget {budget!r} is no share: give a percentage such as 60%, or bytes")
        return None, parsed / 10**6
    if is_free(budget):
        return None, None
    return parse_budget(budget, None, takes_share=True), None


def check_bound(bound: str, size_bytes: int | None) -> None:
    """Refuse what a budget cannot bound.

    Args:
        bound: "live" or "reserved".
        size_bytes: The budget, or None if its bytes are not given.

    Raises:
        UsageError: There is no such bound, or the budget is a share or what is free.
    """
    if bound not in ("live", "reserved"):
        raise UsageError(f"there is no bound {bound!r} of a training loop: choose live or reserved")
    if bound == "reserved" and size_bytes is None:
        raise UsageError(
            "a budget that bounds what is reserved cannot be a share, or what is free: give bytes, such as 16GiB"
        )


class HeldBudget:
    """The budget that an evictor holds, in bytes as soon as they are known.

    Args:
        size_bytes: The budget, or None if it is a share.
        share: The share of the first step's in-core peak, or None.
        evictor: What holds it.
        remarks: Tells what a share has turned out to be.
        free: What is free, if that is the budget, or what the allocator may reserve. It is followed.

    Attributes:
        size_bytes: What tensors may take, or None before the first step if it is a share.
        is_told: Whether it is what it will stay, unless a further optimizer appears.
        growing: Counts in the first step if the budget is a share, else None.
        spared_bytes: What the first step does not take because compiled graphs make values again: a share is one of the
            step without Pooch.
    """

    def __init__(
        self,
        size_bytes: int | None,
        share: float | None,
        evictor: Evictor,
        remarks: Remarks,
        free: FreeMemory | ReservedMemory | None = None,
    ) -> None:
        self.size_bytes, self._share, self._free = size_bytes, share, free
        self._evictor, self._remarks = evictor, remarks
        self._state: OptimizerWatch | None = None
        self.growing: GrowingBudget | None = None
        self.is_told, self._steps = share is None, 0
        self._untold: tuple[int, str, str] | None = None  # the highest peak before that, and why it passed the budget
        self._untold_peaks_bytes: list[int] = []  # of all steps before that
        self.spared_bytes = 0
        if share is not None:
            self._state = OptimizerWatch(self._state_appeared)
        self.hold()

    @property
    def share(self) -> float:
        """The share of what the step takes that the budget is, or 1."""
        return 1.0 if self._share is None else self._share

    @property
    def is_followed(self) -> bool:
        """Whether the budget is what is free, so that earlier steps may have had another one."""
        return isinstance(self._free, FreeMemory)

    @property
    def told_bytes(self) -> int | None:
        """The budget as it was given, with which peaks are compared: what tensors may take, or what may be reserved."""
        return self._free.size_bytes if isinstance(self._free, ReservedMemory) else self.size_bytes

    def hold(self) -> None:
        """Have the evictor hold the bytes, if they are known."""
        if self.size_bytes is not None:
            self._evictor.set_budget(self.size_bytes)

    def look(self, *, is_quiet: bool = False) -> None:
        """Hold what is free by now, where that is the budget, or what may be reserved leaves to tensors.

        Args:
            is_quiet: Whether the step that begins is far away from the budget, so that a look now and then is enough.
        """
        if self._free is None:
            return
        found = self._free.look(is_quiet=is_quiet)
        if found is not None:
            self.size_bytes = found.size_bytes
            self.hold()

    def step_begins(self) -> None:
        """Hold the share of what the first step has needed so far, as long as it is not over."""
        self._steps += 1
        if self._steps > STEPS_BEFORE_OPTIMIZER:
            self._tell()
        if self.size_bytes is None and self._share is not None:
            has_tier = self._evictor.engine.health.known is None
            self.growing = GrowingBudget(self._evictor.live, self._share, replays=not has_tier)
            for value in self._evictor.persistent or ():  # of a step before, which was not complete
                if value.storage is None and not value.is_gone:
                    self.growing.left(value)
            self._evictor.grow_with(self.growing)

    def step_was_recorded(self, peak_bytes: int) -> None:
        """Take the share of the first step's in-core peak."""
        if self.size_bytes is None and self._share is not None:
            self._is(int(self._share * (peak_bytes + self.spared_bytes)))

    def step_was_counted(self) -> None:
        """Take the share of the in-core peak that was counted in the first step, which was not recorded."""
        if self.growing is not None:
            self.step_was_recorded(self.growing.peak_bytes)

    @property
    def earlier_peak_bytes(self) -> int:
        """The most that was live in the step before the account of bytes began to look for a peak anew."""
        return 0 if self.growing is None else self.growing.live_peak_bytes

    def _state_appeared(self, size_bytes: int) -> None:
        """Count the state that an optimizer has created: it is part of every later step's in-core peak."""
        if self._share is not None and self.size_bytes is not None and size_bytes > 0:
            self._is(self.size_bytes + int(self._share * size_bytes))
        self._tell()

    def _is(self, size_bytes: int) -> None:
        self.size_bytes, self.growing = size_bytes, None
        self._evictor.grow_with(None)
        self._evictor.set_budget(size_bytes)
        if self.is_told:
            self._remarks.larger_budget(size_bytes)

    def bounded_bytes(self, peak_bytes: int) -> int:
        """Return what a step took of what the budget bounds, given its peak: where that is what is reserved, this."""
        return max(peak_bytes, self._free.step_ended()) if isinstance(self._free, ReservedMemory) else peak_bytes

    def count_step(self, peak_bytes: int) -> bool:
        """Return whether a step that has ended is over the budget. As long as that has yet to grow, its peak is noted.

        Args:
            peak_bytes: What it took of what the budget bounds.
        """
        budget_bytes = self.told_bytes
        if budget_bytes is None:
            return False
        if not self.is_told:
            self._untold_peaks_bytes.append(peak_bytes)
        return self.is_told and peak_bytes > budget_bytes

    @property
    def first_steps_over(self) -> int:
        """How many steps are over the budget of those that ended before the optimizer's state counted towards it."""
        budget_bytes = self.told_bytes
        return 0 if budget_bytes is None else sum(peak > budget_bytes for peak in self._untold_peaks_bytes)

    def passed(self, peak_bytes: int, why: str, reason: str) -> None:
        """Tell of a step over the budget, or as long as a share of it has yet to come, note what has to be told then.

        Args:
            peak_bytes: The peak of the step.
            why: As `Remarks.over_budget` takes it.
            reason: Likewise.
        """
        if not self.is_told:
            self._untold = max(self._untold or (0, why, reason), (peak_bytes, why, reason))
        elif (budget_bytes := self.told_bytes) is not None and peak_bytes > budget_bytes:
            self._remarks.over_budget(peak_bytes, budget_bytes, why, reason)

    def passed_between(self, peak_bytes: int) -> None:
        """Tell of a peak between steps, if it is over the budget."""
        budget_bytes = self.told_bytes
        if self.is_told and budget_bytes is not None and peak_bytes > budget_bytes:
            self._remarks.over_between(peak_bytes, budget_bytes)

    def _tell(self) -> None:
        """Tell the budget, once it is what it will stay."""
        if not self.is_told and self.size_bytes is not None and self._share is not None:
            self.is_told = True
            self._remarks.budget(self.size_bytes, self._share)
            if self._untold is not None:
                self.passed(*self._untold)

    def stop(self) -> None:
        """Look at optimizers no longer, and bound nothing that is reserved."""
        self._tell()
        if self._free is not None:
            self._free.stop()
        if self._state is not None:
            self._state.stop()
