"""A plain training script that knows nothing of Pooch: `pooch exec --budget 60% examples/plain_script.py`."""

from __future__ import annotations

import argparse

import torch
from torch import nn


def main() -> None:
    """Train a small convolutional network on noise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.Flatten(), nn.LazyLinear(10))
    images = torch.randn(options.batch_size, 3, 32, 32)
    labels = torch.randint(0, 10, (options.batch_size,))
    model(images[:1])  # shapes of the lazy layer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(options.steps):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item().hex()}")


if __name__ == "__main__":
    main()
