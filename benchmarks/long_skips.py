"""Memory over one step of the 3D U-Net: in-core, all swapped but what the program holds, and all swapped.

`python -m benchmarks.long_skips` writes the figures, every point of the curves, and a picture of these under
`benchmarks/results/`; `--page-only` makes table and picture again of what is stored. Every curve is measured at the
allocator. Both plans let everything leave as soon and come back as late as it can, so that the curves show what
is possible, not what is fast.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pooch.analysis.dataflow import Dataflow
from pooch.api.evaluation import StageEvaluator
from pooch.api.manual import manual_plan
from pooch.executor import apply_plan
from pooch.executor.engines import make_engine
from pooch.ground.units import format_bytes
from pooch.ir import Choice, Link, Plan, Profile
from pooch.ir.files import replace_file
from pooch.profiler import ProfileOptions, profile_step
from pooch.torchtools.memory_trace import MemoryTrace, MemoryTracer, live_bytes, marker, quiet_collector
from pooch.workloads import load_workload

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Curve:
    """One measured step.

    Attributes:
        name: of the way it was trained. peak_bytes: of the step. forward_peak_bytes: of its forward pass.
        bottom_bytes: highest live bytes while the lowest level is computed. emptied_bytes: left while held.
        points: (ms, live bytes), in order.
    """

    name: str
    peak_bytes: int
    forward_peak_bytes: int
    bottom_bytes: int
    emptied_bytes: int
    late_swaps: int
    points: tuple[tuple[float, int], ...]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--volume", type=int, default=96, help="edge of the cubes that are segmented, in voxels")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page-only", action="store_true", help="measure nothing: draw what is stored")
    options = parser.parse_args()
    path = options.results / "long-skips.json"
    if not options.page_only:
        options.results.mkdir(parents=True, exist_ok=True)
        document = {"volume": options.volume, "curves": [asdict(curve) for curve in measure(options.volume)]}
        replace_file(path, json.dumps(document).encode())
    curves = json.loads(path.read_text())["curves"]
    replace_file(options.results / "long-skips.md", table(curves).encode())
    draw(curves, options.results / "long-skips.png")
    print(table(curves))


def measure(volume: int) -> list[Curve]:
    """Trains the same step three ways."""
    workload = load_workload("unet3d", batch_size=2, device="cpu", settings={"volume_size": volume})
    model = workload.model
    lowest = _lowest(model)
    lowest.register_forward_pre_hook(lambda module, inputs: _note("bottom begins"))
    lowest.register_forward_hook(lambda module, inputs, result: _note("bottom ends"))
    link = Link(make_engine(torch.device("cpu")).description, 0.1, 0.1, 1e6, 1e6)  # the tightest schedule asks no rates
    profile = profile_step(
        workload.forward, model, workload.optimizer, link, ProfileOptions(warmup=0, repeats=1)
    ).profile
    unseen = replace(profile, values=tuple(replace(value, touches=None) for value in profile.values))

    def step() -> None:
        loss = workload.forward()
        with marker("backward"):
            loss.backward()

    curves = [_curve("in-core", model, step, None)]
    for name, known in (("all swapped, held values stay", unseen), ("all swapped, held values leave", profile)):
        with apply_plan(_tightest(known), model) as run:
            curves.append(_curve(name, model, step, run))
    return curves


def _lowest(model: torch.nn.Module) -> torch.nn.Module:
    """MONAI nests its levels: the innermost `submodule` that holds no other is the lowest."""
    named = [(name, module) for name, module in model.named_modules() if name.endswith("submodule")]
    return max(named, key=lambda pair: pair[0].count("submodule"))[1]


def _note(name: str) -> None:
    with marker(name):
        pass


def _tightest(profile: Profile) -> Plan:
    dataflow = Dataflow(profile, "model")
    decisions: dict[int, Choice] = {value.id: "swap" for value in dataflow.activations}
    evaluation = StageEvaluator(dataflow).evaluate(decisions, 0)
    return manual_plan(dataflow, evaluation, decisions)


def _curve(name: str, model: torch.nn.Module, step: Callable[[], None], run: Any) -> Curve:
    step()  # what is lazy is there from now on
    model.zero_grad()
    with quiet_collector():
        start_bytes, tracer = live_bytes(torch.device("cpu")), MemoryTracer(torch.device("cpu"))
        tracer.start()
        step()
        trace = tracer.stop()
    points, bottom, forward = _points(trace, start_bytes)
    peak_bytes = max(live for _, live in points)
    emptied, late = (run.stats.emptied_bytes, run.stats.late_swaps) if run is not None else (0, 0)
    return Curve(name, peak_bytes, forward, bottom, emptied, late, points)


def _points(trace: MemoryTrace, start_bytes: int) -> tuple[tuple[tuple[float, int], ...], int, int]:
    """The curve, and the highest live bytes while the bottom is computed and in the forward pass."""
    at = {span.name: span.start_ns for span in trace.markers}
    first_ns = trace.events[0].time_ns
    points, live, bottom, forward = [], start_bytes, 0, 0
    for event in trace.events:
        live += event.size_bytes
        points.append((round((event.time_ns - first_ns) / 1e6, 3), live))
        if at["bottom begins"] <= event.time_ns <= at["bottom ends"]:
            bottom = max(bottom, live)
        if event.time_ns <= at["backward"]:
            forward = max(forward, live)
    return tuple(points), bottom, forward


def table(curves: Sequence[Mapping[str, Any]]) -> str:
    """The figures in Markdown."""
    rows = ["| step | peak | forward pass | lowest level | left while held |", "| --- | --- | --- | --- | --- |"]
    for curve in curves:
        sizes = [curve[what] for what in ("peak_bytes", "forward_peak_bytes", "bottom_bytes", "emptied_bytes")]
        rows.append(f"| {curve['name']} | " + " | ".join(format_bytes(size) for size in sizes) + " |")
    return "\n".join(rows) + "\n"


def draw(curves: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Live bytes over the share of the step that is done, as steps take different times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4))
    for curve in curves:
        points, end_ms = curve["points"], curve["points"][-1][0]
        axes.step([ms / end_ms for ms, _ in points], [live / 2**20 for _, live in points], label=curve["name"])
    axes.set_xlabel("share of the step")
    axes.set_ylabel("live bytes, MiB")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
