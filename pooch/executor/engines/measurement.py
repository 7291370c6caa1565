"""Measuring the link between the device and the swap tier, with the engine that will do the copies."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from pooch.executor.engines.protocol import Arena, CopyEngine, Ticket
from pooch.ir import Link
from pooch.torchtools.training_state import synchronize

SMALL_BYTES = 4096
LARGE_BYTES = 64 * 2**20
REPEATS = 5
STEP_TURNS = 2


@dataclass(frozen=True, slots=True)
class _Direction:
    latency_ms: float
    bytes_per_ms: float


def measure_link(engine: CopyEngine, device: torch.device) -> Link:
    """Latency and rate of copies each way, both ways at once, and how much copying slows compute down.

    Args:
        engine: whose copies are measured.
        device: where the storages live. Takes about three seconds and 256 MiB of the tier.
    """
    arena = engine.open_arena(4 * LARGE_BYTES)
    try:
        storages = [_noise(LARGE_BYTES, device).untyped_storage() for _ in range(2)]
        small = _noise(SMALL_BYTES, device).untyped_storage()

        def fill_fresh(like: torch.UntypedStorage, offset_bytes: int) -> Ticket:
            """Into new memory, as a swapped value comes back: its pages are first touched by the copy."""
            return arena.copy_in(torch.UntypedStorage(like.nbytes(), device=device), offset_bytes)

        out = _direction(arena.copy_out, storages[0], small, device)
        back = _direction(fill_fresh, storages[0], small, device)
        duplex = _is_full_duplex(arena, storages, out, back, device)
        return Link(
            tier=engine.description,
            out_latency_ms=out.latency_ms,
            in_latency_ms=back.latency_ms,
            out_bytes_per_ms=out.bytes_per_ms,
            in_bytes_per_ms=back.bytes_per_ms,
            full_duplex=duplex,
            out_compute_share=_compute_share(lambda: arena.copy_out(storages[0], 0), out, device),
            in_compute_share=_compute_share(lambda: arena.copy_in(storages[0], 0), back, device),
        )
    finally:
        arena.close()


def with_step_shares(link: Link, engine: CopyEngine, device: torch.device, time_step: Callable[[], float]) -> Link:
    """The link with its compute shares measured on the step itself: plain steps with copies running all the while.

    How much a copy slows compute down depends on what computes: operators bound by memory, or split over all cores
    with a barrier at the end, suffer more than the matrix products that `measure_link` has to do with.

    Args:
        time_step: runs one plain step and returns its ms. It is called six times: alone, beside copies out and beside
            copies in, in turns, so that all three see the same machine; the fastest of each counts.
    """
    arena = engine.open_arena(2 * LARGE_BYTES)
    try:
        source = _noise(LARGE_BYTES, device).untyped_storage()
        arena.copy_out(source, LARGE_BYTES).wait()

        def copy_out() -> Ticket:
            return arena.copy_out(source, 0)

        def copy_in() -> Ticket:
            return arena.copy_in(torch.UntypedStorage(LARGE_BYTES, device=device), LARGE_BYTES)

        turns = [
            (time_step(), _step_beside(engine, copy_out, time_step), _step_beside(engine, copy_in, time_step))
            for _ in range(STEP_TURNS)
        ]
    finally:
        arena.close()
    alone_ms = min(alone for alone, _, _ in turns)
    out = min((beside for _, beside, _ in turns), key=_step_ms_of)
    back = min((beside for _, _, beside in turns), key=_step_ms_of)
    return replace(link, out_compute_share=out.share(alone_ms), in_compute_share=back.share(alone_ms))


@dataclass(frozen=True, slots=True)
class _StepBeside:
    """A step with copies beside it: how long it took, and for how much of that a copy was under way, in ms."""

    step_ms: float
    busy_ms: float

    def share(self, alone_ms: float) -> float:
        """Work that one ms of copying displaces."""
        return max(0.0, self.step_ms - alone_ms) / max(min(self.step_ms, self.busy_ms), 1e-6)


def _step_ms_of(beside: _StepBeside) -> float:
    return beside.step_ms


def _step_beside(engine: CopyEngine, copy: Callable[[], Ticket], time_step: Callable[[], float]) -> _StepBeside:
    """One step, beside a thread that starts a copy whenever the last one is done."""
    ended = threading.Event()
    busy_ms: list[float] = []

    def keep_copying() -> None:
        with engine.aside() as completed:
            while not ended.is_set():
                start = time.perf_counter()
                copy().wait()
                completed()
                busy_ms.append((time.perf_counter() - start) * 1000)

    copier = threading.Thread(target=keep_copying, name="pooch-measure")
    copier.start()
    try:
        step_ms = time_step()
    finally:
        ended.set()
        copier.join()
    return _StepBeside(step_ms, sum(busy_ms))


def _noise(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Random float32 numbers; the user's generator and default dtype are left out of it."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(size_bytes // 4, generator=generator, dtype=torch.float32, device=device)


def _timed_ms(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return (time.perf_counter() - start) * 1000


def _direction(
    copy: Callable[[torch.UntypedStorage, int], object],
    large: torch.UntypedStorage,
    small: torch.UntypedStorage,
    device: torch.device,
) -> _Direction:
    def once(storage: torch.UntypedStorage, offset_bytes: int) -> float:
        return _timed_ms(lambda: copy(storage, offset_bytes).wait(), device)  # type: ignore[attr-defined]

    once(small, 3 * LARGE_BYTES)
    latency = statistics.median(once(small, 3 * LARGE_BYTES) for _ in range(REPEATS))
    once(large, 0)
    duration = statistics.median(once(large, 0) for _ in range(REPEATS))
    return _Direction(latency, LARGE_BYTES / max(duration - latency, 1e-6))


def _is_full_duplex(
    arena: Arena, storages: list[torch.UntypedStorage], out: _Direction, back: _Direction, device: torch.device
) -> bool:
    """Whether both directions at once take clearly less than one after the other."""

    def both() -> None:
        tickets = [arena.copy_out(storages[1], 2 * LARGE_BYTES), arena.copy_in(storages[0], 0)]
        for ticket in tickets:
            ticket.wait()

    both()
    together = statistics.median(_timed_ms(both, device) for _ in range(REPEATS))
    alone = LARGE_BYTES / out.bytes_per_ms + LARGE_BYTES / back.bytes_per_ms
    return together < 0.75 * alone


def _compute_share(copy: Callable[[], object], direction: _Direction, device: torch.device) -> float:
    """Compute work that one ms of copying displaces: the same products with and without copies beside them."""
    size = 4096 if device.type == "cuda" else 1024
    left, right = (_noise(4 * size * size, device).view(size, size) for _ in range(2))
    copy_ms = LARGE_BYTES / direction.bytes_per_ms

    def product_ms() -> float:
        return _timed_ms(lambda: left @ right, device)

    product_ms()
    alone_ms = statistics.median(product_ms() for _ in range(REPEATS))
    products = max(1, round(2 * copy_ms / alone_ms))

    def compute(with_copy: bool) -> float:
        def run() -> None:
            ticket = copy() if with_copy else None
            for _ in range(products):
                left @ right
            if ticket is not None:
                ticket.wait()  # type: ignore[attr-defined]

        return _timed_ms(run, device)

    pairs = [(compute(True), compute(False)) for _ in range(REPEATS)]
    displaced = statistics.median(max(0.0, beside - alone) for beside, alone in pairs)
    return displaced / copy_ms
