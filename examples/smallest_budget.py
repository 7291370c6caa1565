"""The smallest budget of a network, and what each budget above it costs in time."""

from __future__ import annotations

import pooch_planner as pooch
import torch


def main() -> None:
    """Plan one profile under several budgets; nothing is trained."""
    model = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU())
          for _ in range(8)]
    )  # fmt: skip
    images = torch.randn(8, 16, 64, 64)
    profile = pooch.profile(lambda: model(images).square().mean(), model)

    smallest = pooch.smallest_budget(profile)
    print(f"in-core {profile.peak_bytes / 2**20:.1f} MiB, smallest budget {smallest / 2**20:.1f} MiB")
    for share in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0):
        budget = int(smallest + share * (profile.peak_bytes - smallest))
        plan = pooch.plan(profile, budget, explain=False)
        slowdown = plan.predicted_step_ms / profile.step_ms
        print(f"{budget / 2**20:6.1f} MiB: {slowdown:.3f} times the plain step, gap {plan.gap:.1%}")


if __name__ == "__main__":
    main()
