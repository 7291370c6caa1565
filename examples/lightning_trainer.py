"""Lightning's Trainer within a budget: one callback, and nothing else changes."""

from __future__ import annotations

import lightning
import torch
from pooch_planner.integrations.lightning import PoochCallback
from torch import Tensor, nn


class Classifier(lightning.LightningModule):
    """Convolutions, with the loss in `training_step` as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.BatchNorm2d(24), nn.ReLU(),
            nn.Conv2d(24, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(24, 10)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        pictures, labels = batch
        return nn.functional.cross_entropy(self.head(self.net(pictures)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters())


def main() -> None:
    """Train on random pictures."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(80, 3, 64, 64), torch.randint(10, (80,)))
    pooch = PoochCallback("60MiB")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[pooch],
    )  # fmt: skip
    trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=16))
    print(pooch.summary())


if __name__ == "__main__":
    main()
