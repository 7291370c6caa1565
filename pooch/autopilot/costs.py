"""What copies and hooks cost on this machine, for the profiles that are recorded while training runs."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import torch

from ..api.children import child_command
from ..api.device_links import measure_device_link
from ..api.hook_costs import measure_hook_costs
from ..errors import PoochError
from ..ir import HookCosts, Link, Profile
from ..profiler.live import is_profiling
from ..torchtools.accelerators import has_streams
from ..torchtools.out_of_memory import forgotten, is_out_of_memory
from .stacks import can_outlast_the_call


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of copies and of hooks."""

    link: Link
    hooks: HookCosts


Gather = Callable[[], object]


class CostSource(Protocol):
    """Where the costs come from."""

    def prepare(self, room_bytes: int) -> None:
        """Measure what has to be measured in the training thread. It is called between steps, before each job.

        Args:
            room_bytes: Device bytes that are free below the budget.
        """

    def now(self, profile: Profile) -> Costs:
        """Return the costs as far as they are known. It is called in the thread of the worker.

        Args:
            profile: A profile of this machine's device.
        """

    def close(self) -> None:
        """End what is still being measured."""


class DeviceCosts:
    """Costs of a device with streams, whose copies and kernels only this process can time beside one another.

    They are measured once, when the first plan is needed: between steps, when activations take no memory.

    Args:
        device: The device.
        estimate: Returns the cost of copies as seen in training, which serves where nothing can be measured.
        gather: Waits a little for other ranks of the machine, or None.
    """

    def __init__(self, device: torch.device, estimate: Callable[[], Link], gather: Gather | None = None) -> None:
        self._device, self._estimate, self._gather = device, estimate, gather
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
            hooks = measure_hook_costs(self._device.type)
        except PoochError:  # without page-locked memory, for one
            link = self._estimate()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            forgotten(error)
            link = self._estimate()
        self._costs = Costs(link, hooks)

    def now(self, profile: Profile) -> Costs:
        """Return what was measured, or else the estimate."""
        return self._costs or Costs(self._estimate(), profile.hooks)

    def close(self) -> None:
        """Do nothing."""


class HostCosts:
    """Costs of a machine whose device is the CPU, measured by a child process of low priority.

    Args:
        estimate: Returns the cost of copies as seen in training, which serves until then.
        gather: Waits a little for other ranks of the machine, or None. They measure at the same time, since they copy
            at the same time.
    """

    def __init__(self, estimate: Callable[[], Link], gather: Gather | None = None) -> None:
        self._estimate, self._gather = estimate, gather
        self._costs: Costs | None = None
        self._begun: threading.Thread | None = None
        self._measuring: tuple[subprocess.Popen[bytes], Path] | None = None
        self._folder: TemporaryDirectory[str] | None = None
        self._closing = threading.Lock()
        self._is_closed = False

    def prepare(self, room_bytes: int) -> None:
        """Do nothing: another process measures."""

    def now(self, profile: Profile) -> Costs:
        """Return what was measured, or the estimate as long as that is going on."""
        if self._costs is None:
            if self._begun is None:
                self._begun = threading.Thread(target=self._begin, args=(profile,), name="pooch-measuring", daemon=True)
                self._begun.start()
            if self._gather is None:
                self._begun.join()
            if self._measuring is not None and self._measuring[0].poll() == 0:
                done = Profile.load(self._measuring[1])
                self._costs = Costs(done.link, done.hooks)
        return self._costs or Costs(self._estimate(), profile.hooks)

    def _begin(self, profile: Profile) -> None:
        if self._gather is not None:
            self._gather()
        with self._closing:
            if not self._is_closed:
                self._measuring = self._started(profile)

    def _started(self, profile: Profile) -> tuple[subprocess.Popen[bytes], Path]:
        self._folder = TemporaryDirectory(prefix="pooch-")
        path = Path(self._folder.name) / "measured.json"
        profile.save(path)
        command = child_command(f"{__package__}.measuring_process", str(path))
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(command, stdin=pipe, stdout=quiet, stderr=quiet), path

    def close(self) -> None:
        """End the process that measures, if it is still running."""
        with self._closing:
            self._is_closed = True
        if self._begun is not None and self._gather is None:
            self._begun.join()  # it only starts the process
        if self._measuring is not None:
            child = self._measuring[0]
            child.kill()
            child.communicate()
        if self._folder is not None:
            self._folder.cleanup()


def costs_of(device: torch.device, estimate: Callable[[], Link], gather: Gather | None = None) -> CostSource:
    """Return where the costs of a device come from.

    Args:
        device: The device.
        estimate: Returns the cost of copies as seen in training.
        gather: Waits a little for other ranks of the machine, or None.
    """
    return DeviceCosts(device, estimate, gather) if has_streams(device) else HostCosts(estimate, gather)
