"""An engine of ignite within a budget: one line before the engine runs."""

from __future__ import annotations

import pooch_planner as pooch
import torch
from ignite.engine import create_supervised_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train on random pictures."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.LazyConv2d(24, 3), nn.LazyBatchNorm2d(), nn.ReLU()) for _ in range(4)],
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10),
    )  # fmt: skip
    pictures = torch.randn(72, 3, 64, 64)
    model(pictures[:1])  # makes the lazy layers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = DataLoader(TensorDataset(pictures, torch.randint(10, (72,))), batch_size=16)
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())

    with pooch.auto(model, "60MiB", optimizer) as auto:
        trainer.run(data, max_epochs=2)
        print(auto.summary())


if __name__ == "__main__":
    main()
