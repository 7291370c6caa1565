"""Smallest budgets of sharded training, and its collectives: FSDP2 over gloo, with a plan and without.

    python -m benchmarks.sharded [--ranks 2 4] [--only NAME ...]

Each rank profiles its step, and plans it for the smallest budget without a swap tier, so that everything that leaves is
recomputed: once with replays that read gathered parameters, once without. It then trains under the first plan and
plainly, and compares gradients, parameters and losses bit by bit. Peaks are the highest of all ranks, beyond what lives
before the step.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing

import pooch
from benchmarks.sharded_cases import CASES, Case, collectives, texts
from benchmarks.tables import LAYOUT, Row, markdown_table, surroundings, tell, write_results
from pooch.executor import apply_plan
from pooch.ground.units import format_bytes
from pooch.ir import Link, Plan, Profile
from pooch.profiler import ProfileOptions, profile_step
from pooch.torchtools.memory_meter import MemoryMeter
from pooch.torchtools.memory_trace import live_bytes

RANKS, ON_MORE_RANKS = 2, ("blocks", "no reshard after forward")
WIDTH, BLOCKS, LENGTH, STEPS = 64, 4, 128, 2
NO_TIER_BYTES = 1  # of host memory: nothing can be swapped
LINK = Link("none", 0.1, 0.1, 1e6, 1e6)
CPU = torch.device("cpu")


def measure(case: Case, ranks: int) -> dict[str, Any]:
    """Trains one case in processes of its own, and returns what each rank found."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (case.name, ranks, folder)
        multiprocessing.spawn(_rank, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {"case": case.name, "ranks": ranks, "found": found}


def _rank(rank: int, name: str, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(minutes=5)
    )
    found = _measure_here(CASES[name], rank)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    gc.collect()  # models hold their process group, and it has to go before the process does
    distributed.barrier()
    distributed.destroy_process_group()


def _measure_here(case: Case, rank: int) -> dict[str, Any]:
    profile = _profile(case, rank)
    persistent_bytes = profile.persistent_bytes
    banned_bytes = _smallest(replace(profile, gathered=()))
    smallest_bytes = _smallest(profile)
    plan = pooch.plan(profile, smallest_bytes, region="step", host_budget=NO_TIER_BYTES, effort="fast", explain=False)
    plain, plain_counts, plain_bytes = _train(case, rank, None)
    planned, planned_counts, planned_bytes = _train(case, rank, plan)
    return {
        "in_core_bytes": profile.peak_bytes - persistent_bytes,
        "banned_bytes": banned_bytes - persistent_bytes,
        "smallest_bytes": smallest_bytes - persistent_bytes,
        "replays": _replays_that_read_gathered(plan, profile),
        "plain_bytes": plain_bytes,
        "planned_bytes": planned_bytes,
        "unit_bytes": max(sum(profile.values[value].size_bytes for value in unit.values) for unit in profile.gathered),
        "plain_collectives": dict(plain_counts),
        "planned_collectives": dict(planned_counts),
        "is_same": plain.keys() == planned.keys() and all(torch.equal(plain[key], planned[key]) for key in plain),
    }


def _profile(case: Case, rank: int) -> Profile:
    model, words = case.model(WIDTH, BLOCKS, LENGTH), texts(rank, LENGTH)
    options = ProfileOptions(warmup=0, repeats=1, mode="run")
    return profile_step(lambda: model(words), model, None, LINK, options).profile


def _smallest(profile: Profile) -> int:
    return pooch.smallest_budget(profile, region="step", host_budget=NO_TIER_BYTES)


def _replays_that_read_gathered(plan: Plan, profile: Profile) -> int:
    gathered = {value for unit in profile.gathered for value in unit.values}
    replayed = [action.target for action in plan.schedule.actions if action.kind == "replay"]
    return sum(not gathered.isdisjoint(profile.ops[op].reads) for op in replayed)


def _train(case: Case, rank: int, plan: Plan | None) -> tuple[dict[str, Tensor], Counter[str], int]:
    """Some steps: what must have the same bits, the collectives of a step, and the highest peak above the start."""
    model = case.model(WIDTH, BLOCKS, LENGTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: dict[str, Tensor] = {}
    counted, peak_bytes = Counter[str](), 0
    with apply_plan(plan, model) if plan is not None else nullcontext() as run:
        for number in range(STEPS + 1):
            words, loss = texts(10 * number + rank, LENGTH), None
            optimizer.zero_grad()
            gc.collect()
            before_bytes = live_bytes(CPU)
            meter = MemoryMeter(CPU)
            # Both read torch's profiler, so one of them at a time.
            with meter if number < STEPS else collectives(counted):
                with run.step() if run is not None else nullcontext():
                    loss = model(words)
                loss.backward()
            peak_bytes = max(peak_bytes, meter.peak_bytes - before_bytes)
            if run is not None:
                assert (run.stats.mismatches, run.stats.late_swaps) == (0, 0), run.stats
            gradients = {n: p.grad.to_local() for n, p in model.named_parameters() if p.grad is not None}
            found |= {f"{number} {name}.grad": gradient.clone() for name, gradient in gradients.items()}
            found[f"{number} loss"] = loss.detach().clone()
            optimizer.step()
    found |= {name: parameter.to_local().clone() for name, parameter in model.state_dict().items()}
    return found, counted, peak_bytes


def _earlier(folder: Path, measured_now: Collection[tuple[str, int]]) -> list[dict[str, Any]]:
    """What is stored of the other ways to shard, if it was measured on this machine with these versions."""
    path = folder / "sharded.json"
    document = json.loads(path.read_text()) if path.exists() else {}
    alike = document.get("surroundings") == json.loads(json.dumps(surroundings())) and document["layout"] == LAYOUT
    return [each for each in document["results"] if (each["case"], each["ranks"]) not in measured_now] if alike else []


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table."""
    return [_row(result) for result in results]


def _row(result: Mapping[str, Any]) -> Row:
    found = result["found"]

    def highest(name: str) -> str:
        return format_bytes(max(each[name] for each in found))

    counts = [f"{each[f'{kind}_collectives']}" for each in found for kind in ("plain", "planned")]
    return {
        "sharding": result["case"],
        "ranks": result["ranks"],
        "in-core": highest("in_core_bytes"),
        "smallest, gathered not read": highest("banned_bytes"),
        "smallest": highest("smallest_bytes"),
        "measured under it": highest("planned_bytes"),
        "replayed ops that read gathered": min(each["replays"] for each in found),
        "collectives of a step": _counted(found[0]["plain_collectives"]),
        "under the plan": "the same" if len(set(counts)) == 1 else _counted(found[0]["planned_collectives"]),
        "same bits": "yes" if all(each["is_same"] for each in found) else "NO",
    }


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def main() -> int:
    """Measure, print, write; exit code 1 where a budget, a bit or a collective is not as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[RANKS, 4])
    parser.add_argument("--only", action="append", help="names of ways to shard")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    wanted = [
        (case, ranks)
        for ranks in arguments.ranks
        for case in CASES.values()
        if case.name in (arguments.only or (CASES if ranks == RANKS else ON_MORE_RANKS))
    ]
    results = _earlier(arguments.output, {(case.name, ranks) for case, ranks in wanted})
    for case, ranks in wanted:
        tell(f"{case.name} on {ranks} ranks")
        results.append(measure(case, ranks))
    names = list(CASES)
    results.sort(key=lambda result: (result["ranks"], names.index(result["case"])))
    rows = rows_of(results)
    write_results("sharded", "Smallest budgets and collectives of sharded training", rows, results, arguments.output)
    sys.stdout.write(markdown_table(rows) + "\n")
    return int(any(_is_broken(each) for result in results for each in result["found"]))


def _is_broken(found: Mapping[str, Any]) -> bool:
    """Whether a promise is broken. A thread of gloo's may let go of one unit's buffer later than when profiled."""
    over = found["planned_bytes"] > found["smallest_bytes"] + found["unit_bytes"]
    return over or not found["is_same"] or found["plain_collectives"] != found["planned_collectives"]


if __name__ == "__main__":
    sys.exit(main())
