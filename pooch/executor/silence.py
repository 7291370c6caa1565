"""What is not governed: counted, and told in one line for each kind."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from traceback import walk_stack

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..ground.bounded import Topics
from ..ground.frames import local_of
from ..torchtools import function_modes
from .records import pack_whole
from .statistics import RunStats


class Silence:
    """Counts what cannot be watched, and tells each kind once.

    Args:
        tell: Called with one line for each kind.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told = Topics()

    def note(self, what: str, stats: RunStats) -> None:
        """Count a saved tensor or a call that is left alone.

        Args:
            what: Its kind, for people.
            stats: Counters of the step.
        """
        stats.ungoverned += 1
        if self._told.is_new(what):
            module = running_module()
            place = f" in module {module!r}" if module else ""
            self._tell(f"{what}{place} is not governed: what it saves stays on the device")


class SavedTensors(ABC):
    """What stands between autograd and a step: a pair of saved tensor hooks."""

    @abstractmethod
    def silenced(self) -> tuple[Silence, RunStats]:
        """Return what tells what is not governed, and the counters of the step."""

    @abstractmethod
    def pack_plain(self, tensor: torch.Tensor) -> object:
        """Return what autograd holds in place of a tensor. No function of the program comes between."""

    @abstractmethod
    def unpack_plain(self, packed: object) -> torch.Tensor:
        """Return the tensor that autograd reads. No function of the program comes between."""

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd holds in place of a tensor that it saves."""
        # Every saved tensor passes here and through `unpack`. `python -m benchmarks.hook_cost` measures the cost.
        if type(tensor) is torch.Tensor and not function_modes.are_on():
            return self.pack_plain(tensor)
        with torch._C.DisableTorchFunction():  # even an attribute may be a function of the program
            return self.pack_plain(tensor)

    def unpack(self, packed: object) -> torch.Tensor:
        """Return the tensor that autograd reads."""
        if not function_modes.are_on():
            return self.unpack_plain(packed)
        with torch._C.DisableTorchFunction():
            return self.unpack_plain(packed)

    def fell_silent(self, what: str) -> None:
        """Note that part of the step is not governed, as hooks and modes see nothing of it."""
        silence, stats = self.silenced()
        silence.note(what, stats)

    def keep_silent(self, tensor: torch.Tensor) -> object:
        """Return what autograd holds in place of a tensor without ordinary memory. It counts as not governed."""
        kind = _ungoverned_kind(tensor)
        if kind is not None:
            self.fell_silent(kind)
        return pack_whole(tensor)


def _ungoverned_kind(tensor: torch.Tensor) -> str | None:
    """Return what a tensor without ordinary memory is, for people; None if it has no bytes on the device at all."""
    kind = type(tensor)
    if kind is FakeTensor or tensor.is_meta or tensor._is_zerotensor():
        return None
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return f"a {kind.__name__}"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.is_nested:
        return "a nested tensor"
    return f"a tensor of layout {str(tensor.layout).removeprefix('torch.').removeprefix('_')}"


def running_module() -> str:
    """Return the path of the innermost module whose code is running, in the outermost one; "" if that is the same.

    Only needed when something is told, so no step pays for it.
    """
    modules = []
    for frame, _ in walk_stack(sys._getframe()):
        found = local_of(frame, next(iter(frame.f_code.co_varnames), ""))
        if isinstance(found, torch.nn.Module):
            modules.append(found)
    if not modules:
        return ""
    names = {id(module): name for name, module in modules[-1].named_modules()}
    return next((names[id(module)] for module in modules if names.get(id(module))), "")
