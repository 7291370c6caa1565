"""A fake of streams and events that finds races: every stream has a vector clock, and every copy, read and free is
checked against it. Copies themselves are done at once, on CPU tensors, so numbers stay right while order is judged.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pooch.torchtools import accelerators, cuda_only

Clock = dict[str, int]


class Race(AssertionError):
    """Something starts before what it depends on is certain to be complete."""


class Stream:
    """A row of jobs. `clock`: how many jobs of each stream are complete before the next one here starts. `now_ms`: when
    that is, on a device where each job takes its time and the host takes none.
    """

    made = 0
    device_index = 0

    def __init__(self, device: Any = None) -> None:
        Stream.made += 1
        self.stream_id = Stream.made
        self.name = f"stream {Stream.made}"
        self.clock: Clock = {self.name: 0}
        self.now_ms = 0.0

    def work(self, takes_ms: float = 1.0) -> int:
        """Give it a job; returns its number."""
        self.clock[self.name] += 1
        self.now_ms += takes_ms
        return self.clock[self.name]

    @property
    def issued(self) -> int:
        return self.clock[self.name]

    def wait_event(self, event: Event) -> None:
        for name, count in event.clock.items():
            self.clock[name] = max(self.clock.get(name, 0), count)
        self.now_ms = max(self.now_ms, event.time_ms)

    def synchronize(self) -> None:
        """The host waits; nothing to do where jobs are done at once."""


class Event:
    """Remembers what its stream had been given, and had waited for, when it was recorded."""

    is_device_done = True  # what `query` answers
    host_waits = 0

    def __init__(self, device: Any = None, enable_timing: bool = False) -> None:
        self.clock: Clock = {}
        self.time_ms, self._is_timed = 0.0, enable_timing

    def record(self, stream: Stream) -> None:
        self.clock, self.time_ms = dict(stream.clock), stream.now_ms

    def query(self) -> bool:
        return Event.is_device_done

    def synchronize(self) -> None:
        """The host waits."""
        Event.host_waits += 1

    def elapsed_time(self, later: Event) -> float:
        if not (self._is_timed and later._is_timed and self.clock and later.clock):
            raise RuntimeError("both events must be recorded with timing enabled")
        return later.time_ms - self.time_ms


@dataclass
class Copy:
    """One copy, and what it touches."""

    stream: str
    number: int
    outwards: bool
    room: tuple[int, int]
    block: int

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.number


@dataclass
class Machine:
    """One device: the compute streams of the program, the engine's streams, and all copies."""

    compute: Stream = field(default_factory=Stream)
    locked: dict[int, int] = field(default_factory=dict)
    log: list[tuple[str, int]] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    recorded: list[tuple[int, Stream]] = field(default_factory=list)
    refuse_to_lock: int = 0
    copy_ms: float = 5.0
    capturing: bool = False

    def __post_init__(self) -> None:
        self.current = self.compute
        self.programs = [self.compute]
        self.host: Clock = {}  # what the host has waited for
        self._touching: dict[int, list[Copy]] = {}

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def program_on(self, stream: Stream) -> Iterator[None]:
        """The program computes on another stream inside."""
        if stream not in self.programs:
            self.programs.append(stream)
        with self.stream(stream):
            yield

    def register(self, pointer: int, size: int, flags: int) -> int:
        if self.refuse_to_lock:
            return self.refuse_to_lock
        assert pointer % 4096 == 0
        self.locked[pointer] = size
        self.log.append(("lock", size))
        return 0

    def synchronize(self, device: Any = None) -> None:
        """The host waits for all that was issued."""
        Event.host_waits += 1
        for copy in self.copies:
            self.host[copy.stream] = max(self.host.get(copy.stream, 0), copy.number)

    def unregister(self, pointer: int) -> int:
        if pointer in self.locked:  # else it is a block that an earlier test left behind
            if not all(copy.is_before(self.host) for copy in self.copies if copy.block == pointer):
                self.races.append("memory is unlocked before a copy is done with it")
            self.log.append(("unlock", self.locked.pop(pointer)))
        return 0

    def _fail(self, text: str) -> None:
        self.races.append(text)  # finalizers cannot raise
        raise Race(text)

    def note_copy(self, storage: torch.UntypedStorage, offset: int, outwards: bool, block: int) -> None:
        """A copy is issued on the current stream: judge its start, remember it, and watch its storage."""
        clock, stream = self.current.clock, self.current
        for program in self.programs:
            if clock.get(program.name, 0) < program.issued:
                self._fail("a copy starts before what was computed until then")
        room = (offset, offset + storage.nbytes())
        for other in self.copies:
            shares_room = other.block == block and other.room[0] < room[1] and room[0] < other.room[1]
            if shares_room and (outwards or other.outwards) and not other.is_before(clock):
                self._fail("a copy uses room in the tier that another copy is not done with")
        copy = Copy(stream.name, stream.work(self.copy_ms), outwards, room, block)
        self.copies.append(copy)
        if storage._cdata not in self._touching:
            self._touching[storage._cdata] = []
            weakref.finalize(storage, self._freed, storage._cdata).atexit = False
        self._touching[storage._cdata].append(copy)

    def _freed(self, key: int) -> None:
        for copy in self._touching.pop(key):
            if not copy.is_before(self.compute.clock):
                self.races.append("memory is given back before its copy is done")

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        """Memory of a storage goes back to the allocator, though the storage lives on."""
        for copy in self._touching.get(storage._cdata, ()):
            if not copy.is_before(self.compute.clock):
                self._fail("memory is given back before its copy is done")

    def check_read(self, storage: torch.UntypedStorage) -> None:
        """The program reads a storage on the current stream."""
        for copy in self._touching.get(storage._cdata, ()):
            if not copy.outwards and not copy.is_before(self.current.clock):
                self._fail("a value is read before its copy in is done")

    def check_write(self, storage: torch.UntypedStorage) -> None:
        """The program writes into a storage on the current stream."""
        for copy in self._touching.get(storage._cdata, ()):
            if not copy.is_before(self.current.clock):
                self._fail("a value is written over before its copy is done")


def install(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fake in the place of PyTorch's streams, and watch the arenas' copies. Its device is the CPU, which has
    streams then.
    """
    runtime = SimpleNamespace(cudaHostRegister=machine.register, cudaHostUnregister=machine.unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Event, "host_waits", 0)
    monkeypatch.setattr(cuda_only, "locks_in_place", lambda device: True)
    replaced = {
        "current_stream": lambda index=None: machine.current,
        "set_stream": machine.set_stream,
        "device_index": lambda index: nullcontext(),
        "synchronize": machine.synchronize,
    }
    for name, what in replaced.items():
        monkeypatch.setattr(torch.accelerator, name, what)
    monkeypatch.setattr(accelerators, "synchronize", machine.synchronize)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: machine.recorded.append((self.data_ptr(), stream))
    )
    resize = torch.UntypedStorage.resize_

    def resized(self: torch.UntypedStorage, size: int) -> object:
        if self.nbytes():
            machine.note_resize(self)
        return resize(self, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)
    copy = torch.Tensor.copy_

    def watched(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if machine.current not in machine.programs:
            assert non_blocking, "a copy that blocks the host"
            for here, there, outwards in ((source, self, True), (self, source, False)):
                block = next((p for p, n in machine.locked.items() if p <= there.data_ptr() < p + n), None)
                if block is not None:
                    machine.note_copy(here.untyped_storage(), there.data_ptr() - block, outwards, block)
        with torch._C.DisableTorchFunction():  # a default device would send this through here again
            return copy(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", watched)
