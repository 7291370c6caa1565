"""Full fine-tuning of Llama models that do not fit on catalogued cards: what leaves, and what a step would take.

    python -m benchmarks.whole_budget [--only "7B, RTX-4090, 24 GiB" ...]

Everything is modelled: no op is run, and no card is there. Parameters, gradients and the two moments of AdamW are in
bfloat16, the step has one sequence of 2,048 tokens, and the plan may let everything leave. The step is that of the
plan, from one optimizer's step to the next; what the optimizer computes is not in it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pooch
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.api.budgets import parse_budget
from pooch.api.profiling import profile_workload
from pooch.devices import find_device
from pooch.ground.units import format_bytes, format_ms
from pooch.ir import Profile
from pooch.workloads import WorkloadFactory

MODELS: dict[str, dict[str, object]] = {
    "7B": {},
    "13B": {"layers": 40, "width": 5120, "inner_width": 13824, "heads": 40, "key_value_heads": 40},
}
CASES = (
    ("7B", "RTX-4090", "24GiB"),
    ("7B", "RTX-4090", "12GiB"),
    ("13B", "RTX-4090", "24GiB"),
    ("13B", "A100-80", "80GiB"),
    ("13B", "H100", "40GiB"),
)


def named(model: str, device: str, budget: str) -> str:
    """How a case is called."""
    return f"{model}, {device}, {budget.replace('GiB', ' GiB')}"


def profile_of(model: str, device: str) -> Profile:
    """The modelled step."""
    factory = WorkloadFactory("llama@7b", None, None, {"dtype": "bfloat16", **MODELS[model]})
    return profile_workload(factory, mode="fake", device_model=find_device(device))


def planned(model: str, device: str, budget: str, profile: Profile) -> dict[str, Any]:
    """One case, in figures."""
    began_s = time.monotonic()
    plan = pooch.plan(profile, budget, region="step", moves="all", explain=False, time_limit_s=60)
    moved = plan.persistent
    return {
        "workload": named(model, device, budget),
        "parameters": len([each for each in profile.persistent if each.kind == "parameter"]),
        "budget_bytes": parse_budget(budget, profile.peak_bytes),
        "in_core_peak_bytes": profile.peak_bytes,
        "in_core_step_ms": profile.step_ms,
        "smallest_bytes": pooch.smallest_budget(profile, region="step", moves="all"),
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_step_ms": plan.predicted_step_ms,
        "optimizer_ms": 0.0 if moved is None else moved.optimizer_ms,
        "copied_out_bytes": 0 if moved is None else moved.copied_out_bytes,
        "copied_in_bytes": 0 if moved is None else moved.copied_in_bytes,
        "host_bytes": plan.host_bytes,
        "gap": plan.gap,
        "planning_s": time.monotonic() - began_s,
    }


def rows_of(results: Sequence[dict[str, Any]]) -> list[Row]:
    """The table."""
    return [
        {
            "model, card, budget": each["workload"],
            "in-core": f"{format_bytes(each['in_core_peak_bytes'])}, {format_ms(each['in_core_step_ms'])}",
            "peak": format_bytes(each["predicted_peak_bytes"]),
            "step": format_ms(each["predicted_step_ms"]),
            "times in-core": f"{each['predicted_step_ms'] / each['in_core_step_ms']:.2f}",
            "copied out": format_bytes(each["copied_out_bytes"]),
            "copied back": format_bytes(each["copied_in_bytes"]),
            "host memory": format_bytes(each["host_bytes"]),
            "gap": f"{each['gap']:.1%}",
            "smallest budget": format_bytes(each["smallest_bytes"]),
        }
        for each in results
    ]


def main() -> int:
    """Plan, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="cases, as the table names them")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    profiles: dict[tuple[str, str], Profile] = {}
    for model, device, budget in CASES:
        if arguments.only and named(model, device, budget) not in arguments.only:
            continue
        tell(named(model, device, budget))
        profile = profiles.get((model, device)) or profiles.setdefault((model, device), profile_of(model, device))
        results.append(planned(model, device, budget, profile))
    rows = rows_of(results)
    title = "Full fine-tuning beyond the card, modelled"
    write_results("whole-budget", title, rows, results, arguments.output)
    sys.stdout.write(markdown_table(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
