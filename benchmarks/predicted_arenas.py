"""Arenas that were predicted from a plan's schedule, beside those of recorded steps.

    python -m benchmarks.predicted_arenas

It profiles and plans each workload of `benchmarks.arena` as that does, predicts the blocks of the step, packs them, and
compares with what that benchmark recorded (`benchmarks/results/arena-cpu.json`): the most bytes that live at once, and
the arena.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.arena import NAME as RECORDED
from benchmarks.arena import WORKLOADS
from benchmarks.tables import Row, tell, write_results
from pooch.ground.units import format_bytes

NAME, TITLE = "predicted-arenas", "Predicted arenas beside recorded ones"
_TIME_LIMIT_S = 2


def predicted(name: str, is_planned: bool, folder: Path) -> dict[str, Any]:
    """Profile, plan if asked to, and pack the predicted blocks."""
    import torch

    from pooch.api.planning import plan
    from pooch.api.profiling import profile_workload
    from pooch.errors import InfeasibleBudget
    from pooch.workloads import WorkloadFactory

    torch.set_num_threads(1)
    profile = profile_workload(WorkloadFactory(name, settings=WORKLOADS[name])())
    path = folder / "profile.json"
    profile.save(path)
    command = [str(path)]
    if is_planned:
        try:
            made = plan(profile, "60%", region="step")
        except InfeasibleBudget:
            made = plan(profile, "min", region="step")
        made.save(folder / "plan.json")
        command = [str(folder / "plan.json"), "--profile", str(path)]
    packed = subprocess.run(
        [sys.executable, "-m", "pooch", "pack", *command, "--json", "--time-limit", str(_TIME_LIMIT_S)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(packed.stdout)
    return found


def recorded(results: list[dict[str, Any]], name: str, is_planned: bool) -> dict[str, Any]:
    """Return what the arena of a recorded step was."""
    mine = next(each for each in results if each["workload"] == name and bool(each["plan"]) == is_planned)
    found: dict[str, Any] = mine["allocators"]["arena"]["arena"]
    return found


def rows_of(found: list[dict[str, Any]]) -> list[Row]:
    """One row for each step."""
    return [
        {
            "workload": each["workload"],
            "": "planned" if each["planned"] else "plain",
            "live at once, predicted": format_bytes(each["predicted"]["bound_bytes"]),
            "recorded": format_bytes(each["recorded"]["bound_bytes"]),
            "predicted / recorded": f"{each['predicted']['bound_bytes'] / each['recorded']['bound_bytes']:.4f}",
            "arena, predicted": format_bytes(each["predicted"]["arena_bytes"]),
            "arena, recorded": format_bytes(each["recorded"]["arena_bytes"]),
        }
        for each in found
    ]


def main() -> None:
    """Predict, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--folder", type=Path, default=Path("benchmarks/results"))
    folder = parser.parse_args().folder
    results = json.loads((folder / f"{RECORDED}.json").read_text())["results"]
    found = []
    for name in WORKLOADS:
        for is_planned in (False, True):
            tell(f"{name}, {'planned' if is_planned else 'plain'}")
            with TemporaryDirectory(prefix="predicted-") as temporary:
                mine = predicted(name, is_planned, Path(temporary))
            theirs = recorded(results, name, is_planned)
            found.append({"workload": name, "planned": is_planned, "predicted": mine, "recorded": theirs})
    write_results(NAME, TITLE, rows_of(found), found, folder)


if __name__ == "__main__":
    main()
