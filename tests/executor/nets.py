"""Small networks of every kind, told as a `Job`: a model, an optimizer, and a forward pass with fresh data each
step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class Job:
    """What a user trains. `batch`: the inputs of one step, drawn anew for each from the job's own generator."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    draw: Callable[[torch.Generator], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    device: torch.device

    def __post_init__(self) -> None:
        self._generator = torch.Generator("cpu").manual_seed(7)
        self.next_batch()

    def next_batch(self) -> None:
        """Replace the batch."""
        with torch.device("cpu"):
            drawn = self.draw(self._generator)
        self.batch = tuple(tensor.to(self.device) for tensor in drawn)

    def forward(self) -> Tensor:
        """The forward pass up to the loss."""
        return self.loss(self.model, self.batch)


class ConvNet(nn.Module):
    """Convolutions, batch norm with running statistics, in-place relu, dropout, pooling."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Dropout(0.2),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU(), nn.Dropout2d(0.2),
        )  # fmt: skip
        self.head = nn.Linear(width, 4)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.body(pixels).mean((2, 3)))


class Block(nn.Module):
    """A transformer block with attention dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        query, key, value = self.mix(self.first(hidden)).view(batch, length, 3, 2, width // 2).unbind(2)
        chance = 0.1 if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), dropout_p=chance, is_causal=True
        )
        hidden = hidden + functional.dropout(self.out(mixed.transpose(1, 2).reshape(hidden.shape)), 0.1, self.training)
        return hidden + self.down(functional.gelu(self.up(self.second(hidden))))


class Transformer(nn.Module):
    """A language model whose embedding and head share their weight."""

    def __init__(self, width: int, depth: int = 2, words: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)  # else probabilities are denormal, and those are slow

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Recurrent(nn.Module):
    """A two-layer LSTM language model with dropout."""

    def __init__(self, width: int, words: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.lstm(self.embed(tokens))[0]))


class UNet(nn.Module):
    """Two levels, long skips, instance norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = self._convolutions(3, width)
        self.middle = self._convolutions(width, 2 * width)
        self.bottom = self._convolutions(2 * width, 2 * width)
        self.rise = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.right = self._convolutions(3 * width, width)
        self.leave = self._convolutions(2 * width, 3)
        self.up = nn.Upsample(scale_factor=2)

    @staticmethod
    def _convolutions(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.InstanceNorm2d(outer, affine=True),
            nn.LeakyReLU(0.1, inplace=True),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        first = self.enter(pixels)
        second = self.middle(functional.max_pool2d(first, 2))
        bottom = self.bottom(functional.max_pool2d(second, 2))
        right = self.right(torch.cat([second, self.rise(bottom)], 1))
        return self.leave(torch.cat([first, self.up(right)], 1))


def _tokens(rows: int, columns: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda generator: (torch.randint(0, 50, (rows, columns), generator=generator),)


def _language_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten())


def _image_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _picture_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[0])


def make_job(kind: str, size: int = 1, device: str | torch.device | None = None) -> Job:
    """A job from the same seed each time. `size`: 1 is tiny; 2 has activations of at least 1 MiB. `device`: the
    default one if it is not given.
    """
    device = device or torch.get_default_device()
    torch.manual_seed(3)
    big = size > 1
    if kind == "conv":
        side, batch = (64, 8) if big else (8, 2)
        model: nn.Module = ConvNet(16 if big else 4)

        def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
            pixels = torch.rand(batch, 3, side, side, generator=generator)
            return pixels, torch.randint(0, 4, (batch,), generator=generator)

        loss = _image_loss
    elif kind == "unet":
        side, batch = (128, 2) if big else (8, 2)
        model, loss = UNet(16 if big else 4), _picture_loss

        def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
            return (torch.rand(batch, 3, side, side, generator=generator),)

    elif kind == "transformer":
        model, loss = Transformer(128 if big else 8), _language_loss
        draw = _tokens(*((16, 128) if big else (2, 6)))
    else:
        model, loss = Recurrent(128 if big else 8), _language_loss
        draw = _tokens(*((16, 128) if big else (2, 6)))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Job(model, optimizer, draw, loss, torch.device(device))


KINDS = ("conv", "transformer", "recurrent", "unet")
