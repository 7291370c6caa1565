"""Detects accesses to a tensor's memory that no dispatched op shows, such as `print(x)`, `x.numpy()` or `x.data = y`.

A function mode would see them, but PyTorch's own code asks whether one is active (`torch.overrides.has_torch_function`)
and then takes other ways, such as around the fast path of attention, which give other bits. So what is watched are the
methods of `torch.Tensor` themselves: while anybody watches, stand-ins take their place in the class.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from functools import partial
from types import MethodType, TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .raw_storages import compared_address
from .stand_ins import LastingUser, Place, StandIns
from .standing_aside import SilentMode

_READING = ("__repr__", "__format__", "tolist")
# With the address, the program may read or write at any time from then on.
_HANDING_OUT = ("numpy", "__array__", "const_data_ptr", "__dlpack__", "apply_", "map_", "map2_")
# With the storage, too; but who watches everywhere watches storages as well (`raw_storages.py`).
_HANDING_OUT_STORAGES = ("untyped_storage", "storage", "_typed_storage", "__reduce_ex__", "share_memory_")
_SPECTRAL = ("nuc", 2, -2)


class _Here(threading.local):
    """What the calling thread watches.

    Attributes:
        watchers: from the outermost to the innermost.
        tensors: those whose access was reported and is under way. What PyTorch does to them meanwhile is part of it.
        is_reporting: whether a watcher is at work, whose own accesses are nobody's concern.
    """

    def __init__(self) -> None:
        self.watchers: list[RawLooks] = []
        self.tensors: list[Any] = []
        self.is_reporting = False


_HERE = _Here()
_EVERYWHERE: list[LooksEverywhere] = []  # those that watch all threads


def _are_watched() -> bool:
    """Whether anybody wants to know of an access that the calling thread makes now."""
    return bool(_HERE.watchers or _EVERYWHERE) and not _HERE.is_reporting


def _report(looked: Any, name: str, hands_out: bool, hands_storage_out: bool = False) -> ExitStack:
    """Report an access, and return what is to be closed when it has happened."""
    _HERE.is_reporting = True
    try:
        with ExitStack() as ends:
            for everywhere in () if hands_storage_out else _EVERYWHERE:
                ends.callback(everywhere.looked(looked, name, hands_out))
            for watcher in reversed(_HERE.watchers):
                if watcher.looked is not None:
                    watcher.looked(looked, hands_out)
            return ends.pop_all()
    finally:
        _HERE.is_reporting = False


class _Method:
    """Stands in for a method of `torch.Tensor`, or a function of a module, and reports its calls.

    The dispatch of `__torch_function__` finds a method by its name in the class, so modes and subclasses of the program
    receive the stand-in, as does who writes `torch.Tensor.numpy`. It equals the method and has its hash, so that it is
    found in the sets and dictionaries in which the program looks for it.
    """

    def __init__(self, original: Any, hands_out: bool, hands_storage_out: bool = False) -> None:
        self.__wrapped__, self._hands_out, self._hands_storage_out = original, hands_out, hands_storage_out
        self.__doc__ = original.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        here = _HERE
        if not _are_watched() or any(args[0] is each for each in here.tensors if args):
            return self.__wrapped__(*args, **kwargs)
        with _report(self._looked(args, kwargs), self.__wrapped__.__name__, self._hands_out, self._hands_storage_out):
            if not args or torch.overrides.has_torch_function(args):  # the program's code comes first, and is watched
                return self.__wrapped__(*args, **kwargs)
            try:
                here.tensors.append(args[0])
                return self.__wrapped__(*args, **kwargs)
            finally:
                here.tensors.pop()

    def _looked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call accesses."""
        return args, kwargs

    def __getattr__(self, name: str) -> Any:
        if "__wrapped__" not in self.__dict__:  # it is just being copied
            raise AttributeError(name)
        return getattr(self.__dict__["__wrapped__"], name)

    def __eq__(self, other: object) -> bool:
        return bool((other.__wrapped__ if isinstance(other, _Method) else other) == self.__wrapped__)

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)


class _CopyingMethod(_Method):
    """Stands in for `Tensor.__deepcopy__`, whose memo holds all that was copied before, with the copies."""

    def _looked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[:1], {}


class _AddressMethod(_Method):
    """Stands in for `Tensor.data_ptr`, which is not an access where addresses are compared alone."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        address = compared_address(args[0]) if _EVERYWHERE and args else None
        return super().__call__(*args, **kwargs) if address is None else address


class _ModeAsking(_Method):
    """Stands in for a function that asks whether a dispatch mode is in place, and then computes the singular values or
    eigenvalues of a tensor without gradient in another way, which gives other bits. It runs as without Pooch's modes.

    Args:
        original: The function.
        order: Of the norm that it computes where the program names none. None: it takes none, and always asks.
    """

    def __init__(self, original: Any, order: Any) -> None:
        super().__init__(original, hands_out=False)
        self._order = order

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # Dynamo traces this too, and knows what it stands for
            return self.__wrapped__(*args, **kwargs)
        given, is_watched = (*args, *kwargs.values()), bool(_HERE.watchers) and not _HERE.is_reporting
        order = kwargs.get("ord", args[1] if len(args) > 1 else None)
        if not is_watched or (self._order is not None and (self._order if order is None else order) not in _SPECTRAL):
            return self.__wrapped__(*args, **kwargs)
        wants_gradient = any(isinstance(each, torch.Tensor) and each.requires_grad for each in given)
        if (wants_gradient and torch.is_grad_enabled()) or torch.overrides.has_torch_function(given):
            return self.__wrapped__(*args, **kwargs)
        if not all(isinstance(mode, SilentMode) for mode in _get_current_dispatch_mode_stack()):
            return self.__wrapped__(*args, **kwargs)  # so it does with a mode of the program's
        with _report((args, kwargs), self.__wrapped__.__name__, False), torch._C._DisableTorchDispatch():
            return self.__wrapped__(*args, **kwargs)


class _Property:
    """Stands in for a property of `torch.Tensor` and reports its reads or assignments. The class shows the original."""

    def __init__(self, original: Any) -> None:
        self.__wrapped__ = original

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self.__wrapped__ if instance is None else self.__wrapped__.__get__(instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        self.__wrapped__.__set__(instance, value)

    def __delete__(self, instance: Any) -> None:
        self.__wrapped__.__delete__(instance)


class _Address(_Property):
    """A property that hands the address out."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None or not _are_watched():
            return super().__get__(instance, owner)
        with _report(((instance,), {}), "__cuda_array_interface__", True):
            return super().__get__(instance, owner)


