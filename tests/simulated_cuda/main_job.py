"""The main job on a device that is too small for it: `python -m tests.simulated_cuda.main_job --output FOLDER`.

ResNet-50 on a device of 1 GiB, of which plain training needs 1.5 times as much. Each training runs in a process of its
own. In memory mode: plain training dies, and Pooch profiles, plans and trains from cold; what the allocator counted,
and a picture of what its streams did. In numbers mode: the same job on a large device, plainly, and on the small one
under a plan; all bits are compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from tests.simulated_cuda.environment import ROOT, VENV, set_up_or_tell, variables

WORKLOAD, BATCH_SIZE, STEPS = "resnet50", 16, 3
SMALL_MIB, LARGE_MIB = 1024, 4096
BUDGET_BYTES = 800_000_000
# For the picture: what kernels and copies take is set, so that both can be seen. It says nothing of any GPU.
PACE = {"SIMULATED_CUDA_KERNEL_US": "300", "SIMULATED_CUDA_COPY_GB_PER_S": "4"}
NOTE = "PyTorch's CUDA build on a simulated CUDA runtime, cuDNN off: no GPU figures"


def trained(
    kind: str, device_memory_mib: int, *, numbers: bool = False, timeline: Path | None = None
) -> dict[str, Any]:
    """What a training in a process of its own printed.

    Args:
        kind: "plain", or the policy of a plan.
        device_memory_mib: memory of the device.
        numbers: whether kernels compute.
        timeline: where the last step's work on streams is written; kernels take longer then.

    Raises:
        RuntimeError: it ended in another way than with a result or out of memory.
    """
    arguments = [kind, WORKLOAD, str(BATCH_SIZE), str(BUDGET_BYTES), str(STEPS), *([str(timeline)] if timeline else [])]
    command = [str(VENV / "bin/python"), "-m", "tests.simulated_cuda.training", *arguments]
    environment = variables(numbers, device_memory_mib) | (PACE if timeline else {})
    begin_s = time.monotonic()
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{kind} training ended with {done.returncode}: {done.stderr[-2000:]}")
    return {**json.loads(lines[-1]), "seconds": round(time.monotonic() - begin_s, 1)}


def draw(timeline: Path, picture: Path) -> float:
    """Draw what each stream did, and return the part of the copies' time during which a kernel ran, too.

    Args:
        timeline: as `mistakes.write_timeline` writes it.
        picture: file to draw.
    """
    work = pd.read_csv(timeline, sep="\t")
    kinds = {"copy to host": "copies out", "copy to device": "copies in"}
    work["lane"] = work.name.map(kinds).fillna("kernels")
    work = work[(work.lane == "kernels") | (work.bytes >= 2**20)]
    figure = Figure(figsize=(11, 2.6), layout="constrained")
    axes = figure.subplots()
    colours = {"kernels": "#4878a8", "copies out": "#d1783c", "copies in": "#4f9a5b"}
    for row, (lane, colour) in enumerate(colours.items()):
        spans = work[work.lane == lane]
        bars = list(zip(spans.begin_us / 1e3, (spans.end_us - spans.begin_us) / 1e3, strict=True))
        axes.broken_barh(bars, (row - 0.4, 0.8), color=colour, linewidth=0)
    axes.set_yticks(range(len(colours)), list(colours))
    axes.invert_yaxis()
    axes.set_xlabel("ms of the simulated device's time, one training step")
    axes.set_title(
        f"{WORKLOAD}, batch size {BATCH_SIZE}, swapping alone, under {BUDGET_BYTES / 1e6:.0f} MB ({NOTE})", fontsize=9
    )
    figure.savefig(picture, dpi=130)
    return _beside(work)


def _beside(work: pd.DataFrame) -> float:
    kernels = sorted(zip(*(work[work.lane == "kernels"][key] for key in ("begin_us", "end_us")), strict=True))
    copies = work[work.lane != "kernels"]
    if copies.empty:
        return 0.0
    shared = sum(
        max(0.0, min(end, kernel_end) - max(begin, kernel_begin))
        for begin, end in zip(copies.begin_us, copies.end_us, strict=True)
        for kernel_begin, kernel_end in kernels
    )
    return float(shared / (copies.end_us - copies.begin_us).sum())


def run(folder: Path) -> bool:
    """Do the whole job and print it as it goes; returns whether everything is as it must be.

    Args:
        folder: for the picture, the timeline and `main_job.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"note": NOTE, "workload": WORKLOAD, "batch_size": BATCH_SIZE, "steps": STEPS}
    checks: dict[str, bool] = {}

    def tell(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    tell(f"{NOTE}.\n{WORKLOAD}, batch size {BATCH_SIZE}, a device of {SMALL_MIB} MiB:")
    results["needs"] = needs = trained("plain", LARGE_MIB)
    tell(f"  plain training takes {_mib(needs['allocated_bytes'])} where there is room ({needs['seconds']} s)")
    results["plain"] = plain = trained("plain", SMALL_MIB)
    checks["plain training dies of OutOfMemoryError"] = plain.get("error", "").startswith("OutOfMemoryError")
    tell(f"  plain training: {plain.get('error', 'trains')}")
    results["planned"] = planned = trained("ilp", SMALL_MIB)
    tell(f"  Pooch, from cold: {_told(planned)}")
    checks["the peak keeps the budget, but for rounding"] = planned["requested_bytes"] <= BUDGET_BYTES
    checks["the predicted peak is within 0.5% of what was asked for"] = (
        abs(planned["predicted_peak_bytes"] / planned["requested_bytes"] - 1) < 0.005
    )
    results["swapping"] = swapping = trained("ilp_swap", SMALL_MIB, timeline=folder / "timeline.tsv")
    tell(f"  swapping alone: {_told(swapping)}")
    results["beside_compute"] = beside = round(draw(folder / "timeline.tsv", folder / "timeline.png"), 3)
    checks["copies run beside kernels"] = swapping["swapped_bytes"] > 0 and beside > 0.5
    tell(f"  {beside:.0%} of its copies' time is beside kernels: {folder / 'timeline.png'}")
    results["numbers plain"] = there = trained("plain", LARGE_MIB, numbers=True)
    tell(f"  numbers: plain, on {LARGE_MIB} MiB: {there['digest']}, losses {there['losses']} ({there['seconds']} s)")
    results["numbers planned"] = here = trained("ilp", SMALL_MIB, numbers=True)
    tell(f"  numbers: Pooch, on {SMALL_MIB} MiB: {here.get('digest', here.get('error'))} ({here['seconds']} s)")
    checks["losses, gradients, parameters, buffers and random state have the same bits"] = (
        here.get("digest") == there["digest"] and here["swapped_bytes"] + here["replayed_ops"] > 0
    )
    checks["the device found no mistake"] = not any(
        each.get("mistakes") for each in results.values() if isinstance(each, dict)
    )
    for check, passed in checks.items():
        tell(f"  {'passed' if passed else 'FAILED'}: {check}")
    (folder / "main_job.json").write_text(json.dumps({**results, "checks": checks}, indent=1) + "\n")
    return all(checks.values())


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def _told(planned: dict[str, Any]) -> str:
    moved = (
        f"{planned['swap']} values swapped ({_mib(planned['swapped_bytes'])} a step), {planned['recompute']} recomputed"
    )
    bytes_ = {
        key: _mib(planned[f"{key}_bytes"]) for key in ("budget", "predicted_peak", "allocated", "requested", "reserved")
    }
    return (
        f"profiled in mode {planned['mode']}, {moved}; "
        f"budget {bytes_['budget']}, predicted {bytes_['predicted_peak']}, "
        f"allocated {bytes_['allocated']}, of that asked for {bytes_['requested']}, reserved {bytes_['reserved']} "
        f"({planned['seconds']} s)"
    )


def main() -> int:
    """Exit code 0: all as it must be, or the device cannot be set up here, which is said; 1: a check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulated_cuda.main_job", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/simulated_cuda/main_job"), help="folder for results")
    if not set_up_or_tell():
        return 0
    return 0 if run(parser.parse_args().output) else 1


if __name__ == "__main__":
    sys.exit(main())
