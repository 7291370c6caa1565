"""Graphs that a backward pass builds: those of reversible networks, of reentrant checkpoints, of hooks that solve.

The hooks of a step are taken away when its backward pass begins. Code of the program that computes with gradients
there saves tensors as a forward pass does, and they leave as well, by copy. A backward pass that builds none passes by.
"""

from __future__ import annotations

import torch

from ..executor.evictor import Evictor
from ..executor.records import pack_kept
from ..executor.step import Step
from ..torchtools.endings import end_with
from ..torchtools.mode_stacks import LooseStack
from ..torchtools.outside import changed_in_place
from ..torchtools.raw_looks import RawLooks
from ..torchtools.standing_aside import StepHooks
from .backward import BackwardWatch
from .stacks import has_own_hooks, hooks_are_allowed


class _Saving:
    """The hooks of a backward pass.

    Args:
        evictor: Holds the budget.
    """

    def __init__(self, evictor: Evictor) -> None:
        self._evictor = evictor
        self._step: Step | None = None
        self.is_over = False  # whether the budget is held no more

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd holds in place of a tensor that it saves."""
        if self.is_over:
            return pack_kept(tensor, None)
        step = self._step
        if step is None:
            step = self._step = Step(self._evictor, replays=False)
        with torch._C._DisableTorchDispatch():
            self._evictor.look(0)  # where allocations do not ask for room: nothing sees the ops of such a graph
        return step.pack(tensor)

    def unpack(self, packed: object) -> torch.Tensor:
        """Return the tensor that autograd reads."""
        if isinstance(packed, tuple):
            tensor: torch.Tensor
            tensor, version, *_ = packed
            if tensor._version != version:
                raise changed_in_place(tensor.type(), list(tensor.shape))
            return tensor
        assert self._step is not None, "it has packed it"
        return self._step.unpack(packed)

    def data_assigned(self, tensor: torch.Tensor) -> None:
        """Note that the program is about to give a tensor other data."""
        if self._step is not None:
            self._step.data_assigned(tensor)


class BackwardGraphs:
    """What is in place while a backward pass runs.

    Args:
        evictor: Holds the budget.
    """

    def __init__(self, evictor: Evictor) -> None:
        self._saving, self._in_place, self._stand_ins = _Saving(evictor), LooseStack(), evictor.stand_ins
        end_with(self, self._in_place.close)

    @staticmethod
    def are_possible() -> bool:
        """Whether no hooks of the program lie around the backward pass, which alone are asked then."""
        return hooks_are_allowed() and not has_own_hooks()

    def open(self) -> None:
        """Put it in place in the calling thread, from which autograd takes it along into others."""
        saving = self._saving
        self._in_place.enter_context(StepHooks(saving.pack, saving.unpack, is_of_backward=True))
        self._in_place.enter_context(RawLooks(None, saving.data_assigned, self._stand_ins))

    def close(self) -> None:
        """Take it away. May be repeated. What autograd holds for longer can be read.

        In the middle of the pass, as where a hook of the program removes the budget, it does nothing from now on and is
        taken away after it: autograd puts the stack of hooks back as it was when the pass began.
        """
        if BackwardWatch.is_running():
            self._saving.is_over = True
            BackwardWatch.after(self.close)  # which keeps this until then
        else:
            self._in_place.close()
