"""The optimizers whose steps run in slices, each of which has what it needs there."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

import torch

from ..executor.persistent import PersistentMemory
from ..ground.errors import UsageError
from ..ground.units import format_bytes
from ..torchtools.optimizer_slices import Load, OptimizerSlices, StepNeeds
from .coming_states import PutStates, place_makers, take_makers_away
from .loop_times import LoopTimes
from .optimizer_states import OptimizerStates


class SlicedOptimizers:
    """Optimizers whose steps run in slices. None of them is kept alive.

    Args:
        tell: Called with one line.
        times: Is told when slices compute.

    Attributes:
        by_optimizer: What runs their steps.
    """

    def __init__(self, tell: Callable[[str], None], times: LoopTimes) -> None:
        self._tell, self._times = tell, times
        self.by_optimizer: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerSlices] = (
            weakref.WeakKeyDictionary()
        )
        self._coming: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # whose state leaves as it is made
        self._put = PutStates()

    def look(self, memory: PersistentMemory) -> None:
        """Have state leave as it is made that optimizers have got another place for, as where some was loaded."""
        for optimizer in list(self._coming):
            place_makers(optimizer, memory)

    def let_put_leave(self, memory: PersistentMemory) -> bool:
        """Have state leave that a running step has put there without asking; return whether there is any."""
        return self._put.adopt(list(self._coming), memory)

    def add(self, optimizer: torch.optim.Optimizer, memory: PersistentMemory, slice_bytes: int) -> None:
        """Have the steps of an optimizer run in slices, and its state leave.

        Args:
            optimizer: The optimizer.
            memory: What may leave.
            slice_bytes: How much a slice may have.
        """
        memory.adopt_state(optimizer, list(optimizer.state))
        self._coming.add(optimizer)
        place_makers(optimizer, memory)
        around = _around(weakref.ref(memory), weakref.ref(optimizer))
        times = self._times
        timed = {name: (times.before if "before" in name else times.after)(each) for name, each in around.items()}
        try:
            slices = OptimizerSlices(
                optimizer,
                slice_bytes,
                **timed,
                tell=self._telling(optimizer, memory.device),
                loads_of=_loads_of(weakref.ref(memory), weakref.ref(optimizer)),
            )
            slices.attach()
        except UsageError:
            return  # it hands its steps to another one, which is found as well
        self.by_optimizer[optimizer] = slices

    def _telling(self, optimizer: torch.optim.Optimizer, device: torch.device) -> Callable[[str], None]:
        """Return what tells why steps are not cut, with what such a step makes that cannot leave before it ends."""
        of, tell = weakref.ref(optimizer), self._tell

        def telling(text: str) -> None:
            stepped = of()
            staying_bytes = 0 if stepped is None else OptimizerStates.staying_bytes(stepped, device)
            rest = f"; until it ends, about {format_bytes(staying_bytes)} stay that it makes" if staying_bytes else ""
            tell(text + rest)

        return telling

    def end(self) -> list[torch.optim.Optimizer]:
        """Have all steps run as before, and return whose these are."""
        optimizers = list(self.by_optimizer)
        for slices in list(self.by_optimizer.values()):
            slices.detach()
        self.by_optimizer.clear()
        for optimizer in list(self._coming):
            take_makers_away(optimizer)
        self._coming.clear()
        return optimizers


def _loads_of(
    memory: weakref.ref[PersistentMemory], optimizer: weakref.ref[torch.optim.Optimizer]
) -> Callable[[Sequence[Sequence[torch.Tensor]], StepNeeds | None], Sequence[Load]]:
    """Return what tells how much slices of an optimizer's step take. It keeps neither alive."""

    def loads_of(slices: Sequence[Sequence[torch.Tensor]], needs: StepNeeds | None) -> Sequence[Load]:
        here, stepped = memory(), optimizer()
        if here is None or stepped is None:
            return [Load(True, math.inf, math.inf)] * len(slices)
        return here.loads(stepped, slices, needs)

    return loads_of


def _around(
    memory: weakref.ref[PersistentMemory], optimizer: weakref.ref[torch.optim.Optimizer]
) -> dict[str, Callable[[Sequence[torch.Tensor]], None]]:
    """Return what is to be called around each slice of an optimizer's step. It keeps neither alive."""

    def before(parameters: Sequence[torch.Tensor]) -> None:
        here, stepped = memory(), optimizer()
        if here is not None and stepped is not None:
            here.begin_slice(stepped, parameters)

    def before_next(parameters: Sequence[torch.Tensor]) -> None:
        here, stepped = memory(), optimizer()
        if here is not None and stepped is not None:
            here.begin_next(stepped, parameters)

    def before_whole(parameters: Sequence[torch.Tensor]) -> None:
        here, stepped = memory(), optimizer()
        if here is not None and stepped is not None:
            here.begin_whole(stepped, parameters)

    def after(parameters: Sequence[torch.Tensor]) -> None:
        here, stepped = memory(), optimizer()
        if here is not None and stepped is not None:
            here.end_slice(stepped, parameters)

    def failed(parameters: Sequence[torch.Tensor]) -> None:
        here = memory()
        if here is not None:
            here.undo_slice()

    return {
        "before": before,
        "before_next": before_next,
        "before_whole": before_whole,
        "after": after,
        "failed": failed,
    }
