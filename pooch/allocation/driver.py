"""From warm steps to an arena that serves: record, pack beside training, serve, and record again when steps change."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from ..ground.errors import UsageError
from ..ground.units import format_bytes
from ..packing import Block, Layout, pack, verify
from ..torchtools import cuda_only
from ..torchtools.cpu_allocator import NO_PLACE, ArenaCounters, ArenaFunctions, RecordedStep, counting_allocator
from ..torchtools.cpu_allocator.arena_stats import ArenaState, ArenaStats
from ..torchtools.cuda_allocator import CudaSteps, installed_arena
from ..torchtools.malloc import trim_freed_memory
from .blocks import blocks_of, calls_that_repeat, common_step, part_of

_in_use = threading.Lock()  # there is one arena in a process
_STACK_BYTES = 2**20  # of the thread that packs: glibc keeps its stack, and 8 MiB would count where memory is limited


@dataclass(frozen=True, slots=True)
class ArenaOptions:
    """How an arena is made.

    Attributes:
        warm_steps: steps before the first that is recorded. Gradients and the optimizer's state appear in the first.
        most_calls: calls of the model that may make up one step, as where gradients accumulate.
        most_recorded: calls that are recorded until they repeat.
        pack_limit_s: CPU seconds for packing.
        most_layouts: layouts that are made before an arena whose steps keep changing is given up.
        bad_share: share of a step's requests without their place that makes the step a bad one.
        bad_steps: how many more bad steps than good ones there are when steps are recorded again.
        canary_bytes: bytes behind each block that are watched; 0 for none. For tests.
    """

    warm_steps: int = 1
    most_calls: int = 16
    most_recorded: int = 48
    pack_limit_s: float = 1.5
    most_layouts: int = 4
    bad_share: float = 0.05
    bad_steps: int = 4
    canary_bytes: int = 0


StepFunctions = ArenaFunctions | CudaSteps  # what an allocator does with steps


class _Packing:
    """A layout in the making, in a thread: the compiled packer does not hold the interpreter's lock."""

    def __init__(
        self, step: RecordedStep, begins: tuple[int, ...], options: ArenaOptions, alignment_bytes: int
    ) -> None:
        self.step, self.begins = step, begins
        self.calls = 1  # that began since then, with the one that begins now
        self.blocks: dict[int, Block] = blocks_of(step, options.canary_bytes, alignment_bytes)
        self.layout: Layout | None = None
        self.error: Exception | None = None
        self._limit_s = options.pack_limit_s
        self.thread = threading.Thread(target=self._pack, name="pooch-packing", daemon=True)
        usual_bytes = threading.stack_size(_STACK_BYTES)
        try:
            self.thread.start()
        except RuntimeError as error:  # the system has no room for a thread
            self.error = error
        finally:
            threading.stack_size(usual_bytes)

    def _pack(self) -> None:
        try:
            blocks = list(self.blocks.values())
            layout = pack(blocks, time_limit_s=self._limit_s)
            verify(blocks, layout)
            self.layout = layout
        except Exception as error:  # noqa: BLE001  (handed to the thread that trains)
            self.error = error


