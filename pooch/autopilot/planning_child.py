"""The child process of `worker`: completes a profile with what this machine's link and hooks cost, and plans it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from ..api.children import errors_sent, send
from ..api.hook_costs import with_hook_costs
from ..api.options import PlanOptions
from ..api.planning import plan_here
from ..ir import Plan, Profile
from ..progress import silent

NICENESS = 10  # the training step goes first


def main() -> None:
    """Read the job, measure what is not known yet, plan, and write profile and plan."""
    job = json.loads(sys.stdin.read())
    folder = Path(job["folder"])
    os.nice(NICENESS)
    with errors_sent():
        profile = _completed(Profile.load(folder / "profile.json"), folder / "link.json")
        profile.save(folder / "profile.json")
        made = _planned(profile, job["budget_bytes"], PlanOptions(**job["options"]))
        made.save(folder / "plan.json")
        send({"done": True})


def _planned(profile: Profile, budget_bytes: int, options: PlanOptions) -> Plan:
    return plan_here(profile, budget_bytes, options, known=(), progress=None)


def _completed(profile: Profile, known: Path) -> Profile:
    if known.exists():
        earlier = Profile.load(known)
        return replace(profile, link=earlier.link, hooks=earlier.hooks)
    import torch

    from ..api.device_links import measure_device_link

    torch.set_num_threads(1)
    return with_hook_costs(replace(profile, link=measure_device_link(torch.device("cpu"))), silent)


if __name__ == "__main__":
    main()
