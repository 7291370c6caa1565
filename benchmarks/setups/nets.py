"""Small networks and random data that the scripts share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def pictures(batch_size: int, side: int = 64, channels: int = 3) -> Tensor:
    """Of shape (batch, channels, side, side)."""
    return torch.randn(batch_size, channels, side, side)


def conv_net(classes: int = 10, width: int = 24, blocks: int = 4) -> nn.Sequential:
    """Convolutions with batch norm, in-place activations and dropout; takes pictures of any size."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(blocks):
        layers.append(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Dropout(0.1)
            )
        )
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def mlp(width: int = 512, depth: int = 8, inputs: int = 256, outputs: int = 64) -> nn.Sequential:
    """Linear layers with GELU."""
    layers: list[nn.Module] = [nn.Linear(inputs, width), nn.GELU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.before_attention(x)).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class LanguageModel(nn.Module):
    """Tokens (batch, length) -> logits (batch, length, words)."""

    def __init__(self, words: int = 200, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
