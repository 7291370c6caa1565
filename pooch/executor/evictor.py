"""Pressure on a real device: its allocations ask for room, and a step's recipes are verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..ground.collector import LEEWAY
from ..machine import CopySpeed, Pressure
from ..machine.account import LiveBytes
from ..torchtools.endings import end_with, run_lost
from ..torchtools.saved_objects import SAVED_OBJECTS
from ..torchtools.stand_ins import LastingUser
from ..torchtools.tensors import find_tensors, has_plain_storage, storage_of
from .engines.protocol import CopyEngine
from .memory import DeviceMemory
from .silence import Silence, running_module
from .statistics import RunStats, WarnOnce
from .verification import Verification

_OBJECTS_A_SAVE = 6  # that live until the backward pass: a value, a handle, and where they are listed


@dataclass(frozen=True, slots=True)
class Need:
    """An allocation.

    Attributes:
        size_bytes: Its size.
        place: What made it: a node of autograd, or a module; "" if neither is known.
    """

    size_bytes: int
    place: str


class Evictor(Pressure):
    """Keeps the live bytes of a device within a budget as long as there is anything that can leave.

    Args:
        budget_bytes: The budget.
        engine: Copies to and from the tier. Closed by `close`.
        live: Counts live bytes. Closed by `close`.
        device: The device.
        host_bytes: The most that a step may take of the tier, or None.
        verification: What is known of the recipes. None: nothing is compared.

    Attributes:
        silence: Counts and tells what is not governed.
        is_held: Whether the budget is held now.
        stand_ins: Uses those that steps need, from the first step that is watched to the end of the budget.
        largest_need: What asked for most in this step where the budget had to be passed for it. None: it was held, or
            nothing tells what asks.
        making_room: Returns a context in which room is made.
    """

    stats: RunStats

    def __init__(
        self,
        budget_bytes: int,
        engine: CopyEngine,
        live: LiveBytes,
        device: torch.device,
        host_bytes: int | None = None,
        verification: Verification | None = None,
    ) -> None:
        speed = CopySpeed(engine.description)
        super().__init__(budget_bytes, live, DeviceMemory(device), engine.health, speed, RunStats())
        self.engine, self.device, self.host_bytes = engine, device, host_bytes
        self.is_held = True
        self.warn_once = WarnOnce()
        self.verification = Verification("off", self.warn_once) if verification is None else verification
        self.silence = Silence(lambda text: self.warn_once(text, text))
        self._asking = threading.local()
        self.stand_ins = LastingUser()
        self.largest_need: Need | None = None
        self.making_room: Callable[[], AbstractContextManager[object]] = nullcontext
        self._saves_before = 0  # when the step began
        end_with(self, self.stand_ins.end)
        end_with(self, LEEWAY.set, 0)

    def begin_step(self, stats: RunStats) -> None:
        """Begin to count for a new step, from the calling thread."""
        self.lock.give_back()
        run_lost()
        self.largest_need = None
        self.stand_ins.use(SAVED_OBJECTS)
        LEEWAY.set(_OBJECTS_A_SAVE * (self.saves - self._saves_before))  # as many as in the last step
        self._saves_before = self.saves
        self.begin(stats)
        self.hold()

    @property
    def has_values(self) -> bool:
        """Whether anything is registered that could leave."""
        return bool(self._values)

    def saved_keys(self) -> set[int]:
        """The keys of the storages on the device that autograd has saved and that may leave."""
        storages = (value.storage for value in list(self._values))
        return {storage._cdata for storage in storages if storage is not None}

    @property
    def unasked_bytes(self) -> int:
        """The most that came between two looks at what is live, where no allocation asks for room."""
        return 0 if self.live.asks else self._most_higher_bytes

    def hold(self) -> None:
        """Have the calling thread ask for room before it passes the budget."""
        if not getattr(self._asking, "on", False):
            self._asking.on = True
            self.live.ask(True)

    def ask_again(self) -> None:
        """Have threads ask for room anew, the calling one at once, as another counter counts from here on."""
        self._asking = threading.local()
        self.hold()

    def rest(self) -> None:
        """Have the calling thread ask for no room: another thread trains, and lets go of its own tensors meanwhile.

        PyTorch ends the process if one thread takes a storage that another one is just releasing.
        """
        self._asking.on = False
        self.live.ask(False)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Have the calling thread ask for no room inside of this context."""
        asks = getattr(self._asking, "on", False)
        self.rest()
        try:
            yield
        finally:
            if asks:
                self.hold()

    def plan_left(self) -> None:
        """Note that the plan of the step that is running has fallen silent."""

    def relieve(self) -> int:
        """Have everything leave that can, as an allocation has failed, and return how many bytes that frees."""
        with torch._C._DisableTorchDispatch():
            return super().relieve()

    def make_room(self, missing_bytes: int) -> None:
        """Evict until so many bytes are free, or until nothing more can leave."""
        with torch._C._DisableTorchDispatch(), self.making_room():  # what moves values is no op of the step
            before_bytes = self._missing_bytes
            super().make_room(missing_bytes)
            if self._missing_bytes > before_bytes and self.live.asks:
                needed_bytes = self._missing_bytes + self.budget_bytes - self.live.now()
                if self.largest_need is None or needed_bytes > self.largest_need.size_bytes:
                    self.largest_need = Need(needed_bytes, _what_runs())

    def look_before(self, arguments: Any) -> None:
        """Make room before an op, which is thought to need as much as its arguments take.

        Args:
            arguments: Its arguments, in any nesting.
        """
        if not self.live.asks:
            tensors = (tensor for tensor in find_tensors(arguments) if has_plain_storage(tensor))
            self.look(sum(storage_of(tensor).nbytes() for tensor in tensors))

    def close(self) -> None:
        """Hold nothing any longer. Steps that are alive can still read what they saved."""
        LEEWAY.set(0)
        self.stand_ins.end()
        self.live.close()
        self.engine.close()


def _what_runs() -> str:
    """Return what the program runs just now in the calling thread, for people."""
    node: torch.autograd.graph.Node | None = torch._C._current_autograd_node()
    if node is not None:
        return f" in {node.name()}"
    module = running_module()
    return f" in module {module!r}" if module else ""
