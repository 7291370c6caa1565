"""Where swapped bytes go: whether it takes them, gives them back, and how fast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from ...executor.engines import make_engine
from ...executor.engines.measurement import both_ways_bytes_per_ms, measure_link, noise
from ...executor.engines.pinned import PinnedBlock
from ...executor.engines.trying import try_copies
from ...ground.errors import TierError
from ...ground.units import format_bytes
from ...ir import Link
from ...torchtools.accelerators import has_streams, shares_memory
from ...torchtools.device_memory import free_bytes
from ...torchtools.spill_directory import SpillDirectory
from .finding import Figure, Finding, Patient

ROOM_BYTES = 512 * 2**20  # that a tier should have at the least
_COPY_BYTES = 64 * 2**20
_LOCKED_BYTES = 256 * 2**20
_IN_MEMORY = ("tmpfs", "ramfs")
# A third of what the slowest links that are as they should be give: PCIe 3.0 with four lanes, and a disk that spins.
SLOW_BYTES_PER_S = {"locked": 1e9, "file": 30e6}


def try_directory(patient: Patient) -> Iterator[Finding]:
    """Whether the spill directory takes a file of some size. A machine with a GPU needs none."""
    directory = SpillDirectory.of()
    with closing(make_engine(patient.device)) as engine:
        try:
            arena = engine.open_arena(ROOM_BYTES)
        except TierError as error:
            yield Finding("spill directory", "failed", str(error))
            return
        try:
            value = noise(2**20, torch.device("cpu")).untyped_storage()  # zeros would not be written
            ticket = arena.copy_out(value, ROOM_BYTES - 2**20)
            ticket.wait()
            if ticket.error is not None:
                yield Finding("spill directory", "failed", str(engine.health.explain(ticket.error)))
                return
        finally:
            arena.close()
    system, free_on_disk = _file_system(directory.path), psutil.disk_usage(str(directory.path)).free
    figures: dict[str, Figure] = {"directory": str(directory.path), "file system": system, "bytes free": free_on_disk}
    if system in _IN_MEMORY:
        text = (
            f"{directory.name} is a {system}, which lies in memory: swapping to it frees nothing; {directory.another}"
        )
        yield Finding("spill directory", "told", text, figures)
        return
    free = format_bytes(free_on_disk)
    yield Finding("spill directory", "passed", f"{directory.name} takes files; {free} are free there", figures)


def _file_system(path: Path) -> str:
    """The kind of file system that a directory is on, "" if that is not known."""
    parts = [each for each in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(each.mountpoint)]
    return max(parts, key=lambda each: len(each.mountpoint)).fstype if parts else ""


def try_locking(patient: Patient) -> Iterator[Finding]:
    """Whether memory can be page-locked, and how long that takes."""
    size_bytes = min(_LOCKED_BYTES, free_bytes(torch.device("cpu")) // 4)
    begin_s = time.perf_counter()
    try:
        block = PinnedBlock(size_bytes, patient.device)
    except TierError as error:
        text = f"{error}; look at `ulimit -l`, and at limits of the container or the virtual machine"
        yield Finding("page-locked memory", "failed", text)
        return
    took_s = time.perf_counter() - begin_s
    block.unlock()
    figures: dict[str, Figure] = {"locked bytes": size_bytes, "locking, bytes/s": size_bytes / max(took_s, 1e-9)}
    text = f"{format_bytes(size_bytes)} were page-locked in {took_s * 1000:.0f} ms"
    if shares_memory(patient.device):
        text += "; the device shares the host's memory, so swapping to it frees nothing: let plans recompute"
        yield Finding("page-locked memory", "told", text, figures)
        return
    yield Finding("page-locked memory", "passed", text, figures)


def try_copying(patient: Patient) -> Iterator[Finding]:
    """Whether bytes come back as they left, and whether compute waits for copies."""
    patient.progress("copying to the swap tier and back")
    with closing(make_engine(patient.device)) as engine:
        try:
            outcome = try_copies(engine, patient.device, _COPY_BYTES)
        except TierError as error:
            yield Finding("copied bytes", "failed", str(error))
            return
        tier = engine.description
    if outcome == "other bytes":
        yield Finding("copied bytes", "failed", f"{tier} gave back other bytes than it was given: check the hardware")
        return
    yield Finding("copied bytes", "passed", "what was copied out came back with the same bytes")
    if outcome == "not awaited":
        yield Finding("order of copies", "failed", "compute does not wait for copies: please report it")
    else:
        yield Finding("order of copies", "passed", "compute waits for copies")


def measure_rates(patient: Patient) -> Iterator[Finding]:
    """How fast copies are: each way, both ways at once, and what they take from compute beside them."""
    patient.progress("measuring copies")
    least = SLOW_BYTES_PER_S["locked" if has_streams(patient.device) else "file"]
    with closing(make_engine(patient.device)) as engine:
        try:
            link = measure_link(engine, patient.device, shares=True)
            if _slowest(link) < least:  # something else may have been busy
                link = _faster(link, measure_link(engine, patient.device))
            both = both_ways_bytes_per_ms(engine, patient.device)
        except TierError as error:
            yield Finding("link", "failed", str(error))
            return
    patient.link = link
    out, back, together = (1000 * each for each in (link.out_bytes_per_ms, link.in_bytes_per_ms, both))
    figures: dict[str, Figure] = {
        "out, bytes/s": out,
        "in, bytes/s": back,
        "both ways at once, bytes/s": together,
        "latency out, ms": link.out_latency_ms,
        "latency in, ms": link.in_latency_ms,
        "compute displaced by copies out": link.out_compute_share,
        "compute displaced by copies in": link.in_compute_share,
    }
    text = f"{_rate(out)} out, {_rate(back)} in, {_rate(together)} both ways at once"
    if has_streams(patient.device):
        unlocked = _through_ordinary_memory(patient)
        figures["out through ordinary memory, bytes/s"] = 1000 * unlocked.out_bytes_per_ms
        figures["in through ordinary memory, bytes/s"] = 1000 * unlocked.in_bytes_per_ms
    if _slowest(link) < least:
        yield Finding("link", "failed", f"{text}: less than {_rate(least)} each way; {_remedy(patient)}", figures)
    else:
        yield Finding("link", "passed", text, figures)


def _through_ordinary_memory(patient: Patient) -> Link:
    """The link as it is where memory cannot be page-locked."""
    from ...executor.engines.streams import StreamEngine

    with closing(StreamEngine(patient.device, "never")) as engine:
        return measure_link(engine, patient.device)


def _slowest(link: Link) -> float:
    """The lower of both rates in bytes per second."""
    return 1000 * min(link.out_bytes_per_ms, link.in_bytes_per_ms)


def _faster(link: Link, again: Link) -> Link:
    """A link with the higher rate of two measurements each way."""
    return replace(
        link,
        out_bytes_per_ms=max(link.out_bytes_per_ms, again.out_bytes_per_ms),
        in_bytes_per_ms=max(link.in_bytes_per_ms, again.in_bytes_per_ms),
    )


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(int(bytes_per_s))}/s"


def _remedy(patient: Patient) -> str:
    if has_streams(patient.device):
        return "look at the slot of the card, and at what else copies"
    return SpillDirectory.of().another
