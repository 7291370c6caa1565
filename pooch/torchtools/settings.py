"""The settings of PyTorch that decide which kernel an op runs, and in which precision.

A program may change them between the forward and the backward pass, or for one layer alone. What is computed again has
to be computed under those that were in force the first time.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from .operators import OperatorFacts

Settings = tuple[Any, ...]  # one entry for each of `_KNOBS`

_C: Any = torch._C
_SMALLEST_NORMAL = 2.0**-1022
_PRECISIONS = (("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"))
_CUDA_PRECISIONS = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"))
# Named by what follows `_get_` and `_set_` in PyTorch.
_FLAGS = ("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled", "cpu_allow_fp16_reduced_precision_reduction")
_CUDA_FLAGS = (
    "cudnn_enabled",
    "cudnn_deterministic",
    "cudnn_benchmark",
    "cublas_allow_fp16_accumulation",
)


_CAST_KINDS = ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)


@dataclass(frozen=True, slots=True)
class _Knob:
    get: Callable[[], Any]
    set: Callable[[Any], object]


def _counts_threads() -> Callable[[], int]:
    """Returns what tells how many threads an op of the calling thread would use.

    `torch.get_num_threads` sets that number first, in a thread that has run no parallel op yet. Without Pooch it is set
    later, so the first matrix products of such a thread would have other bits.
    """
    try:
        count: Callable[[], int] = ctypes.PyDLL(None).omp_get_max_threads  # of the runtime that PyTorch has loaded
    except (AttributeError, OSError, TypeError):  # PyTorch without OpenMP, or where only a library's own name finds it
        return torch.get_num_threads
    return count


threads_now = _counts_threads()


def _flushes_denormals() -> bool:
    """Whether the calling thread computes with denormal numbers as if they were zero; PyTorch has no getter for it."""
    return _SMALLEST_NORMAL * 0.5 == 0.0


def _deterministic() -> tuple[bool, bool]:
    return _C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    _C._set_deterministic_algorithms(value[0], warn_only=value[1])


def _cast_to(device_type: str) -> torch.dtype | None:
    """The dtype to which ops cast their arguments now, or None. None within an op that autocast has cast already."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _set_cast_to(device_type: str, dtype: torch.dtype | None) -> None:
    torch.set_autocast_enabled(device_type, dtype is not None)
    if dtype is not None:
        torch.set_autocast_dtype(device_type, dtype)