class StepArena:
    """Records the first steps of a training, and serves those that follow from an arena.

    A call lasts from one `begin_step` to the next, so that the optimizer's step and `zero_grad` belong to it. A step is
    a call, or several after which requests repeat, as where gradients accumulate. What differs from the recorded step
    is served as it always was. `close` ends it; blocks that live in the arena stay valid.

    Args:
        functions: of the allocator, which is in place.
        options: how the arena is made.
        end: called once, when nothing records or serves any more.

    Attributes:
        recorded: the step that was packed last, of which `blocks_of` makes blocks; None before.
    """

    def __init__(self, functions: StepFunctions, options: ArenaOptions, end: Callable[[], None]) -> None:
        self._functions, self._options = functions, options
        self._lock = threading.Lock()
        self.recorded: RecordedStep | None = None
        self._stats = ArenaStats("waiting")
        self._left = options.warm_steps
        self._begins: list[int] = []  # of the recorded calls
        self._packing: _Packing | None = None
        self._parts: tuple[int, ...] = ()  # first request of each call of a step, and the end
        self._part = 0
        self._seen = ArenaCounters()
        self._bad = 0
        self._is_open = True
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _end, functions, end)  # also if nobody closes it
        self._finalizer.atexit = False

    @property
    def stats(self) -> ArenaStats:
        """What is known now."""
        if self._stats.state == "serving":
            return replace(self._stats, counters=self._functions.counters())
        return self._stats

    def begin_step(self) -> None:
        """Begin a step of the calling thread, or a further call of one, and so end the one before."""
        if os.getpid() != self._process:
            return  # a fork leaves the arena to its parent
        with self._lock:
            if self._is_open:
                _NEXT[self._stats.state](self)

    def wait(self) -> None:
        """Wait until the blocks that were recorded are packed. The next step is served."""
        packing = self._packing
        if packing is not None and packing.error is None:
            packing.thread.join()

    def close(self) -> None:
        """End it. The memory of blocks that live in the arena goes back to the system with the last of them."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._off("it was closed")
                self._finalizer()

    # One method for each state, called at the beginning of a step -----------------------------------------------------

    def _wait(self) -> None:
        self._left -= 1
        if self._left < 0:
            self._record()

    def _record(self) -> None:
        self._begins = [0]
        self._to("recording")
        self._functions.record()

    def _look_at_recorded(self) -> None:
        recorded = self._functions.recorded_so_far()
        self._begins.append(len(recorded.sizes))
        # After a layout that did not serve, more calls have to repeat: it may have been made of the middle of a step.
        least = 4**self._stats.layouts
        is_last = len(self._begins) > max(self._options.most_recorded, least)
        calls = calls_that_repeat(recorded, self._begins, self._options.most_calls, least, by_sizes=is_last)
        if calls:
            begin, middle, end = self._begins[-1 - 2 * calls], self._begins[-1 - calls], self._begins[-1]
            common = common_step(part_of(recorded, begin, middle), part_of(recorded, middle, end))
            assert common is not None, "they have the same sizes"
            self._functions.recorded()
            self.recorded = common
            begins = tuple(each - middle for each in self._begins[-1 - calls :])
            self._packing = _Packing(common, begins, self._options, self._functions.alignment_bytes)
            self._to("packing")
        elif not is_last:
            self._functions.begin_step()
        else:
            self._off(f"{len(self._begins) - 1} steps did not repeat what they asked for")

    def _look_at_packing(self) -> None:
        packing = self._packing
        assert packing is not None
        if packing.layout is None and packing.error is None:
            packing.calls += 1
            return  # packing goes on beside this step
        self._packing = None
        if packing.layout is None:
            self._off(f"the blocks of a step could not be packed ({packing.error})")
        elif not packing.layout.arena_bytes:
            self._off("no block lives and dies within a step")
        else:
            self._serve(packing, packing.layout)

    def _serve(self, packing: _Packing, layout: Layout) -> None:
        step, blocks = packing.step, packing.blocks
        offsets, rooms = np.full_like(step.sizes, NO_PLACE), np.zeros_like(step.sizes)
        numbers = list(blocks)
        offsets[numbers] = layout.offsets
        rooms[numbers] = [block.size_bytes for block in blocks.values()]
        trim_freed_memory()  # what steps without the arena left behind
        options = self._options
        self._parts = packing.begins
        self._part = packing.calls % (len(self._parts) - 1)
        first, end = self._parts[self._part : self._part + 2]
        if not self._functions.serve(
            step.sizes, offsets, rooms, layout.arena_bytes,
            canaries=options.canary_bytes > 0, first=first, end=end,
        ):  # fmt: skip
            self._off(f"the system has no room for an arena of {format_bytes(layout.arena_bytes)}")
            return
        self._seen, self._bad = ArenaCounters(), 0
        self._stats = ArenaStats(
            "serving",
            calls=len(self._parts) - 1,
            arena_bytes=layout.arena_bytes,
            bound_bytes=layout.bound_bytes,
            blocks=len(blocks),
            unplaced_blocks=len(step.sizes) - len(blocks),
            layouts=self._stats.layouts + 1,
        )

    def _look_at_served(self) -> None:
        now = self._functions.counters()
        last = now.since(self._seen)
        self._seen = now
        is_bad = last.fallbacks > self._options.bad_share * max(1, last.requests)
        self._bad = self._bad + 1 if is_bad else max(0, self._bad - 1)
        if self._bad < self._options.bad_steps:
            self._begin_part(self._part_after(last.requests))
        elif self._stats.layouts < self._options.most_layouts:
            self._record()
        else:
            self._off(f"the steps kept changing after {self._stats.layouts} layouts")

    def _begin_part(self, number: int) -> None:
        self._part = number % (len(self._parts) - 1)
        self._functions.begin_step(*self._parts[self._part : self._part + 2])

    def _part_after(self, requests: int) -> int:
        """The call of a step that follows one of so many requests, which tell where a loop has skipped to."""
        lengths = [end - begin for begin, end in pairwise(self._parts)]
        if requests != lengths[self._part] and lengths.count(requests) == 1:
            return lengths.index(requests) + 1
        return self._part + 1

    def _stay_off(self) -> None:
        pass

    def _to(self, state: ArenaState, reason: str = "") -> None:
        counters = self._functions.counters() if self._stats.state == "serving" else self._stats.counters
        self._stats = replace(self._stats, state=state, reason=reason, counters=counters)

    def _off(self, reason: str) -> None:
        if self._stats.state != "off":
            self._to("off", reason)
        self._functions.stop()


def _end(functions: StepFunctions, end: Callable[[], None]) -> None:
    functions.stop()
    end()
    _in_use.release()


_NEXT = {
    "waiting": StepArena._wait,
    "recording": StepArena._look_at_recorded,
    "packing": StepArena._look_at_packing,
    "serving": StepArena._look_at_served,
    "off": StepArena._stay_off,
}


def open_arena(device: torch.device, options: ArenaOptions = ArenaOptions()) -> StepArena | str:
    """Return an arena for the steps of a training, or in a few words why there is none.

    Args:
        device: that the model is on.
        options: how the arena is made.

    Raises:
        UsageError: another training of this process has an arena.
    """
    if device.type != "cpu":
        return _open_on_device(device, options)
    allocator = counting_allocator()
    if isinstance(allocator, str):
        return allocator
    _claim()
    user = object()
    if not allocator.install(user):
        _in_use.release()
        return "another CPU allocator is in place"
    return StepArena(allocator.arena, options, partial(allocator.remove, user))


def _open_on_device(device: torch.device, options: ArenaOptions) -> StepArena | str:
    installed = installed_arena()
    if not cuda_only.takes_other_allocators(device):
        return f"tensors on devices of type {device.type!r} have an allocator of their own"
    if installed is None:
        return (
            "PyTorch takes another allocator only before it has allocated anything on the GPU: call "
            "pooch.install_cuda_arena() at the beginning of the program"
        )
    _claim()
    return StepArena(CudaSteps(installed, device), options, lambda: None)


def _claim() -> None:
    if not _in_use.acquire(blocking=False):
        raise UsageError("this process trains on an arena already: close that one first (`run.remove()`)")
