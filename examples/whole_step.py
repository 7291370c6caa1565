"""A loss with activations of its own, computed outside of the model: the plan covers the whole step."""

from __future__ import annotations

import pooch_planner as pooch
import torch
from torch.nn.functional import avg_pool2d, softplus


def multi_scale_loss(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Distance of two batches of feature maps, of shape (batch, channels, height, width), at four scales."""
    loss = torch.zeros(())
    for scale in (1, 2, 4, 8):
        difference = avg_pool2d(prediction, scale) - avg_pool2d(target, scale)
        loss = loss + (softplus(difference) * torch.tanh(difference)).square().mean()
    return loss


def main() -> None:
    """Compare both regions, then train three steps under a plan of the whole step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.SiLU(), torch.nn.Conv2d(16, 16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    images, target = torch.randn(8, 3, 96, 96), torch.randn(8, 16, 96, 96)

    def forward() -> torch.Tensor:
        return multi_scale_loss(model(images), target)

    profile = pooch.profile(forward, model, optimizer)
    for region in ("model", "step"):
        smallest = pooch.smallest_budget(profile, region=region)
        print(f"region {region!r}: at least {smallest / 2**20:.0f} of {profile.peak_bytes / 2**20:.0f} MiB")

    plan = pooch.plan(profile, "min", region="step")
    with pooch.apply(plan, model) as run:
        for _ in range(3):
            with run.step():
                loss = forward()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(run.totals)


if __name__ == "__main__":
    main()
