"""The CUDA engine's ordering rules, on a recorded fake of streams and events that knows who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pooch.executor.engines import cuda as cuda_module
from pooch.executor.engines.cuda import CudaEngine


class Event:
    """Remembers everything that its stream had been given, and had waited for, when it was recorded."""

    def __init__(self) -> None:
        self.done: frozenset[str] = frozenset()

    def record(self, stream: Stream) -> None:
        self.done = stream.done


class Stream:
    """A row of named jobs; `done`: what is certain to be complete before the next job starts."""

    def __init__(self, device: Any = None) -> None:
        self.done: frozenset[str] = frozenset()

    def wait_event(self, event: Event) -> None:
        self.done |= event.done

    def run(self, job: str) -> frozenset[str]:
        """Give it a job; returns what was complete before."""
        before, self.done = self.done, self.done | {job}
        return before


class Machine:
    """The fake device: one compute stream, the streams that the engine makes, and the copies in order."""

    def __init__(self) -> None:
        self.compute = self.current = Stream()
        self.before: dict[str, frozenset[str]] = {}
        self.pinned: list[tuple[str, int]] = []
        self.name = ""

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        self.before[self.name] = stream.run(self.name)
        yield
        self.current = self.compute

    def register(self, pointer: int, size: int, flags: int) -> int:
        self.pinned.append(("lock", size))
        return 0

    def unregister(self, pointer: int) -> int:
        self.pinned.append(("unlock", pointer))
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake = Machine()
    runtime = SimpleNamespace(cudaHostRegister=fake.register, cudaHostUnregister=fake.unregister)
    replaced = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: fake.current,
        "stream": fake.stream,
        "synchronize": lambda device=None: None,
        "cudart": lambda: runtime,
    }
    for name, what in replaced.items():
        monkeypatch.setattr(cuda_module.torch.cuda, name, what)
    return fake


def storage(fill: int, size: int = 64) -> torch.UntypedStorage:
    return torch.full((size,), fill, dtype=torch.uint8).untyped_storage()


def test_copies_keep_the_rules_of_order(machine: Machine) -> None:
    engine = CudaEngine(torch.device("cpu"))
    arena = engine.open_arena(8192)
    machine.compute.run("produce")
    machine.name = "out"
    out = arena.copy_out(storage(1), 0)
    assert "produce" in machine.before["out"]  # no copy starts before its producer
    assert "out" not in machine.compute.done
    out.wait()
    assert "out" in machine.compute.done  # the source may be given out again
    machine.compute.run("reuse")
    machine.name = "in"
    back = storage(0)
    ticket = arena.copy_in(back, 0)
    assert {"out", "reuse"} <= machine.before["in"]  # after its copy out, and after whoever had the room before
    assert "in" not in machine.compute.done
    ticket.wait()
    assert "in" in machine.compute.done
    assert bytes(back) == bytes(storage(1))


def test_a_block_is_not_used_again_before_its_copies_are_done(machine: Machine) -> None:
    engine = CudaEngine(torch.device("cpu"))
    arena = engine.open_arena(8192)
    machine.name = "out"
    arena.copy_out(storage(1), 0)
    machine.name = "in"
    arena.copy_in(storage(0), 0)
    arena.close()  # the backward pass never came: nobody waited for either
    assert {"out", "in"} <= machine.compute.done
    again = engine.open_arena(8192)
    machine.name = "next out"
    again.copy_out(storage(2), 0)
    assert {"out", "in"} <= machine.before["next out"]
    assert [kind for kind, _ in machine.pinned] == ["lock"]


def test_blocks_have_the_planned_size_and_are_unlocked(machine: Machine) -> None:
    engine = CudaEngine(torch.device("cpu"))
    under_way = engine.open_arena(5000)
    engine.open_arena(5000).close()
    assert machine.pinned == [("lock", 5000), ("lock", 5000)]
    engine.close()
    assert [kind for kind, _ in machine.pinned].count("unlock") == 1
    under_way.close()
    assert [kind for kind, _ in machine.pinned].count("unlock") == 2
