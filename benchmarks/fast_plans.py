"""Fast plans against the ordinary search: seconds of the processor, and the predicted step over the best one known.

    python -m benchmarks.fast_plans [--budget 0.8 ...] [--time-limit 30] [--turns 3] [--only NAME ...]

Each profile is planned with effort "fast" through `pooch.plan`, verifier included, and with the ordinary search under
its usual time limit. The best plan is the faster of the two. Profiles are the recorded ones, and deeper models of about
500 activations: three modelled on a device of the catalogue, one synthetic. Budgets that no plan keeps are raised to
just above the smallest that can be kept; the last row of each profile is that smallest budget itself. Ends with exit
code 1 where a plan of at most 530 activations, at one of the given budgets, takes more than a second of the processor
or is more than a tenth slower than the best. Seconds of the processor are those of all threads; libraries are imported
before.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pooch
from benchmarks.samples import told
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.api.profiling import profile_workload
from pooch.devices import find_device
from pooch.ir import Plan, Profile
from pooch.workloads import WorkloadFactory
from tests.planner.networks import SPILL_FILE, gpt2

SHARES = (0.8, 0.6, 0.45)
MARGIN = 0.01  # of the in-core peak, above a smallest budget that is over the one asked for
MOST_ACTIVATIONS, MOST_CPU_S, MOST_RATIO = 530, 1.0, 1.1
DEVICE = "V100-PCIe"
MODELLED: Mapping[str, tuple[str, int, dict[str, object]]] = {
    "GPT-2, 22 layers": ("gpt2", 4, {"layers": 22}),
    "ResNet-251": ("resnet", 64, {"depth": 251}),
    "LSTM, unrolled": ("lstm", 256, {"unrolled": True, "layers": 4, "sequence_length": 20}),
}


def profiles(folder: Path) -> Iterator[tuple[str, Profile]]:
    """What is planned, by name."""
    for path in sorted(folder.glob("*.json")):
        yield path.stem, Profile.load(path)
    for name, (workload, batch_size, settings) in MODELLED.items():
        factory = WorkloadFactory(workload, batch_size, None, settings)
        yield f"{name}, {DEVICE}", profile_workload(factory, mode="fake", device_model=find_device(DEVICE))
    yield "synthetic, 19 layers, spill file", gpt2(layers=19, link=SPILL_FILE, fine=True)


def measure(name: str, profile: Profile, share: float | None, limit_s: float, turns: int) -> dict[str, Any]:
    """Fast plans and an ordinary one for one budget; share None: the smallest budget."""
    region = "step" if profile.model_begin == profile.model_end else "model"
    smallest = pooch.smallest_budget(profile, region=region)
    above = smallest + int(MARGIN * profile.peak_bytes)
    budget_bytes = smallest if share is None else max(above, int(share * profile.peak_bytes))

    def planned(**options: Any) -> tuple[Plan, float]:
        began_s = time.process_time()
        plan = pooch.plan(profile, budget_bytes, region=region, **options)
        return plan, time.process_time() - began_s

    fast = [planned(effort="fast") for _ in range(turns)]
    full, full_s = planned(time_limit_s=limit_s, explain=False)
    return {
        "profile": name,
        "activations": len(full.choices),
        "share": share,
        "budget_share": budget_bytes / profile.peak_bytes,
        "fast_cpu_s": [cpu_s for _, cpu_s in fast],
        "full_cpu_s": full_s,
        "in_core_ms": profile.step_ms,
        "fast_ms": fast[0][0].predicted_step_ms,
        "fast_gap": fast[0][0].gap,
        "full_ms": full.predicted_step_ms,
        "full_gap": full.gap,
    }


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table: the median of the turns, and what is over the promise."""
    return [_row(result) for result in results]


def _row(result: Mapping[str, Any]) -> Row:
    ratio, in_core_ms = _ratio(result), result["in_core_ms"]
    return {
        "profile": result["profile"],
        "activations": result["activations"],
        "budget": f"{result['budget_share']:.1%}" + (" (smallest)" if result["share"] is None else ""),
        "fast, CPU s": told(result["fast_cpu_s"], ".2f"),
        "ordinary, CPU s": f"{result['full_cpu_s']:.1f}",
        "fast / in-core": f"{result['fast_ms'] / in_core_ms:.4f}",
        "ordinary / in-core": f"{result['full_ms'] / in_core_ms:.4f}",
        "fast / best": f"{ratio:.4f}",
        "gap of fast": f"{result['fast_gap']:.1%}",
        "misses": ", ".join(_misses(result)),
    }


def _ratio(result: Mapping[str, Any]) -> float:
    fast_ms: float = result["fast_ms"]
    return fast_ms / min(fast_ms, result["full_ms"])


def _misses(result: Mapping[str, Any]) -> Iterator[str]:
    if statistics.median(result["fast_cpu_s"]) > MOST_CPU_S:
        yield "time"
    if _ratio(result) > MOST_RATIO:
        yield "step"


def _is_promised(result: Mapping[str, Any]) -> bool:
    return result["share"] is not None and result["activations"] <= MOST_ACTIVATIONS


def main() -> int:
    """Measure, print, write; exit code 1 where a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", action="append", type=float, help=f"shares of the peak (default: {SHARES})")
    parser.add_argument("--time-limit", type=float, default=30.0, help="of the ordinary search")
    parser.add_argument("--turns", type=int, default=3, help="fast plans of each budget")
    parser.add_argument("--only", action="append", help="names of profiles")
    parser.add_argument("--profiles", type=Path, default=Path("profiles"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    importlib.import_module("pulp")  # and HiGHS with it, once per process
    results = []
    for name, profile in profiles(arguments.profiles):
        if arguments.only and name not in arguments.only:
            continue
        for share in (*(arguments.budget or SHARES), None):
            tell(f"{name}: {'smallest' if share is None else format(share, '.0%')}")
            results.append(measure(name, profile, share, arguments.time_limit, arguments.turns))
    rows = rows_of(results)
    write_results("fast-plans", "Fast plans against the ordinary search", rows, results, arguments.output)
    sys.stdout.write(markdown_table(rows) + "\n")
    return int(any(_is_promised(result) and any(_misses(result)) for result in results))


if __name__ == "__main__":
    sys.exit(main())
