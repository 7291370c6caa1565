"""What copies and hooks cost on this machine, for the profiles that are recorded while training runs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from ..api.children import Child
from ..api.device_links import measure_device_link
from ..api.hook_costs import measure_hook_costs
from ..ground.errors import PoochError
from ..ir import HookCosts, Link, Profile
from ..machine import CopySpeed
from ..profiler.step import is_profiling
from ..torchtools.accelerators import has_streams
from ..torchtools.memory_trace import earlier_objects_exempt
from ..torchtools.out_of_memory import forgotten, is_out_of_memory
from .backward import own_passes
from .kept_costs import Found, KeptCosts
from .stacks import can_outlast_the_call


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of copies and of hooks."""

    link: Link
    hooks: HookCosts


Gather = Callable[[], object]
_COMPUTE_SHARE = 0.2  # of a copy's time that compute loses, a guess for one core of several
_LET_GO_S = 0.2  # more than letting go of a process takes that has ended


def link_seen(speed: CopySpeed) -> Link:
    """Return the speed of copies as seen in training, as a link whose copies go one after the other."""
    out, back, share = speed.out, speed.back, _COMPUTE_SHARE
    return Link(
        f"{speed.tier}; rates as seen in training", out.latency_ms, back.latency_ms, out.bytes_per_ms,
        back.bytes_per_ms, False, share, share,
    )  # fmt: skip


class CostSource(ABC):
    """Where the costs come from. Not every device needs all that may be asked for."""

    @property
    @abstractmethod
    def is_final(self) -> bool:
        """Whether nothing better is still being measured."""

    @property
    def has_hooks(self) -> bool:
        """Whether it is known what hooks cost, at least as they were measured before this run."""
        return self.is_final

    def prepare(self, room_bytes: int) -> None:
        """Measure what has to be measured in the training thread. It is called between steps, before each job.

        Args:
            room_bytes: Device bytes that are free below the budget.
        """
        return

    @abstractmethod
    def now(self, profile: Profile) -> Costs:
        """Return the costs as far as they are known. It is called in the thread of the worker.

        Args:
            profile: A profile of this machine's device.
        """

    def begin(self) -> None:
        """Begin to measure what is measured beside training. It is called in the same thread, after each plan."""
        return

    def close(self) -> None:
        """End what is still being measured."""
        return


class DeviceCosts(CostSource):
    """Costs of a device with streams, whose copies and kernels only this process can time beside one another.

    They are measured once, when the first plan is needed: between steps, when activations take no memory.

    Args:
        device: The device.
        speed: What copies take as seen in training, which serves where nothing can be measured. It is told what was.
        gather: Waits a little for other ranks of the machine, or None.
    """

    is_final = True

    def __init__(self, device: torch.device, speed: CopySpeed, gather: Gather | None = None) -> None:
        self._device, self._speed, self._gather = device, speed, gather
        self._costs: Costs | None = None

    def prepare(self, room_bytes: int) -> None:
        """Measure, unless a mode or a profiler of the program would see it."""
        if self._costs is not None or is_profiling() or not can_outlast_the_call():
            return
        hooks = HookCosts()
        if self._gather is not None:
            self._gather()
        try:
            link = measure_device_link(self._device, max(0, room_bytes))
            self._speed.start_from(link)
            with own_passes():
                hooks = measure_hook_costs(self._device.type)
        except PoochError:  # without page-locked memory, for one
            link = link_seen(self._speed)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            forgotten(error)
            link = link_seen(self._speed)
        self._costs = Costs(link, hooks)

    def now(self, profile: Profile) -> Costs:
        """Return what was measured, or else the estimate."""
        return self._costs or Costs(link_seen(self._speed), profile.hooks)


class HostCosts(CostSource):
    """Costs of a machine whose device is the CPU, measured by a child process of low priority.

    It begins once the first plan is made, which it would delay: measuring and planning take a core each. Until it has
    ended, those serve that an earlier run has kept: a machine may be twice as fast an hour later.

    Args:
        speed: What copies take as seen in training, which serves until then. It is told what was measured.
        gather: Waits a little for other ranks of the machine, or None. They measure at the same time, since they copy
            at the same time.
        kept: Where they are kept for the next run, or None: nowhere.
    """

    def __init__(self, speed: CopySpeed, gather: Gather | None = None, kept: KeptCosts | None = None) -> None:
        self._speed, self._gather, self._kept = speed, gather, kept
        self._earlier: Found | None = None
        self._has_looked = kept is None
        self._child = Child("measure beside training")
        self._thread: threading.Thread | None = None
        self._found: Found | None = None

    @property
    def is_final(self) -> bool:
        """Whether the measuring has ended, with an answer or without."""
        return self._found is not None or (self._thread is not None and not self._thread.is_alive())

    def prepare(self, room_bytes: int) -> None:
        """Look for what an earlier run has kept."""
        if self._has_looked or self._kept is None:
            return
        self._has_looked, self._earlier = True, self._kept.find()
        if self._earlier is not None:
            self._speed.start_from(self._earlier[0])

    @property
    def has_hooks(self) -> bool:
        """Whether it is known what hooks cost, at least as they were measured before this run."""
        return self.is_final or self._earlier is not None

    def now(self, profile: Profile) -> Costs:
        """Return what was measured, or until then what an earlier run has kept, or an estimate."""
        link, hooks = self._found or self._earlier or (link_seen(self._speed), None)
        return Costs(link, hooks or profile.hooks)

    def begin(self) -> None:
        """Have the other process measure, once."""
        if self._thread is None:
            thread = threading.Thread(target=self._measure, name="pooch-measuring", daemon=True)
            with suppress(RuntimeError, MemoryError):  # no memory for one just now: after the next plan
                thread.start()
                self._thread = thread

    def _measure(self) -> None:
        if self._gather is not None:
            self._gather()
        with suppress(PoochError), self._child:  # without an answer, the estimate has to do
            self._found = found = self._child.ask()
            self._speed.start_from(found[0])
            if self._kept is not None:
                self._kept.keep(found)

    def close(self) -> None:
        """End the process that measures, if it is running, and its thread, unless that waits for other ranks."""
        self._child.end()
        if self._thread is not None:
            self._thread.join(None if self._gather is None else _LET_GO_S)


def measured_costs(_: object) -> Found:
    """In the child process: measure the costs of copies, and those of hooks, or None where they cannot be measured."""
    torch.set_num_threads(1)
    link, hooks = measure_device_link(torch.device("cpu")), None
    with suppress(PoochError), earlier_objects_exempt():
        hooks = measure_hook_costs("cpu")
    return link, hooks


def costs_of(device: torch.device, speed: CopySpeed, gather: Gather | None = None) -> CostSource:
    """Return where the costs of a device come from.

    Args:
        device: The device.
        speed: What copies take as seen in training.
        gather: Waits a little for other ranks of the machine, or None.
    """
    if has_streams(device):
        return DeviceCosts(device, speed, gather)
    return HostCosts(speed, gather, KeptCosts(device, speed.tier) if gather is None else None)
