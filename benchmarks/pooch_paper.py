"""The setting of the PoocH paper, modelled: docs/pooch_paper.md.

    python -m benchmarks.pooch_paper [--profile profiles/resnet50-b16-cpu.json] [--images-per-s 360 ...]

ResNet-50 at batch 640 on a 16 GB GPU, with a host link of 12 and of 60 GB/s: predicted slowdown of PoocH's
classification, of its baselines and of the integer program, beside the published 38% and 28%. Nothing is measured:
bytes come from a recorded profile of the same network times the batch, times from a throughput.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from pooch.ir import Link, Profile
from pooch.session import ComparisonRow, compare
from pooch.session.rescaling import rescale
from pooch.units import format_bytes, format_ms

BATCH = 640
MEMORY_BYTES = 16 * 2**30
RESERVED_BYTES = 1 * 2**30  # for the context, the library's workspaces and fragmentation; an assumption
IMAGES_PER_S = 360.0  # ResNet-50 in single precision on a V100, forward and backward
POLICIES = ("ilp", "pooch_2018", "pooch_exhaustive", "swap_opt", "superneurons", "swap_all", "swap_all_no_scheduling")
LINKS = (
    ("x86, PCIe 3: 12 GB/s", Link("pinned host memory, modelled", 0.02, 0.02, 12e6, 12e6), "38%"),
    ("POWER9, NVLink 2: 60 GB/s", Link("pinned host memory, modelled", 0.02, 0.02, 60e6, 60e6), "28%"),
)
HEAD = """# The setting of the PoocH paper, modelled

Made by `python -m benchmarks.pooch_paper`. **Nothing on this page is measured on the hardware it is about.**

Ito et al. (2019) report that a network which needs 50 GB was trained on a 16 GB GPU with a slowdown, against in-core
computing, of 38% on an x86 machine and 28% on a POWER9 machine (abstract). Their experiments contain ResNet-50 up to
batch 640 (read in their code); which network and batch the two figures are of, the abstract does not say.

What is modelled, and how:

- bytes: the recorded profile of ResNet-50 (PyTorch), all that the step makes, gradients of parameters excepted, times
  640 / recorded batch;
- times: every op of that profile times one factor, so that the step comes to so many images per second in-core. About
  360 images/s for ResNet-50 in single precision on a V100, forward and backward, is recalled from published benchmarks
  and was not looked up; `--images-per-s` shows how much depends on it. The shares of the ops are those of a CPU;
- link: pinned memory at 12 GB/s (PCIe 3) and 60 GB/s (NVLink 2, 75 GB/s nominal; both recalled), both ways at once,
  20 us per copy, no compute displaced;
- memory: a budget of 15 GiB: 16 GB less 1 GiB for context, library and fragmentation.

A figure is the predicted step over the in-core step, less one.
"""


def modelled_profile(profile: Profile, images_per_s: float, link: Link) -> Profile:
    """ResNet-50 at batch 640 at this in-core rate."""
    batch_factor = BATCH / profile.batch_size
    compute_factor = profile.step_ms * batch_factor / (BATCH / images_per_s * 1000)
    return rescale(profile, batch_factor, compute_factor, link, MEMORY_BYTES, "a GPU with 16 GB")


def table(profile: Profile, rates: Sequence[float], time_limit_s: float) -> str:
    """One line per policy, one column per link and rate."""
    settings = [(name, link, published, rate) for name, link, published in LINKS for rate in rates]
    columns = [
        compare(
            modelled_profile(profile, rate, link),
            [MEMORY_BYTES - RESERVED_BYTES],
            policies=POLICIES,
            region="step",
            time_limit_s=time_limit_s,
        )
        for _, link, _, rate in settings
    ]
    lines = [_line(["", *(f"{name}, {rate:g} images/s" for name, _, _, rate in settings)])]
    lines.append(_line(["---", *("---:" for _ in settings)]))
    for place, policy in enumerate(POLICIES):
        lines.append(_line([policy, *(_slowdown(column[place]) for column in columns)]))
    lines.append(_line(["*lower bound*", *(_bound(column[0]) for column in columns)]))
    lines.append(_line(["*paper, measured*", *(published for _, _, published, _ in settings)]))
    return "\n".join(lines)


def _slowdown(row: ComparisonRow) -> str:
    if row.plan is None:
        return f"needs {format_bytes(row.minimum_bytes)}"
    return f"{row.plan.predicted_step_ms / row.plan.in_core_step_ms - 1:.1%}"


def _bound(row: ComparisonRow) -> str:
    return "" if row.plan is None else f"{row.plan.lower_bound_ms / row.plan.in_core_step_ms - 1:.1%}"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def main() -> None:
    """Model, plan, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=Path("profiles/resnet50-b16-cpu.json"))
    parser.add_argument("--output", type=Path, default=Path("docs/pooch_paper.md"))
    parser.add_argument("--images-per-s", type=float, action="append", help="in-core rate; may be given several times")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds per plan")
    arguments = parser.parse_args()
    rates = arguments.images_per_s or [IMAGES_PER_S]
    profile = Profile.load(arguments.profile)
    modelled = modelled_profile(profile, rates[0], LINKS[0][1])
    peak, persistent = format_bytes(modelled.peak_bytes), format_bytes(modelled.persistent_bytes)
    facts = (
        f"From the profile of {profile.workload} at batch {profile.batch_size} on {profile.device.name}: at\n"
        f"batch {BATCH} it needs {peak} in-core, {persistent} of them persistent; a step at\n"
        f"{rates[0]:g} images/s lasts {format_ms(modelled.step_ms)}."
    )
    arguments.output.write_text("\n".join([HEAD, facts, "", table(profile, rates, arguments.time_limit), ""]))


if __name__ == "__main__":
    main()
