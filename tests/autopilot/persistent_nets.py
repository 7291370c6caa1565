"""Small networks of the kinds that are trained with most of their memory in parameters, gradients and state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, HEADS = 300, 24, 4


class Block(nn.Module):
    """A block of a decoder, with one feed-forward part or with experts of which each token has one."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output, self.dropout = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.1)
        parts = [
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        ]
        self.parts = nn.ModuleList(parts)
        self.gate = nn.Linear(width, experts) if experts > 1 else None

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        heads = [
            each.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for each in self.inputs(self.before(hidden)).split(width, -1)
        ]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.dropout(self.output(attended.transpose(1, 2).reshape(batch, length, width)))
        normed = self.between(hidden)
        if self.gate is None:
            return hidden + self.parts[0](normed)
        shares = self.gate(normed).softmax(-1)
        chosen, out = shares.argmax(-1), torch.zeros_like(normed)
        for number, part in enumerate(self.parts):
            mask = chosen == number
            if mask.any():
                out[mask] = (part(normed[mask]) * shares[mask][:, number : number + 1]).to(out.dtype)
        return hidden + out


class Decoder(nn.Module):
    """A decoder, of which every second block may be checkpointed in either of the two ways."""

    def __init__(
        self, width: int = 96, blocks: int = 4, *, tied: bool = False, experts: int = 1, is_checkpointed: bool = False
    ) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*[Block(width, experts) for _ in range(blocks)])
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places.weight
        for number, block in enumerate(self.blocks):
            is_reentrant = number % 2 == 0
            hidden = checkpoint(block, hidden, use_reentrant=is_reentrant) if self.is_checkpointed else block(hidden)
        return self.head(self.last(hidden))


class LowRank(nn.Module):
    """A frozen layer with a trained update of low rank beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden) + hidden @ self.down.t() @ self.up.t()


class Residual(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(6)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            hidden = functional.relu(hidden + block(hidden))
        return self.head(hidden.mean((2, 3)))


def perceptron() -> nn.Module:
    return nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(192, 192), nn.Tanh())])


def low_rank() -> nn.Module:
    model = Decoder()
    model.requires_grad_(False)
    for block in model.blocks:
        block.inputs, block.output = LowRank(block.inputs), LowRank(block.output)
        block.parts[0][0] = LowRank(block.parts[0][0])
    return model


def partly_frozen() -> nn.Module:
    model = Decoder()
    model.tokens.requires_grad_(False)
    return model


def of_tokens(model: nn.Module) -> Tensor:
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH))
    return functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def of_images(model: nn.Module) -> Tensor:
    images, classes = torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))
    return functional.cross_entropy(model(images).float(), classes)


def of_rows(model: nn.Module) -> Tensor:
    return model(torch.randn(8, 192)).float().square().mean()


@dataclass(frozen=True)
class Net:
    """A network, and the loss of a random batch.

    Attributes:
        build: makes it.
        loss: of the model on a batch.
        groups: whether its optimizer has two groups of parameters.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    groups: bool = False


NETS = {
    "perceptron": Net(perceptron, of_rows),
    "decoder": Net(Decoder, of_tokens),
    "batch norm": Net(Residual, of_images),
    "low rank": Net(low_rank, of_tokens),
    "experts": Net(lambda: Decoder(blocks=3, experts=3), of_tokens),
    "tied": Net(lambda: Decoder(tied=True), of_tokens),
    "checkpointed": Net(lambda: Decoder(is_checkpointed=True), of_tokens),
    "groups": Net(partly_frozen, of_tokens, groups=True),
}