def _knobs() -> tuple[_Knob, ...]:
    has_cuda = torch.backends.cuda.is_built()
    flags = (*_FLAGS, *(_CUDA_FLAGS if has_cuda else ()))
    precisions = (*_PRECISIONS, *(_CUDA_PRECISIONS if has_cuda else ()))
    return (
        _Knob(torch.get_default_dtype, torch.set_default_dtype),
        _Knob(threads_now, torch.set_num_threads),
        _Knob(_flushes_denormals, torch.set_flush_denormal),
        _Knob(_deterministic, _set_deterministic),
        _Knob(_C._get_deterministic_fill_uninitialized_memory, _C._set_deterministic_fill_uninitialized_memory),
        *(_Knob(getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}")) for name in flags if _has(name)),
        *(
            _Knob(partial(_C._get_fp32_precision_getter, *each), partial(_C._set_fp32_precision_setter, *each))
            for each in precisions
            if hasattr(_C, "_get_fp32_precision_getter")
        ),
        *(_Knob(partial(_cast_to, kind), partial(_set_cast_to, kind)) for kind in _CAST_KINDS),
    )


def _has(name: str) -> bool:
    return hasattr(_C, f"_get_{name}") and hasattr(_C, f"_set_{name}")


_KNOBS = _knobs()
_GETTERS = tuple(knob.get for knob in _KNOBS)
_last: Settings = ()


def settings_now() -> Settings:
    """Returns the settings in force in the calling thread. Equal ones are one object, since each recipe holds them."""
    global _last
    now = tuple([get() for get in _GETTERS])  # for each op of a step without a plan: a generator would be slower
    if now != _last:
        _last = now
    return _last


@contextmanager
def under_settings(settings: Settings) -> Iterator[None]:
    """Context manager in which settings are in force that were so before.

    Casts are not cached inside: a cast that stays in PyTorch's cache would outlive the parameter's next change.

    Args:
        settings: the result of `settings_now`.
    """
    now = settings_now()
    if now is settings or now == settings:
        yield
        return
    changed = [each for each in zip(_KNOBS, settings, now, strict=True) if each[1] != each[2]]
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        for knob, wanted, _ in changed:
            knob.set(wanted)
        yield
    finally:
        for knob, _, was in changed:
            knob.set(was)
        torch.set_autocast_cache_enabled(caches)


def called_as_unwatched(func: Any, facts: OperatorFacts, args: Any, kwargs: Any, call: Any = None) -> Any:
    """Calls an operator from a dispatch mode with autocast as it is without the mode, which switches it off.

    Operators that autocast knows are cast before they come to a mode. The kernels of a few others run some that it
    knows, as the fused transformer layer does, and foreign ones may ask.

    Args:
        func: the operator.
        facts: what is known about it.
        args: its positional arguments.
        kwargs: its keyword arguments.
        call: what is called in its place, which calls it.
    """
    call = func if call is None else call
    casts = _casts_within(facts.cast_as) if facts.cast_as else []
    if not casts:
        return call(*args, **kwargs)
    with _casting(casts):
        return call(*args, **kwargs)


def settings_within(func: Any, facts: OperatorFacts) -> Settings:
    """Returns the settings under which `called_as_unwatched` calls an operator, from a dispatch mode."""
    casts = _casts_within(facts.cast_as) if facts.cast_as else []
    if not casts:
        return settings_now()
    with _casting(casts):
        return settings_now()


def _casts_within(name: str) -> list[tuple[str, torch.dtype]]:
    """Returns the kinds of devices for which autocast is on where an operator is called, and to what it casts.

    PyTorch keeps the state of the call that came from Python. Autocast is off by then if it knows that call. A kernel
    finds the state as it is without a mode.
    """
    if _KERNEL.is_here:
        return _casts_now(name) if _C._is_any_autocast_enabled() else []
    with _C._RestorePythonTLSSnapshot():
        return _casts_now(name) if _C._is_any_autocast_enabled() else []


def _casts_now(name: str) -> list[tuple[str, torch.dtype]]:
    casts = [(kind, _cast_to(kind)) for kind in _CAST_KINDS]
    return [(kind, dtype) for kind, dtype in casts if dtype is not None and not _is_cast_itself(name, kind)]


class _Kernel(threading.local):
    """Whether the calling thread was called by the kernel of the native watch: a context for what that calls."""

    is_here = False

    def __enter__(self) -> None:
        self.is_here = True

    def __exit__(self, *exception: object) -> None:
        self.is_here = False


_KERNEL = _Kernel()


def is_within_an_op() -> bool:
    """Whether the calling thread is in the middle of an op that came to Python. PyTorch keeps its state then."""
    try:
        with _C._RestorePythonTLSSnapshot():
            return True
    except RuntimeError:
        return False


def from_a_kernel() -> AbstractContextManager[None]:
    """Context manager for what the kernel of the native watch calls before an op."""
    return _KERNEL


@contextmanager
def _casting(casts: list[tuple[str, torch.dtype]]) -> Iterator[None]:
    before = [(kind, _cast_to(kind)) for kind, _ in casts]
    try:
        for kind, dtype in casts:
            _set_cast_to(kind, dtype)
        yield
    finally:
        for kind, was in before:
            _set_cast_to(kind, was)


@cache
def _is_cast_itself(name: str, device_type: str) -> bool:
    """Whether an operator has a kernel of its own for autocast, within which it is off."""
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[device_type]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
