"""Costs from running each distinct operator once on the device, with made-up contents."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...ground.errors import first_line
from ...torchtools.accelerators import current_stream, has_streams, new_event, synchronize
from ...torchtools.cuda_only import occupy
from ...torchtools.memory_trace import MemoryTracer
from ...torchtools.operators import operator_facts
from ...torchtools.out_of_memory import forgotten, is_out_of_memory
from ...torchtools.tensors import find_tensors, has_plain_storage, map_tensors
from .costs import OpCost, signature

# After its first run, which sets up kernels, an operator is run again until it has taken this long or run this often.
_ENOUGH_MS = 10.0
_MOST_RUNS = 5
_AHEAD_MS = 1.0  # time that the host has for launching one operator


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout in memory of a real result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class _Measured:
    cost: OpCost
    layouts: tuple[_Layout, ...]


class MeasuredCosts:
    """Runs each distinct operator on the device when it is first needed, in the memory of that operator alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[object, ...], _Measured | None] = {}
        self._refused: dict[str, str] = {}

    def cost(self, func: Any, args: Any, kwargs: Any, result: Any) -> OpCost:
        """Returns the measured cost; 0 for an operator that rejects made-up contents or does not fit (see `notes`)."""
        measured = self._measured(func, args, kwargs)
        return OpCost(0.0, 0) if measured is None else measured.cost

    def corrected(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Replaces results to which fake kernels give another size or layout than real ones, such as the workspace of a
        recurrent layer or the results of transposed convolutions.
        """
        if operator_facts(func).written or not any(True for _ in find_tensors(result)):
            return result
        measured = self._measured(func, args, kwargs)
        if measured is None:
            return result
        layouts = iter(measured.layouts)
        return map_tensors(lambda tensor: _laid_out(tensor, next(layouts)), result)

    def notes(self) -> list[str]:
        """Returns notes on how many operators were measured, and which could not be."""
        distinct = f"{len(self._known)} distinct ops, each measured once on the device by itself"
        failed = [f"{name} could not be measured ({why}) and counts as free" for name, why in self._refused.items()]
        return [f"op times modelled from {distinct}", *failed]

    def _measured(self, func: Any, args: Any, kwargs: Any) -> _Measured | None:
        key = signature(func, args, kwargs)
        if key not in self._known:
            generators = [self._device] if has_streams(self._device) else []
            with _disable_current_modes(), torch.random.fork_rng(devices=generators):
                try:
                    self._known[key] = self._measure(func, args, kwargs)
                except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, MemoryError) as error:
                    self._known[key] = None
                    self._refused[str(func)] = "memory ran out" if is_out_of_memory(error) else first_line(error)
                    forgotten(error)
        return self._known[key]

    def _measure(self, func: Any, args: Any, kwargs: Any) -> _Measured:
        contents = _Contents(self._device)
        given, named = map_tensors(contents.like, args), map_tensors(contents.like, kwargs)
        workspace, layouts = self._workspace_bytes(func, given, named)
        times: list[float] = []
        while not times or (sum(times) < _ENOUGH_MS and len(times) < _MOST_RUNS):
            times.append(run_ms(lambda: func(*given, **named), self._device))
        return _Measured(OpCost(min(times), workspace), layouts)

    def _workspace_bytes(self, func: Any, args: Any, kwargs: Any) -> tuple[int, tuple[_Layout, ...]]:
        """Returns the bytes that the operator needs beyond its results at its peak, and the layouts of its results."""
        tracer = MemoryTracer(self._device)
        tracer.start()
        try:
            result = func(*args, **kwargs)
        finally:
            trace = tracer.stop()
        made = sum(event.size_bytes for event in trace.events)
        return max(0, trace.peak_bytes - made), tuple(_layout_of(tensor) for tensor in find_tensors(result))


def run_ms(run: Callable[[], object], device: torch.device) -> float:
    """Returns how long a device computes, in ms.

    With streams, it is the time between two events in a stream that is busy while the host issues them, so neither
    launches nor waits for the host count.
    """
    synchronize(device)
    if not has_streams(device):
        start_s = time.perf_counter()
        result = run()
        taken_ms = (time.perf_counter() - start_s) * 1000
        del result  # freeing it is not part of the op
        return taken_ms
    begin, end, stream = new_event(device, timed=True), new_event(device, timed=True), current_stream(device)
    occupy(device, _AHEAD_MS)
    begin.record(stream)
    run()
    end.record(stream)
    synchronize(device)
    return float(begin.elapsed_time(end))


def _layout_of(tensor: torch.Tensor) -> _Layout:
    if not has_plain_storage(tensor):
        return _Layout(tuple(tensor.shape), (), 0, 0)
    offset, storage_bytes = int(tensor.storage_offset()), tensor.untyped_storage().nbytes()
    return _Layout(tuple(tensor.shape), tensor.stride(), offset, storage_bytes)


def _laid_out(tensor: torch.Tensor, layout: _Layout) -> torch.Tensor:
    if not has_plain_storage(tensor) or _layout_of(tensor) == layout:
        return tensor
    elements = layout.storage_bytes // tensor.element_size()
    return tensor.new_empty(elements).as_strided(layout.shape, layout.stride, layout.offset)


class _Contents:
    """Real tensors in place of fake ones: the same geometry, and contents that every operator accepts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # holds the fake ones, so that ids stay unique

    def like(self, fake: torch.Tensor) -> torch.Tensor:
        """Returns zeros for indices and booleans, which are always within bounds, and one half for other numbers."""
        if id(fake) in self._made:
            return self._made[id(fake)][1]
        size, stride = tuple(fake.shape), fake.stride()
        extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if 0 not in size else 0
        device = "cpu" if fake.device.type == "cpu" else self._device
        flat = torch.zeros(extent, dtype=fake.dtype, device=device)
        if fake.dtype.is_floating_point or fake.dtype.is_complex:
            flat.fill_(0.5)
        real = flat.as_strided(size, stride)
        self._made[id(fake)] = (fake, real)
        return real
