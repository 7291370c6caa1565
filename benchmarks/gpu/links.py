"""Rates of the link between the device and its tier: what a profile records, and copies by size."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict

import torch

from benchmarks.gpu.job import Job, Verdict
from benchmarks.gpu.repeatable import on_device
from pooch.executor.engines import make_engine
from pooch.executor.engines.measurement import measure_link
from pooch.executor.engines.protocol import CopyEngine
from pooch.torchtools.accelerators import synchronize

SIZES = (2**12, 2**16, 2**20, 2**24, 2**28)
SMALL_SIZES = (2**12, 2**20)
REPEATS = 7


def run(job: Job) -> Verdict:
    """Measure; the part has no way to fail but by an error."""
    device = on_device(job.device)
    engine = make_engine(device)
    try:
        link = asdict(measure_link(engine, device))
        job.add("links", {name: f"{v:.4g}" if isinstance(v, float) else v for name, v in link.items()})
        sizes = SMALL_SIZES if job.small else SIZES
        start = time.perf_counter()
        engine.open_arena(2 * sizes[-1]).close()
        took_s = time.perf_counter() - start
        job.add("notes", f"taking {2 * sizes[-1] / 2**20:.0f} MiB of {engine.description} took {took_s * 1000:.0f} ms")
        for size_bytes in sizes:
            job.add("sizes", _row(engine, size_bytes, device))
    finally:
        engine.close()
    return Verdict("passed")


def _row(engine: CopyEngine, size_bytes: int, device: torch.device) -> dict[str, object]:
    """One size, each way, and beside it what PyTorch does from ordinary memory."""
    arena = engine.open_arena(size_bytes)
    on_the_device = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    storage = on_the_device.untyped_storage()
    ordinary = torch.ones(size_bytes, dtype=torch.uint8)
    try:
        out_ms = _median_ms(lambda: arena.copy_out(storage, 0).wait(), device)
        in_ms = _median_ms(lambda: arena.copy_in(storage, 0).wait(), device)
    finally:
        arena.close()
    plain_ms = _median_ms(lambda: on_the_device.copy_(ordinary), device)
    return {
        "bytes": size_bytes,
        "out": _told(size_bytes, out_ms),
        "in": _told(size_bytes, in_ms),
        "in, from ordinary memory": _told(size_bytes, plain_ms),
    }


def _median_ms(copy: object, device: torch.device) -> float:
    assert callable(copy)
    samples = []
    for _ in range(REPEATS + 1):
        synchronize(device)
        start = time.perf_counter()
        copy()
        synchronize(device)
        samples.append((time.perf_counter() - start) * 1000)
    return statistics.median(samples[1:])


def _told(size_bytes: int, milliseconds: float) -> str:
    return f"{milliseconds:.3f} ms, {size_bytes / 2**30 / max(milliseconds, 1e-6) * 1000:.2f} GiB/s"
