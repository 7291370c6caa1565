"""Steps that do not fit: plain training and `pooch optimize` in processes with a limit below the in-core peak.

    python -m benchmarks.does_not_fit [--workload NAME ...] [--steps 3] [--cost-only]

Every process starts cold with the same limit on its private writable memory (`ulimit -d`): the budget, what a process
takes besides its tensors once the model is built (interpreter, PyTorch, the libraries of the model), and 192 MiB for
what Pooch takes besides (recording, planning, copying). Plain training dies there. Then, without a limit, a process
times plain steps and one call of `pooch.profile`: what profiling costs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.api.budgets import parse_budget
from pooch.ground.units import format_bytes

ROOT = Path(__file__).parent.parent
BUDGETS = {"resnet50": "930MiB", "gpt2": "2900MiB", "unet3d": "432MiB", "lstm": "388MiB"}
BESIDE_BYTES = 192 * 2**20
_LAST_WORDS = 160


def limited(arguments: list[str], limit_bytes: int) -> subprocess.CompletedProcess[str]:
    """Run `pooch` in a process that cannot take more private writable memory than the limit."""

    def set_limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    command = [sys.executable, "-m", "pooch", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, preexec_fn=set_limit, env=_environment()
    )


def _asked(question: str, workload: str) -> dict[str, Any]:
    """What a fresh process without a limit answers about a workload."""
    command = [sys.executable, "-m", "benchmarks.does_not_fit", question, workload]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=_environment())
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "KINETO_LOG_LEVEL": "99"}


def _measure_base(workload: str) -> dict[str, Any]:
    """Run in the child: private writable bytes of the process with the model built, without those of tensors."""
    import torch

    import pooch.cli.commands  # noqa: F401  (as the command line has them)
    from pooch.torchtools.memory_trace import live_bytes
    from pooch.workloads import load_workload

    work = load_workload(workload)
    taken = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    tensor_bytes = live_bytes(torch.device("cpu"))
    del work
    return {"base_bytes": 1024 * int(taken.split()[1]) - tensor_bytes}


def _measure_cost(workload: str) -> dict[str, Any]:
    """Run in the child: seconds of wall-clock time, by kind."""
    import time

    import pooch.api.profiling  # its modules are loaded once, and not for each profile
    from pooch.workloads import load_workload

    def timed_s(run: Any) -> float:
        begin_s = time.perf_counter()
        run()
        return time.perf_counter() - begin_s

    def plain_step() -> None:
        work.model.zero_grad(set_to_none=True)
        work.forward().backward()

    work = load_workload(workload)
    plain_s = [timed_s(plain_step) for _ in range(4)][1:]
    profile_s = timed_s(lambda: pooch.profile(work.forward, work.model, work.optimizer))
    plain_s += [timed_s(plain_step) for _ in range(3)]
    return {"plain_s": plain_s, "profile_s": profile_s}


def measured(workload: str, budget: str, steps: int) -> dict[str, Any]:
    """One workload: how plain training ended, what `optimize` reports, and what profiling costs."""
    budget_bytes = parse_budget(budget, None)
    base_bytes = _asked("--base-of", workload)["base_bytes"]
    limit_bytes = budget_bytes + base_bytes + BESIDE_BYTES
    tell(f"{workload}: plain training under {format_bytes(limit_bytes)}")
    plain = limited(["run", workload, "--steps", "1"], limit_bytes)
    tell(f"{workload}: pooch optimize --budget {budget} under the same limit")
    asked = ["--budget", str(budget_bytes), "--steps", str(steps), "--check", "--json"]
    planned = limited(["optimize", workload, *asked], limit_bytes)
    tell(f"{workload}: what profiling costs")
    return {
        "workload": workload,
        "budget_bytes": budget_bytes,
        "base_bytes": base_bytes,
        "limit_bytes": limit_bytes,
        "plain_exit_code": plain.returncode,
        "plain_last_words": (plain.stderr.strip().splitlines() or [""])[-1],
        "planned_exit_code": planned.returncode,
        "planned_last_words": (planned.stderr.strip().splitlines() or [""])[-1] if planned.returncode else "",
        "planned": json.loads(planned.stdout) if planned.stdout.startswith("{") else None,
        "cost": _asked("--cost-of", workload),
    }


def row_of(found: dict[str, Any]) -> Row:
    """One line of the table."""
    training = (found["planned"] or {}).get("training") or {}
    plan = (found["planned"] or {}).get("plan") or {}
    cost = found["cost"]
    plain_s = statistics.median(cost["plain_s"])
    in_core_bytes, peak_bytes = plan.get("in_core_peak_bytes"), training.get("measured_peak_bytes")
    equal = {True: "yes", False: "NO", None: "not compared"}[training.get("bitwise_equal")]
    against = {"offloaded": " (saved tensors moved away)", "plain": " (plain)"}.get(training.get("compared_with"), "")
    return {
        "workload": found["workload"],
        "limit (`ulimit -d`)": format_bytes(found["limit_bytes"]),
        "budget": format_bytes(found["budget_bytes"]),
        "in-core peak, traced": format_bytes(in_core_bytes) if in_core_bytes else "",
        "plain training": "dies" if found["plain_exit_code"] else "GOES THROUGH",
        "optimize": "trains"
        if found["planned_exit_code"] == 0
        else f"FAILS: {found['planned_last_words'][:_LAST_WORDS]}",
        "measured peak": format_bytes(peak_bytes) if peak_bytes else "",
        "same bits": equal + against,
        "plain step": f"{plain_s:.2f} s",
        "profiling": f"{cost['profile_s']:.1f} s = {cost['profile_s'] / plain_s:.1f} plain steps",
    }


def main() -> None:
    """Measure what was asked for; print the table; write the results after each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", help=f"default: {', '.join(BUDGETS)}")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cost-only", action="store_true", help="measure again what profiling costs; the rest is kept")
    parser.add_argument("--cost-of", help=argparse.SUPPRESS)
    parser.add_argument("--base-of", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    if arguments.cost_of or arguments.base_of:
        answer = _measure_cost(arguments.cost_of) if arguments.cost_of else _measure_base(arguments.base_of)
        sys.stdout.write(json.dumps(answer))
        return
    if arguments.cost_only:
        stored = json.loads((arguments.output / "does-not-fit-cpu.json").read_text())["results"]
        results = [found | {"cost": _asked("--cost-of", found["workload"])} for found in stored]
    else:
        results = [measured(name, BUDGETS[name], arguments.steps) for name in arguments.workload or BUDGETS]
    rows = [row_of(found) for found in results]
    write_results("does-not-fit-cpu", "Steps that do not fit, from a cold start", rows, results, arguments.output)
    sys.stdout.write(markdown_table(rows) + "\n")


if __name__ == "__main__":
    main()
