"""The tutorial's script: profile one step, plan it at 60% of its memory, train under the plan."""

from __future__ import annotations

import pooch_planner as pooch
import torch


def make(batch_size: int = 4096, device: str = "cpu") -> pooch.Workload:
    """The tutorial's model and data, for the command line: `pooch optimize examples/tutorial.py:make --budget 60%`."""
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(12)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(512, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(batch_size, 512, device=device)
    targets = torch.randint(10, (batch_size,), device=device)
    return pooch.Workload(model, lambda: torch.nn.functional.cross_entropy(model(inputs), targets), optimizer)


def main() -> None:
    """Train five steps under a plan."""
    workload = make()
    model, forward, optimizer = workload.model, workload.forward, workload.optimizer
    assert optimizer is not None

    profile = pooch.profile(forward, model, optimizer)
    print(f"plain training needs {profile.peak_bytes / 2**20:.0f} MiB and takes {profile.step_ms:.0f} ms a step")

    plan = pooch.plan(profile, budget="60%")
    print(f"{plan.predicted_peak_bytes / 2**20:.0f} MiB, {plan.predicted_step_ms:.0f} ms, {plan.status}")
    print(plan.to_frame()[["choice", "label", "reason"]].head())

    with pooch.apply(plan, model) as run:
        for _ in range(5):
            loss = forward()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(run.stats)
    print(run.totals)


if __name__ == "__main__":
    main()
