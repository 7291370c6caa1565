"""Costs from running each distinct operator once on the device, with made-up contents."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pooch.profiler.fake.costs import OpCost, signature
from pooch.torchtools.accelerators import current_stream, has_streams, new_event, synchronize
from pooch.torchtools.cuda_only import occupy
from pooch.torchtools.memory_trace import MemoryTracer
from pooch.torchtools.operators import operator_facts
from pooch.torchtools.out_of_memory import forgotten, is_out_of_memory
from pooch.torchtools.tensors import find_tensors, has_plain_storage, map_tensors

# An operator is run again after its first time (which sets up kernels) until so much is spent on it, or so often.
_ENOUGH_MS = 10.0
_MOST_RUNS = 5
_AHEAD_MS = 1.0  # that the host has for issuing one


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a result really lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class _Measured:
    cost: OpCost
    layouts: tuple[_Layout, ...]


class MeasuredCosts:
    """Runs each distinct operator on the device when it is first asked for; needs the memory of that operator alone.

    Args:
        device: where to run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[object, ...], _Measured | None] = {}
        self._refused: dict[str, str] = {}

    def cost(self, func: Any, args: Any, kwargs: Any, result: Any) -> OpCost:
        """As measured; nothing for an operator that refuses made-up contents or does not fit (`notes` names it)."""
        measured = self._measured(func, args, kwargs)
        return OpCost(0.0, 0) if measured is None else measured.cost

    def corrected(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Fake kernels give some results another size or layout than real ones (the workspace of a recurrent layer,
        transposed convolutions); these are replaced.
        """
        if operator_facts(func).written or not any(True for _ in find_tensors(result)):
            return result
        measured = self._measured(func, args, kwargs)
        if measured is None:
            return result
        layouts = iter(measured.layouts)
        return map_tensors(lambda tensor: _laid_out(tensor, next(layouts)), result)

    def notes(self) -> list[str]:
        """How many operators were measured, and which were not."""
        told = [f"op times modelled from {len(self._known)} distinct ops, each measured once on the device by itself"]
        told += [f"{name} could not be measured ({why}) and counts as free" for name, why in self._refused.items()]
        return told

    def _measured(self, func: Any, args: Any, kwargs: Any) -> _Measured | None:
        key = signature(func, args, kwargs)
        if key not in self._known:
            with _disable_current_modes(), torch.random.fork_rng(devices=self._generators()):
                try:
                    self._known[key] = self._measure(func, args, kwargs)
                except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, MemoryError) as error:
                    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
                    self._known[key] = None
                    self._refused[str(func)] = "memory ran out" if is_out_of_memory(error) else said
                    forgotten(error)
        return self._known[key]

    def _generators(self) -> list[torch.device]:
        return [self._device] if has_streams(self._device) else []

    def _measure(self, func: Any, args: Any, kwargs: Any) -> _Measured:
        contents = _Contents(self._device)
        given, named = map_tensors(contents.like, args), map_tensors(contents.like, kwargs)
        workspace, layouts = self._workspace_bytes(func, given, named)
        times: list[float] = []
        while not times or (sum(times) < _ENOUGH_MS and len(times) < _MOST_RUNS):
            times.append(run_ms(lambda: func(*given, **named), self._device))
        return _Measured(OpCost(min(times), workspace), layouts)

    def _workspace_bytes(self, func: Any, args: Any, kwargs: Any) -> tuple[int, tuple[_Layout, ...]]:
        """What it takes beyond its results at its peak, and how these lie in memory."""
        tracer = MemoryTracer(self._device)
        tracer.start()
        try:
            result = func(*args, **kwargs)
        finally:
            trace = tracer.stop()
        made = sum(event.size_bytes for event in trace.events)
        return max(0, trace.peak_bytes - made), tuple(_layout_of(tensor) for tensor in find_tensors(result))


def run_ms(run: Callable[[], object], device: torch.device) -> float:
    """How long a device computes, in ms. With streams between two events in a stream that is busy when the host issues
    them, so that neither launching nor waiting for the host counts.
    """
    synchronize(device)
    if not has_streams(device):
        start_s = time.perf_counter()
        result = run()
        taken_ms = (time.perf_counter() - start_s) * 1000
        del result  # letting go of it is no part of the op
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
    """Real tensors in the place of fake ones: the same geometry, and contents that every operator takes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the fake one, so that its id stays its own

    def like(self, fake: torch.Tensor) -> torch.Tensor:
        """Zeros for indices and booleans, so that they are within bounds; about one half for numbers."""
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
