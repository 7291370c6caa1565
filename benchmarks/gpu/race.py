"""The race test: five steps in which everything leaves as early and returns as late as it can, buffers used again."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.job import Job, Verdict
from benchmarks.gpu.repeatable import on_device, use_deterministic_kernels
from benchmarks.soak import tight_mixed_plan
from pooch.api.measure.training import Trained, first_difference, forward_and_backward, train_steps
from pooch.api.profiling import profile_workload
from pooch.ir import Plan
from pooch.torchtools import accelerators
from pooch.workloads import Setting, Workload, WorkloadFactory

STEPS = 5


@dataclass(frozen=True, slots=True)
class Race:
    """A workload whose copies are large enough to be under way for long."""

    workload: str
    package: str
    batch_size: int
    settings: dict[str, Setting]

    def factory(self, job: Job) -> WorkloadFactory:
        if job.small:
            return WorkloadFactory(f"{self.workload}@small", device=job.device)
        return WorkloadFactory(self.workload, batch_size=self.batch_size, device=job.device, settings=self.settings)


RACES = (
    Race("resnet50", "", 64, {"image_size": 160}),
    Race("gpt2", "transformers", 4, {"layers": 6, "sequence_length": 512}),
    Race("lstm", "", 128, {}),
)


def run(job: Job) -> Verdict:
    """Every workload, on the stream that is current anyway and on one of its own."""
    failed = 0
    for race in RACES:
        if race.package and importlib.util.find_spec(race.package) is None:
            job.add("race", {"workload": race.workload, "same bits": f"not run: {race.package} is not installed"})
            continue
        failed += not _one(job, race)
    done = [row for row in job.data.get("race", ()) if not row["same bits"].startswith("not run")]
    if failed:
        return Verdict("failed", f"{failed} of {len(done)} differ or left the plan")
    return Verdict("passed" if len(done) == 2 * len(RACES) else "not run", f"{len(done)} of {2 * len(RACES)} races")


def _one(job: Job, race: Race) -> bool:
    job.tell(f"race: {race.workload}")
    factory, device = race.factory(job), on_device(job.device)
    shaky, plan = _planned(factory())
    plain = train_steps(factory(), None, STEPS, job.tell)
    good = True
    for name in ("current stream", "a stream of its own"):
        own = name != "current stream" and accelerators.has_streams(device)
        stream: Any = accelerators.on_stream(accelerators.new_stream(device)) if own else nullcontext()
        with stream:
            planned = train_steps(factory(), plan, STEPS, job.tell)
        difference = explained(factory, plain, planned, job)
        stats = planned.stats
        assert stats is not None
        fired = stats.swapped_in_bytes > 0 and stats.recomputed_ops > 0 and stats.mismatches == 0
        good = good and fired and not difference.startswith("NO")
        row = {"workload": race.workload, "stream": name, "steps": STEPS, "same bits": difference or "yes"}
        moved = f"{stats.swapped_in_bytes / 2**20:.1f} MiB"
        counts = {"swapped in, each step": moved, "replayed ops": stats.recomputed_ops, "late": stats.late_swaps}
        job.add("race", {**row, **counts, "left the plan": stats.mismatches, "no deterministic kernel": shaky})
    return good


def _planned(workload: Workload) -> tuple[str, Plan]:
    """What has no deterministic kernel, and a plan that swaps and replays by turns."""
    shaky = use_deterministic_kernels(lambda: forward_and_backward(workload, None))
    workload.model.zero_grad(set_to_none=True)
    return shaky, tight_mixed_plan(profile_workload(workload, warmup=1, repeats=1))


def explained(factory: WorkloadFactory, plain: Trained, planned: Trained, job: Job) -> str:
    """ "" where the bits are the same. Else plain training is repeated: where it differs from itself, nothing can be
    said; where it does not, the plan is wrong ("NO: ...").
    """
    difference = first_difference(plain, planned)
    if difference is None:
        return ""
    again = first_difference(plain, train_steps(factory(), None, len(plain.steps), job.tell))
    if again is None:
        return f"NO: {difference}"
    return f"unknown: plain training differs from itself ({again})"
