"""Profiles from fake tensors beside profiles of runs, for workloads that fit here.

    python -m benchmarks.fake_against_run [--workload NAME ...] [--small] [--turns 3] [--device cpu]
                                          [--modelled V100-PCIe ...]

One row per workload: in-core peak and its error, whether the activations are the same (ids, sizes, labels), the step
and its error, how long each kind of profile takes. Both kinds are made in turns; times are medians, with the middle
half of the turns in brackets. Alone on the machine, or times say nothing. With `--modelled` also the big published
sizes on devices that are not here, with the time that modelling them takes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.samples import told
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.api.profiling import profile_workload
from pooch.devices import find_device
from pooch.ground.units import format_bytes, format_ms
from pooch.ir import Profile
from pooch.workloads import WorkloadFactory

WORKLOADS = ("resnet50", "gpt2", "unet3d", "lstm")
SMALL: dict[str, dict[str, int]] = {
    "resnet50": {"batch_size": 4, "image_size": 128},
    "gpt2": {"batch_size": 1, "layers": 4, "sequence_length": 256},
    "unet3d": {"batch_size": 1, "volume_size": 48},
    "lstm": {"batch_size": 8, "width": 128},
}
PUBLISHED: tuple[tuple[str, dict[str, int]], ...] = (
    ("resnet50", {"batch_size": 128}),
    ("resnet50", {"batch_size": 640}),
    ("unet3d", {"batch_size": 4, "volume_size": 192}),
)


def _factory(name: str, sizes: dict[str, int], device: str | None = None) -> WorkloadFactory:
    settings = {key: value for key, value in sizes.items() if key != "batch_size"}
    return WorkloadFactory(name, batch_size=sizes.get("batch_size"), device=device, settings=settings)


def _timed(make: Callable[[], Profile]) -> tuple[Profile, float]:
    gc.collect()
    start = time.perf_counter()
    profile = make()
    return profile, time.perf_counter() - start


def same_activations(one: Profile, other: Profile) -> bool:
    """Whether a plan for one is a plan for the other: ids, sizes, labels of what is decided on."""
    return _named(one) == _named(other)


def _named(profile: Profile) -> list[tuple[object, ...]]:
    return [(v.id, v.size_bytes, v.allocated_bytes, v.label, v.shape, v.dtype) for v in profile.activations]


def compared(name: str, factory: WorkloadFactory, turns: int) -> dict[str, Any]:
    """Both kinds of profile of one workload, made in turns."""
    taken: dict[str, list[dict[str, float]]] = {"fake": [], "run": []}
    profiles: dict[str, Profile] = {}
    for turn in range(turns):
        for mode in ("fake", "run"):
            tell(f"{name}: {mode}, {turn + 1} of {turns}")
            profiles[mode], seconds = _timed(lambda mode=mode: profile_workload(factory, mode=mode))  # type: ignore[misc]
            taken[mode].append({"seconds": seconds, "step_ms": profiles[mode].step_ms})
    fake, run = profiles["fake"], profiles["run"]
    forward = run.forward_ops
    return {
        "workload": name,
        "batch_size": run.batch_size,
        "fake_peak_bytes": fake.peak_bytes,
        "run_peak_bytes": run.peak_bytes,
        "activations": len(run.activations),
        "same_activations": same_activations(fake, run),
        "same_ops": [op.fingerprint for op in fake.ops[:forward]] == [op.fingerprint for op in run.ops[:forward]],
        **taken,
    }


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table."""
    return [_row(result) for result in results]


def _row(result: Mapping[str, Any]) -> Row:
    fake_ms, run_ms, fake_s, run_s = (
        [turn[what] for turn in result[mode]] for what in ("step_ms", "seconds") for mode in ("fake", "run")
    )
    return {
        "workload": f"{result['workload']}, batch {result['batch_size']}",
        "peak of the run": format_bytes(result["run_peak_bytes"]),
        "fake": f"{result['fake_peak_bytes'] / result['run_peak_bytes'] - 1:+.3%}",
        "activations": result["activations"],
        "the same": "yes" if result["same_activations"] else "NO",
        "forward ops the same": "yes" if result["same_ops"] else "NO",
        "step of the run": told(run_ms, ".1f", unit=" ms"),
        "fake step": f"{statistics.median(fake_ms) / statistics.median(run_ms) - 1:+.1%}",
        "profiled by running in": told(run_s, ".1f", unit=" s"),
        "fake in": told(fake_s, ".1f", unit=" s"),
    }


def modelled(name: str, sizes: dict[str, int], device: str, turns: int) -> dict[str, Any]:
    """A published size on a device that is not here."""
    seconds: list[float] = []
    for _ in range(turns):
        profile, taken_s = _timed(lambda: profile_workload(_factory(name, sizes), device_model=find_device(device)))
        seconds.append(taken_s)
    return {
        "workload": f"{name} {', '.join(f'{key} {value}' for key, value in sizes.items())}",
        "device": device,
        "peak_bytes": profile.peak_bytes,
        "activations": len(profile.activations),
        "step_ms": profile.step_ms,
        "batch_size": profile.batch_size,
        "seconds": seconds,
    }


def modelled_rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table of what is modelled."""
    return [
        {
            "workload": result["workload"],
            "device": f"{result['device']} (modelled)",
            "peak": format_bytes(result["peak_bytes"]),
            "activations": result["activations"],
            "step": format_ms(result["step_ms"]),
            "items/s": f"{1000 * result['batch_size'] / result['step_ms']:.1f}",
            "modelled in": told(result["seconds"], ".1f", unit=" s"),
        }
        for result in results
    ]


def main() -> None:
    """Compare what was asked for; print the tables; write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", help=f"default: {', '.join(WORKLOADS)}")
    parser.add_argument("--small", action="store_true", help="the small sizes alone")
    parser.add_argument("--device", help="where (default: the workload's own)")
    parser.add_argument("--modelled", action="append", default=[], help="devices to model the published sizes on")
    parser.add_argument("--turns", type=int, default=3, help="profiles of each kind")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    turns, output = arguments.turns, arguments.output
    sizes_of = {name: ([SMALL[name]] if arguments.small else [SMALL[name], {}]) for name in WORKLOADS}
    results: list[dict[str, Any]] = []
    for name in arguments.workload or WORKLOADS:
        for sizes in sizes_of[name]:
            results.append(compared(name, _factory(name, sizes, arguments.device), turns))
            tell(str(rows_of(results[-1:])))
    kind = (arguments.device or "cpu").partition(":")[0]
    title = "Profiles from fake tensors beside those of runs"
    write_results(f"fake-against-run-{kind}", title, rows_of(results), results, output)
    sys.stdout.write(markdown_table(rows_of(results)) + "\n")
    if arguments.modelled:
        published = [modelled(*size, device, turns) for device in arguments.modelled for size in PUBLISHED]
        rows = modelled_rows_of(published)
        write_results("modelled-steps", "Steps modelled for devices that are not here", rows, published, output)
        sys.stdout.write("\n" + markdown_table(rows) + "\n")


if __name__ == "__main__":
    main()
