"""Measures the link between the device and the swap tier with the engine that performs the copies."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from ...ground.errors import TierError
from ...ground.process_limits import is_limited
from ...ir import Link
from ...machine.values import Ticket
from ...torchtools.accelerators import has_streams, synchronize
from ...torchtools.device_memory import free_bytes, give_memory_back
from ...torchtools.out_of_memory import forgotten, is_out_of_memory
from .protocol import Arena, CopyEngine

SMALL_BYTES = 4096
# Large enough for the latency not to matter, and above 32 MiB, where the C library uses fresh pages for every copy in.
LARGE_BYTES = 64 * 2**20
_LIMITED_BYTES = 16 * 2**20  # under a memory limit, where all large blocks use fresh pages
_LEAST_BYTES = 4 * 2**20
_STORAGES = 3  # of that size, alive at the same time
REPEATS = 3
_MASK_BYTES = 2**20  # of truth values that are drawn, and repeated
_LEAST_SIDE = 256  # of a matrix
_ENOUGH_BYTES = 64 * 2**20  # copied beside a step for the rate to be taken from there
_MOST_SHARE = 2.0  # a copy thread takes at most its own core, and makes the others wait for it


def _copy_sizes(room_bytes: int) -> list[int]:
    """Return the sizes of copies that fit into the device memory left, best first; empty if none is meaningful."""
    largest = min(LARGE_BYTES, _LIMITED_BYTES) if is_limited() else LARGE_BYTES
    sizes = [largest, *(size for size in (largest // 4, largest // 16) if size >= _LEAST_BYTES)]
    return [size for size in sizes if _STORAGES * size <= room_bytes]


@dataclass(frozen=True, slots=True)
class _Direction:
    """Cost of copies in one direction. `processor_share` is the fraction of all cores that a copy keeps busy."""

    latency_ms: float
    bytes_per_ms: float
    processor_share: float


def measure_link(
    engine: CopyEngine, device: torch.device, *, shares: bool = False, room_bytes: int | None = None
) -> Link:
    """Measure latency and rate of copies in each direction, and whether both directions at once are as fast.

    This takes some tenths of a second, and 192 MiB: 48 MiB if the process is limited, or less if the device has little
    left.

    Args:
        engine: The engine whose copies are measured.
        device: The device of the storages.
        shares: Whether to measure how much copying slows down matrix products as well, which takes about a second.
            `with_step_shares` measures this on the step itself.
        room_bytes: Device memory that the measurement may take. None: half of what the device has left.

    Raises:
        TierError: If the tier cannot be used.
    """
    left_bytes = free_bytes(device) // 2
    room_bytes = left_bytes if room_bytes is None else min(room_bytes, left_bytes)
    large_bytes, room = _room_for_copies(engine, _copy_sizes(room_bytes) or [_LEAST_BYTES])
    with closing(room) as arena:
        storages = [noise(large_bytes, device).untyped_storage() for _ in range(2)]
        small = noise(SMALL_BYTES, device).untyped_storage()

        def fill_fresh(like: torch.UntypedStorage, offset_bytes: int) -> Ticket:
            """Copy into new memory as for a swapped value, whose pages the copy is the first to touch."""
            return arena.copy_in(torch.UntypedStorage(like.nbytes(), device=device), offset_bytes)

        out = _direction(arena.copy_out, storages[0], small, engine, device)
        back = _direction(fill_fresh, storages[0], small, engine, device)
        masks = _masks(large_bytes // 4, device).untyped_storage()
        packed_out = _packed_rate(arena.copy_out, masks, out, engine, device)
        packed_in = _packed_rate(fill_fresh, masks, back, engine, device)
        link = Link(
            tier=engine.description,
            out_latency_ms=out.latency_ms,
            in_latency_ms=back.latency_ms,
            out_bytes_per_ms=out.bytes_per_ms,
            in_bytes_per_ms=back.bytes_per_ms,
            full_duplex=engine.has_two_lanes and _is_full_duplex(arena, storages, out, back, device),
            out_compute_share=out.processor_share,
            in_compute_share=back.processor_share,
            packed_out_bytes_per_ms=packed_out,
            packed_in_bytes_per_ms=packed_in,
        )
        if not shares:
            return link
        product_bytes = room_bytes - sum(storage.nbytes() for storage in (*storages, small))
        copies = ((lambda: arena.copy_out(storages[0], 0), out), (lambda: arena.copy_in(storages[0], 0), back))
        out_share, in_share = (_compute_share(copy, large_bytes, way, device, product_bytes) for copy, way in copies)
        return replace(link, out_compute_share=out_share, in_compute_share=in_share)


def _room_for_copies(engine: CopyEngine, sizes: list[int]) -> tuple[int, Arena]:
    """Take room for four copies of the largest size that the tier has room for."""
    for size_bytes in sizes[:-1]:
        try:
            return size_bytes, engine.open_arena(4 * size_bytes)
        except TierError:  # a small disk can be measured as well
            continue
    return sizes[-1], engine.open_arena(4 * sizes[-1])


def _complete(ticket: Ticket, engine: CopyEngine) -> None:
    """Wait for a copy, whose time means nothing if it failed.

    Raises:
        TierError: If it failed.
    """
    ticket.wait()
    if ticket.error is not None:
        raise engine.health.explain(ticket.error)


class TimesStep(Protocol):
    """Runs one plain step."""

    def __call__(self, between: Callable[[], None]) -> tuple[float, float]:
        """Call `between` after the forward pass, and return the ms of the forward and of the backward pass."""


def with_step_shares(
    link: Link,
    engine: CopyEngine,
    device: torch.device,
    alone: Sequence[tuple[float, float]],
    time_step: TimesStep,
    spare_bytes: int,
) -> Link | None:
    """Measure the link beside plain steps, with copies out beside the forward pass and copies in beside the backward
    pass, which is where plans place them.

    How much a copy slows compute down depends on the operators: those bound by memory, or split over all cores with a
    barrier at the end, suffer more than the matrix products that `measure_link` uses.

    Args:
        link: The link as measured without a step. Its shares, the cores that copies keep busy, are lower bounds, since
            times of single steps scatter.
        engine: The engine whose copies run beside the step.
        device: The device of the storages.
        alone: Times (forward, backward) of plain steps without copies, in ms.
        time_step: Runs one plain step. It is called once for each step in `alone`, and the fastest passes count.
        spare_bytes: Device memory that a plain step leaves, which bounds the copies. If memory still runs out, they are
            made smaller.

    Returns:
        The link with shares and rates of the step, or None if the step leaves no room for meaningful copies.
    """
    for copy_bytes in _copy_sizes(spare_bytes):
        try:
            return _with_shares_beside(link, engine, device, alone, time_step, copy_bytes)
        except TierError:  # the next size is smaller; what the tier cannot do at all, `measure_link` has told
            continue
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            forgotten(error)
        give_memory_back(device)
    return None


def _with_shares_beside(
    link: Link,
    engine: CopyEngine,
    device: torch.device,
    alone: Sequence[tuple[float, float]],
    time_step: TimesStep,
    large_bytes: int,
) -> Link:
    with closing(engine.open_arena(2 * large_bytes)) as arena:
        source = noise(large_bytes, device).untyped_storage()
        _complete(arena.copy_out(source, large_bytes), engine)

        def copy_out() -> Ticket:
            return arena.copy_out(source, 0)

        def copy_in() -> Ticket:
            return arena.copy_in(torch.UntypedStorage(large_bytes, device=device), large_bytes)

        beside = [_step_beside(engine, copy_out, copy_in, time_step) for _ in alone]
    out = min((forward for forward, _ in beside), key=lambda each: each.pass_ms)
    back = min((backward for _, backward in beside), key=lambda each: each.pass_ms)
    out_rate, in_rate = out.rate(large_bytes, link.out_bytes_per_ms), back.rate(large_bytes, link.in_bytes_per_ms)
    return replace(
        link,
        out_compute_share=max(link.out_compute_share, out.share(min(forward_ms for forward_ms, _ in alone))),
        in_compute_share=max(link.in_compute_share, back.share(min(backward_ms for _, backward_ms in alone))),
        out_bytes_per_ms=out_rate,
        in_bytes_per_ms=in_rate,
        # What slows copies down beside a step slows packing down as well, which was measured without one.
        packed_out_bytes_per_ms=link.packed_out_bytes_per_ms * min(1.0, out_rate / link.out_bytes_per_ms),
        packed_in_bytes_per_ms=link.packed_in_bytes_per_ms * min(1.0, in_rate / link.in_bytes_per_ms),
    )


@dataclass
class _PassBeside:
    """A pass with copies beside it: its duration, and that of each copy that completed, in ms."""

    pass_ms: float = 0.0
    copies_ms: list[float] = field(default_factory=list)

    def share(self, alone_ms: float) -> float:
        """Return how many ms of compute one ms of copying displaces."""
        busy_ms = min(self.pass_ms, sum(self.copies_ms))
        displaced_ms = max(0.0, self.pass_ms - alone_ms)
        return min(_MOST_SHARE, displaced_ms / busy_ms) if busy_ms > 0 else 0.0

    def rate(self, copy_bytes: int, otherwise: float) -> float:
        """Return the rate of the copies in bytes per ms, or `otherwise` if too little was copied."""
        if copy_bytes * len(self.copies_ms) < _ENOUGH_BYTES:
            return otherwise
        return copy_bytes / statistics.median(self.copies_ms)


def _step_beside(
    engine: CopyEngine, copy_out: Callable[[], Ticket], copy_in: Callable[[], Ticket], time_step: TimesStep
) -> tuple[_PassBeside, _PassBeside]:
    """Run one step beside a thread that copies without pause."""
    forward, backward = _PassBeside(), _PassBeside()
    turned, ended = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def keep_copying() -> None:
        try:
            with engine.aside() as completed:
                while not ended.is_set():
                    is_backward = turned.is_set()
                    start_s = time.perf_counter()
                    _complete((copy_in if is_backward else copy_out)(), engine)
                    completed()
                    (backward if is_backward else forward).copies_ms.append((time.perf_counter() - start_s) * 1000)
        except Exception as error:  # noqa: BLE001  (raised in the thread that waits)
            failed.append(error)

    copier = threading.Thread(target=keep_copying, name="pooch-measure")
    copier.start()
    try:
        forward.pass_ms, backward.pass_ms = time_step(turned.set)
    finally:
        ended.set()
        copier.join()
    if failed:
        raise failed[0]
    return forward, backward


def noise(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Return random float32 numbers, independent of the user's generator and default dtype."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(size_bytes // 4, generator=generator, dtype=torch.float32, device=device)


def _masks(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Return truth values, which are random in each MiB."""
    drawn_bytes = min(size_bytes, _MASK_BYTES)
    return noise(4 * drawn_bytes, device).less(0.5).repeat(size_bytes // drawn_bytes)


def _packed_rate(
    copy: Callable[[torch.UntypedStorage, int], Ticket],
    masks: torch.UntypedStorage,
    plain: _Direction,
    engine: CopyEngine,
    device: torch.device,
) -> float:
    """Return the bytes of masks that are copied per ms, or 0 where copies move all of them."""
    tickets = []

    def once() -> None:
        tickets.append(copy(masks, 0))
        _complete(tickets[-1], engine)

    once()
    if tickets[0].moved_bytes == masks.nbytes():
        return 0.0
    durations_ms = [_timed_ms(once, device) for _ in range(REPEATS)]
    return masks.nbytes() / max(statistics.median(durations_ms) - plain.latency_ms, 1e-6)


def _timed_ms(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return (time.perf_counter() - start) * 1000


def _direction(
    copy: Callable[[torch.UntypedStorage, int], Ticket],
    large: torch.UntypedStorage,
    small: torch.UntypedStorage,
    engine: CopyEngine,
    device: torch.device,
) -> _Direction:
    def once(storage: torch.UntypedStorage, offset_bytes: int) -> float:
        return _timed_ms(lambda: _complete(copy(storage, offset_bytes), engine), device)

    once(small, 3 * large.nbytes())
    latency = statistics.median(once(small, 3 * large.nbytes()) for _ in range(REPEATS))
    once(large, 0)
    begin_s = time.process_time()
    durations_ms = [once(large, 0) for _ in range(REPEATS)]
    busy_ms = (time.process_time() - begin_s) * 1000
    share = busy_ms / sum(durations_ms) / torch.get_num_threads() if not has_streams(device) else 0.0
    rate = large.nbytes() / max(statistics.median(durations_ms) - latency, 1e-6)
    return _Direction(latency, rate, min(share, 1.0))


def _is_full_duplex(
    arena: Arena, storages: list[torch.UntypedStorage], out: _Direction, back: _Direction, device: torch.device
) -> bool:
    """Whether both directions at once take clearly less time than one after the other."""
    alone = storages[0].nbytes() * (1 / out.bytes_per_ms + 1 / back.bytes_per_ms)
    return _together_ms(arena, storages, device) < 0.75 * alone


def _together_ms(arena: Arena, storages: list[torch.UntypedStorage], device: torch.device) -> float:
    """Time of a copy out and a copy in that begin together."""

    def both() -> None:
        tickets = [arena.copy_out(storages[1], 2 * storages[1].nbytes()), arena.copy_in(storages[0], 0)]
        for ticket in tickets:
            ticket.wait()

    both()
    return statistics.median(_timed_ms(both, device) for _ in range(REPEATS))


def both_ways_bytes_per_ms(engine: CopyEngine, device: torch.device) -> float:
    """Measure how many bytes are copied per ms, in both directions together, while a copy runs in each.

    Args:
        engine: The engine whose copies are measured.
        device: The device of the storages.

    Raises:
        TierError: If the tier cannot be used.
    """
    large_bytes, room = _room_for_copies(engine, _copy_sizes(free_bytes(device) // 2) or [_LEAST_BYTES])
    with closing(room) as arena:
        storages = [noise(large_bytes, device).untyped_storage() for _ in range(2)]
        _complete(arena.copy_out(storages[0], 0), engine)
        return 2 * large_bytes / max(_together_ms(arena, storages, device), 1e-6)


def _compute_share(
    copy: Callable[[], object], copy_bytes: int, direction: _Direction, device: torch.device, room_bytes: int
) -> float:
    """Measure how many ms of matrix products one ms of copying displaces."""
    size = 4096 if has_streams(device) else 1024
    while size > _LEAST_SIDE and 3 * 4 * size * size > room_bytes:
        size //= 2
    left, right = (noise(4 * size * size, device).view(size, size) for _ in range(2))
    copy_ms = copy_bytes / direction.bytes_per_ms

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
