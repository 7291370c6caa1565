"""Profiles from fake tensors beside profiles of runs, for workloads that fit here.

    python -m benchmarks.fake_against_run [--workload NAME ...] [--small] [--device cpu] [--modelled V100-PCIe ...]

One row per workload: in-core peak and its error, whether the activations are the same (ids, sizes, labels), the step
and its error, how long each kind of profile takes. Alone on the machine, or times say nothing. With `--modelled` also
the big published sizes on devices that are not here, with the time that modelling them takes.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.devices import find_device
from pooch.ir import Profile
from pooch.session import profile_workload
from pooch.units import format_bytes, format_ms
from pooch.workloads import WorkloadFactory, workload_factory

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
    return workload_factory(name, batch_size=sizes.get("batch_size"), device=device, settings=settings)


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


def row_of(name: str, fake: Profile, run: Profile, fake_s: float, run_s: float) -> Row:
    """One line of the table."""
    forward = run.forward_ops
    same_ops = [op.fingerprint for op in fake.ops[:forward]] == [op.fingerprint for op in run.ops[:forward]]
    return {
        "workload": f"{name}, batch {run.batch_size}",
        "peak of the run": format_bytes(run.peak_bytes),
        "fake": f"{fake.peak_bytes / run.peak_bytes - 1:+.3%}",
        "activations": len(run.activations),
        "the same": "yes" if same_activations(fake, run) else "NO",
        "forward ops the same": "yes" if same_ops else "NO",
        "step of the run": format_ms(run.step_ms),
        "fake step": f"{fake.step_ms / run.step_ms - 1:+.1%}",
        "profiled by running in": f"{run_s:.1f} s",
        "fake in": f"{fake_s:.1f} s",
    }


def modelled_row(name: str, sizes: dict[str, int], device: str) -> Row:
    """One line of what is modelled."""
    profile, seconds = _timed(lambda: profile_workload(_factory(name, sizes), device_model=find_device(device)))
    return {
        "workload": f"{name} {', '.join(f'{key} {value}' for key, value in sizes.items())}",
        "device": f"{device} (modelled)",
        "peak": format_bytes(profile.peak_bytes),
        "activations": len(profile.activations),
        "step": format_ms(profile.step_ms),
        "items/s": f"{1000 * profile.batch_size / profile.step_ms:.1f}",
        "modelled in": f"{seconds:.1f} s",
    }


def main() -> None:
    """Compare what was asked for; print the tables; write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", help=f"default: {', '.join(WORKLOADS)}")
    parser.add_argument("--small", action="store_true", help="the small sizes alone")
    parser.add_argument("--device", help="where (default: the workload's own)")
    parser.add_argument("--modelled", action="append", default=[], help="devices to model the published sizes on")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    sizes_of = {name: ([SMALL[name]] if arguments.small else [SMALL[name], {}]) for name in WORKLOADS}
    rows: list[Row] = []
    raw: list[object] = []
    for name in arguments.workload or WORKLOADS:
        for sizes in sizes_of[name]:
            factory = _factory(name, sizes, arguments.device)
            tell(f"{name} {sizes or '(default size)'}: fake")
            fake, fake_s = _timed(lambda factory=factory: profile_workload(factory, mode="fake"))  # type: ignore[misc]
            tell("the same by running")
            run, run_s = _timed(lambda factory=factory: profile_workload(factory, mode="run"))  # type: ignore[misc]
            rows.append(row_of(name, fake, run, fake_s, run_s))
            raw.append({**rows[-1], "fake_peak_bytes": fake.peak_bytes, "run_peak_bytes": run.peak_bytes})
            tell(str(rows[-1]))
            del run
    kind = (arguments.device or "cpu").partition(":")[0]
    write_results(
        f"fake-against-run-{kind}", "Profiles from fake tensors beside those of runs", rows, raw, arguments.output
    )
    sys.stdout.write(markdown_table(rows) + "\n")
    modelled = [modelled_row(*published, device) for device in arguments.modelled for published in PUBLISHED]
    if modelled:
        write_results(
            "modelled-steps", "Steps modelled for devices that are not here", modelled, modelled, arguments.output
        )
        sys.stdout.write("\n" + markdown_table(modelled) + "\n")


if __name__ == "__main__":
    main()