class _Data(_Property):
    """`Tensor.data`, which the program may put other memory in place of."""

    def __set__(self, instance: Any, value: Any) -> None:
        here, assigned = _HERE, list[Callable[[], None]]()
        if here.watchers and not here.is_reporting:
            here.is_reporting = True
            try:
                # A class of the program's would be called for what is asked here. Parameters of lazy modules refuse it.
                with torch._C.DisableTorchFunction():
                    for watcher in reversed(here.watchers):
                        if watcher.data_assigned is not None and (each := watcher.data_assigned(instance)) is not None:
                            assigned.append(each)
            finally:
                here.is_reporting = False
        super().__set__(instance, value)
        if assigned:
            with torch._C.DisableTorchFunction():
                for each in assigned:
                    each()


def _reads(original: Hashable) -> _Method:
    return _Method(original, hands_out=False)


def _copies(original: Hashable) -> _CopyingMethod:
    return _CopyingMethod(original, hands_out=False)


def _hands_out(original: Hashable) -> _Method:
    return _Method(original, hands_out=True)


def _tells_address(original: Hashable) -> _AddressMethod:
    return _AddressMethod(original, hands_out=True)


def _hands_storage_out(original: Hashable) -> _Method:
    return _Method(original, hands_out=True, hands_storage_out=True)


_LOOKS = StandIns(
    *(Place(torch.Tensor, name, _reads) for name in _READING),
    Place(torch.Tensor, "__deepcopy__", _copies),
    *(Place(torch.Tensor, name, _hands_out) for name in _HANDING_OUT),
    Place(torch.Tensor, "data_ptr", _tells_address),
    *(Place(torch.Tensor, name, _hands_storage_out) for name in _HANDING_OUT_STORAGES),
    Place(torch.Tensor, "__cuda_array_interface__", _Address),
    Place(torch, "to_dlpack", _hands_out),
    Place(torch.utils.dlpack, "to_dlpack", _hands_out),
    *(Place(torch.linalg, name, partial(_ModeAsking, order=None)) for name in ("svdvals", "eigvalsh", "matrix_rank")),
    *(Place(torch.linalg, name, partial(_ModeAsking, order="fro")) for name in ("norm", "matrix_norm")),
    Place(torch.linalg, "cond", partial(_ModeAsking, order=2)),
)
_ASSIGNMENTS = StandIns(Place(torch.Tensor, "data", _Data))


class LooksEverywhere:
    """Reports every such access of any thread before it happens, as long as it is in use.

    Args:
        looked: Called with the arguments of the access, the name of the method, and whether it hands out the address.
            Returns what is called when it has happened.
    """

    def __init__(self, looked: Callable[[Any, str, bool], Callable[[], None]]) -> None:
        self.looked = looked

    def begin(self) -> None:
        """Report from now on."""
        _LOOKS.use(self)
        _EVERYWHERE.append(self)

    def end(self) -> None:
        """Report no longer. May be repeated."""
        if self in _EVERYWHERE:
            _EVERYWHERE.remove(self)
        _LOOKS.leave(self)


class RawLooks:
    """Context manager that reports every such access of the thread before it happens.

    It may be nested, and left in another thread.

    Args:
        looked: Called with the arguments of the access, and whether it hands out the address. None: only assignments
            are watched, and the methods are those of PyTorch.
        data_assigned: Called with a tensor before `tensor.data = other`, and returns what is called afterwards or None.
            None in place of it: assignments are not watched.
        lasting: Keeps the stand-ins in place for the next one to watch. None: they are taken away.
    """

    def __init__(
        self,
        looked: Callable[[Any, bool], None] | None,
        data_assigned: Callable[[torch.Tensor], Callable[[], None] | None] | None = None,
        lasting: LastingUser | None = None,
    ) -> None:
        self.looked, self.data_assigned, self._lasting = looked, data_assigned, lasting
        self._here: list[RawLooks] | None = None

    def __enter__(self) -> RawLooks:
        self._here = _HERE.watchers
        try:
            if self.looked is not None:
                self._use(_LOOKS)
            if self.data_assigned is not None:
                self._use(_ASSIGNMENTS)
            self._here.append(self)
        except BaseException:
            self.leave()
            raise
        return self

    def _use(self, stand_ins: StandIns) -> None:
        stand_ins.use(self)
        if self._lasting is not None:
            self._lasting.use(stand_ins)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Report no longer. May be repeated, and come in another thread."""
        here = self._here
        if here is None:
            return
        if self in here:
            here.remove(self)
        _ASSIGNMENTS.leave(self)
        _LOOKS.leave(self)
        self._here = None

    abandon = leave  # the thread that is watched has ended
