"""Small networks as they are exported: convolutions with batch norm, a transformer, a 3D U-Net, an LSTM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.onnx.support import export


class ConvNet(nn.Module):
    """Residual blocks with batch norms and a dropout."""

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(blocks)
        )
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        features = functional.max_pool2d(self.stem(images), 2)
        for block in self.blocks:
            features = features + block(features)
        return self.head(self.dropout(features.mean((2, 3))))


class Transformer(nn.Module):
    """A causal language model of two blocks."""

    def __init__(self, vocabulary: int = 40, width: int = 32, heads: int = 2, length: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(1, length, width))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "before": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width),
                    "after": nn.LayerNorm(width), "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(2)
        )  # fmt: skip
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions
        for block in self.blocks:
            hidden = hidden + self._attend(block, block["before"](hidden))
            hidden = hidden + block["down"](functional.gelu(block["up"](block["after"](hidden))))
        return self.head(hidden)

    def _attend(self, block: Any, hidden: Tensor) -> Tensor:
        split = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in block["qkv"](hidden).chunk(3, -1)]
        mixed = functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        return block["out"](mixed.transpose(1, 2).flatten(2))


class UNet3d(nn.Module):
    """One level down and up again, with a skip connection."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(1, width, 3, padding=1), nn.InstanceNorm3d(width, affine=True), nn.PReLU())
        self.bottom = nn.Sequential(nn.Conv3d(width, 2 * width, 3, padding=1), nn.BatchNorm3d(2 * width), nn.ReLU())
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.last = nn.Conv3d(2 * width, 3, 1)

    def forward(self, volume: Tensor) -> Tensor:
        skip = self.down(volume)
        deep = self.up(self.bottom(functional.max_pool3d(skip, 2)))
        return self.last(torch.cat((skip, deep), 1))


class Recurrent(nn.Module):
    """Two LSTM layers over tokens."""

    def __init__(self, vocabulary: int = 30, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


@dataclass(frozen=True)
class Exported:
    """How a network is exported, and what its file must come to.

    Attributes:
        trains: exported as it trains, with batch norms on the batch and dropouts that drop.
        parameters: how many of them the file has.
        older: by PyTorch's older exporter, which marks no parameters, and writes training_mode.
        batch: for --batch-size; None where the file fixes it.
    """

    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    trains: bool
    parameters: int
    batch: int | None = None
    older: bool = False

    def save(self, path: Path) -> Path:
        torch.manual_seed(0)
        model = self.make().train(self.trains)
        if self.older:
            mode = torch.onnx.TrainingMode.TRAINING if self.trains else torch.onnx.TrainingMode.EVAL
            return export(model, self.inputs, path, dynamo=False, training=mode, do_constant_folding=not self.trains)
        options: dict[str, Any] = {"optimize": False} if self.trains else {}
        if self.batch:
            options["dynamic_shapes"] = ({0: torch.export.Dim("batch")},)
        return export(model, self.inputs, path, **options)


# Large enough that a plan moves them: smaller tensors are always kept.
NETS = {
    "convolutions": Exported(ConvNet, (torch.randn(2, 3, 12, 12),), True, 13, batch=16),
    # The exporter stores equal weights once, and layer norms begin alike: 22 of the 28 are left.
    "transformer": Exported(Transformer, (torch.zeros(2, 12, dtype=torch.int64),), False, 22, batch=16),
    "unet3d": Exported(UNet3d, (torch.randn(2, 1, 16, 16, 16),), True, 13, older=True),
    "lstm": Exported(Recurrent, (torch.zeros(16, 12, dtype=torch.int64),), False, 9, older=True),
}
