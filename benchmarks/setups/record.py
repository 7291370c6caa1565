"""What a training leaves behind: losses, metrics, parameters and checkpoints to the bit; times and peaks of steps."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.setups.counting import LiveBytes


@dataclass(frozen=True, slots=True)
class Step:
    """One step, from the end of the one before (evaluation in between included) to its own.

    Attributes:
        ms: by the clock.
        peak_bytes: highest live bytes meanwhile. live_bytes: at its end.
    """

    ms: float
    peak_bytes: int
    live_bytes: int


@dataclass
class Record:
    """Written to by a setup while it trains.

    Attributes:
        values: name -> floats as hexadecimal text, and digests: all that has to be equal bitwise.
        pause: called between steps, with the number of those that ended; its time belongs to no step.
    """

    counter: LiveBytes
    values: dict[str, list[str]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    pause: Callable[[int], None] | None = None
    _since_s: float = 0.0

    def begin(self) -> None:
        """Training starts: model and optimizer exist."""
        if not self.steps:
            self.counter.begin_peak()
        self._since_s = time.perf_counter()

    def value(self, name: str, value: Tensor | float) -> None:
        """A number that has to be the same: a loss that is only looked at, a metric."""
        number = value.detach().float().item() if isinstance(value, Tensor) else float(value)
        self.values.setdefault(name, []).append(number.hex())

    def step(self, *losses: Tensor | float) -> None:
        """A step ended, the optimizer's part included.

        Args:
            losses: any number of them.
        """
        for loss in losses:
            self.value("loss", loss)
        now = time.perf_counter()
        self.steps.append(Step((now - self._since_s) * 1000, self.counter.peak_bytes, self.counter.live_bytes))
        self.counter.begin_peak()
        if self.pause is not None:
            self.pause(len(self.steps))
        self._since_s = time.perf_counter()

    def state(self, name: str, state: nn.Module | Mapping[str, Any]) -> None:
        """Parameters and buffers, or what a checkpoint holds, as a digest."""
        entries = state.state_dict() if isinstance(state, nn.Module) else state
        digest = hashlib.sha256()
        _feed(digest, entries)
        self.values.setdefault(name, []).append(digest.hexdigest())

    def finish(self) -> dict[str, Any]:
        """All of it as plain data. The random state at the end belongs to what has to be equal."""
        self.state("random state", {"cpu": torch.get_rng_state()})
        return {"values": self.values, "steps": [asdict(step) for step in self.steps]}


def _feed(digest: Any, value: Any) -> None:
    """Feeds nested state into a digest, tensors as their bytes."""
    if isinstance(value, Mapping):
        for key in value:
            digest.update(repr(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _feed(digest, entry)
    elif isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(repr(value).encode())
