"""When what the program holds leaves, such as its data: where steps pass the budget though everything else has left."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from traceback import walk_stack
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

from ..executor.evictor import Evictor
from ..executor.persistent import PersistentMemory
from ..executor.program_data import data_that_can_leave
from ..ground.live_objects import YOUNG
from ..ground.units import format_bytes
from ..torchtools.accelerators import has_streams
from ..torchtools.memory_trace import live_tensors
from ..torchtools.tensors import find_tensors, storage_key
from ..torchtools.threads import is_alone
from ..torchtools.watch import unmark
from .seldom import Seldom
from .steps import Storages

_PACKAGE = __name__.partition(".")[0]


class ProgramData:
    """Looks for what the program holds, seldom: with large libraries loaded, that takes as long as a step.

    What each step makes anew, such as what an `autograd.Function` keeps on its context, is young, and found by looking
    at few objects. Either is done in the next step as well if it has helped to hold the budget, else ever less often.

    PyTorch ends the process if something looks at a storage that another thread is just releasing.

    On a device with streams, only what models are called with leaves: something else may be on its way there, on a
    stream that nothing waits for, such as the next batch.

    Args:
        evictor: Holds the budget.
        tell: Called with one line, once.

    Attributes:
        has_begun: Whether data leaves.
    """

    def __init__(self, evictor: Evictor, tell: Callable[[str], None]) -> None:
        self._evictor, self._tell = evictor, tell
        self._looks_at_all = not has_streams(evictor.device)
        self.has_begun = False
        self._all, self._young = Seldom(), Seldom()
        self._given: list[weakref.ref[torch.Tensor]] = []  # to a step on trial

    def begin_trial(self, memory: PersistentMemory, arguments: object) -> None:
        """Have what a step is given leave in it if nothing else can.

        Args:
            memory: What may leave.
            arguments: What the model is called with, in any nesting.
        """
        if is_alone():
            given = find_tensors(arguments)
            self._given = list(map(weakref.ref, given))
            memory.adopt_data(self._free(given, memory.library), is_given=True)

    def end_trial(self, memory: PersistentMemory) -> None:
        """Go on in later steps if what the step was given has left."""
        if memory.values.moved.out_bytes["data"]:
            self._begin(_data_bytes(memory))

    def step_begins(self, memory: PersistentMemory, has_missed: bool, arguments: object) -> None:
        """Have data leave from now on if the budget was passed, and from then on what a step is given.

        Args:
            memory: What may leave.
            has_missed: Whether the step before passed the budget.
            arguments: What the model is called with, in any nesting.
        """
        self._all.step_ends(is_held=not has_missed)
        self._young.step_ends(is_held=True)  # it takes next to no time
        may_look = has_missed and is_alone()
        if self.has_begun or (may_look and not self._looks_at_all and self._all.is_due()):
            self._adopt(memory, self._free(find_tensors(arguments), memory.library), is_given=True)
        if may_look and self._looks_at_all:  # after that: to find what a step is given is no reason to look again
            self._look_seldom(memory.library, {}, lambda: memory)
        if self.has_begun and self._looks_at_all and is_alone():
            held = held_by_running_steps()
            if held:
                self._adopt(memory, self._free(held, memory.library))

    def may_look_now(self, library: Any) -> bool:
        """Whether what runs holds what it works on: an op that is watched does, and autograd itself.

        Args:
            library: Watches ops natively.
        """
        return bool(library.is_in_op()) or _is_autograd_running()

    def leaves_now(
        self,
        library: Any,
        followed: Storages,
        memory_now: Callable[[], PersistentMemory | None],
        trained: Iterable[torch.Tensor] = (),
    ) -> bool:
        """Have data leave in the middle of a step that is about to pass the budget; return whether there is any.

        What is running has to hold what it works on, so that this is not what Python alone holds. What the next ops are
        given is brought back then.

        Args:
            library: Watches ops natively.
            followed: The storages that the step follows.
            memory_now: Returns what lets things leave, or None if nothing can.
            trained: Parameters that leave as such from the next step on.
        """
        if not self._looks_at_all or not is_alone():
            return False
        without = {id(each) for each in trained}
        return self._look_seldom(library, followed, memory_now, without)

    def _look_seldom(
        self,
        library: Any,
        followed: Storages,
        memory_now: Callable[[], PersistentMemory | None],
        without: Collection[int] = (),
    ) -> bool:
        # What each step makes anew is young, unless garbage was collected meanwhile.
        if self.has_begun and self._young.is_due() and self._look(library, followed, memory_now, without, YOUNG):
            return True
        return self._all.is_due() and self._look(library, followed, memory_now, without)

    def _look(
        self,
        library: Any,
        followed: Storages,
        memory_now: Callable[[], PersistentMemory | None],
        without: Collection[int] = (),
        generations: Sequence[int | None] = (None,),
    ) -> bool:
        try:
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                tensors = live_tensors(self._evictor.device.type, generations)
                free = self._free((each for each in tensors if id(each) not in without), library)
                found = [each for each in free if followed.get(storage_key(each[0])) is None]
                memory = memory_now() if found else None
                found_bytes = 0 if memory is None else self._adopt(memory, found)
        except (MemoryError, RuntimeError):  # the process has no memory to look with: that is no failure of the step
            return False
        if found_bytes > 0:
            for looking in (self._young,) if generations is YOUNG else (self._young, self._all):
                looking.has_found(found_bytes, self._evictor.budget_bytes)
        return found_bytes > 0

    def unmark(self) -> None:
        """Have ops on data seen within regions alone, which does not leave any more."""
        given, self._given = self._given, []
        for each in given:
            if (tensor := each()) is not None:
                unmark(tensor)
        if self.has_begun and is_alone():
            for tensor in live_tensors(self._evictor.device.type):
                unmark(tensor)

    def _free(self, tensors: Iterable[torch.Tensor], library: Any) -> Iterator[Sequence[torch.Tensor]]:
        """Yield those that can leave and that no step that is alive has saved: these leave as its activations do."""
        saved = self._evictor.saved_keys()
        for together in data_that_can_leave(tensors, self._evictor.device, library):
            if storage_key(together[0]) not in saved:
                yield together

    def _adopt(
        self, memory: PersistentMemory, found: Iterable[Sequence[torch.Tensor]], *, is_given: bool = False
    ) -> int:
        before_bytes = _data_bytes(memory)
        memory.adopt_data(found, is_given=is_given)
        data_bytes = _data_bytes(memory)
        if data_bytes:
            self._begin(data_bytes)
        return data_bytes - before_bytes

    def _begin(self, data_bytes: int) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._tell(
                "nothing else can leave, so tensors that the program holds leave "
                f"{self._evictor.device.type} memory as well from now on ({format_bytes(data_bytes)})"
            )


def _data_bytes(memory: PersistentMemory) -> int:
    return sum(value.size_bytes for value in memory.values if value.kind == "data")


def _is_autograd_running() -> bool:
    """Whether autograd itself runs the op that is running, and no Python code that it has called."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    return frame.f_code is _engine_run_backward.__code__


def held_by_running_steps() -> list[torch.Tensor]:
    """Return what steps hold in variables that have called their closures, and so this step: directions, gradients.

    What they keep so is known as state only from the end of such a step on.
    """
    found: list[torch.Tensor] = []
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_globals.get("__name__") == torch.optim.LBFGS.__module__:
            variables = frame.f_locals
            found += find_tensors(list(variables.values()))
            if type(variables) is dict:  # until Python 3.12 the frame keeps this copy, with what it has let go of since
                variables.clear()
    return found
