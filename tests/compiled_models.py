"""Small networks of the kinds that people compile, and training them with and without Pooch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

Way = Callable[[nn.Module, str], nn.Module]
ROWS, LENGTH, WIDTH = 8, 64, 64


class Attention(nn.Module):
    """A block of a language model, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.projection, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, rows: Tensor) -> Tensor:
        query, key, value = self.projection(self.norm(rows)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        rows = rows + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return rows + self.dropout(self.down(functional.gelu(self.up(self.second(rows)))))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Two convolutions with batch normalization, whose running statistics change, around which there is a way."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.other = nn.BatchNorm2d(channels)

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.relu_(self.norm(self.first(images)))
        return functional.relu_(self.other(self.second(hidden)) + images)


class Experts(nn.Module):
    """A mixture of two experts: each row goes to one of them, so that sizes depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, rows: Tensor) -> Tensor:
        weights = self.router(rows).softmax(-1)
        weight, chosen = weights.max(-1)
        result = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).unsqueeze(-1)
            result = result + mine * weight.unsqueeze(-1) * expert(rows)
        return rows + result


class Language(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, block: Callable[[], nn.Module] = Attention) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.embedding(tokens)
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows).flatten(0, 1)  # type: ignore[no-any-return]


class Vision(nn.Module):
    """Patches of images, and blocks over them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, 4, 4), nn.Linear(WIDTH, 10)
        self.blocks = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        rows = self.patches(images).flatten(2).transpose(1, 2).contiguous()
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows).mean(1)  # type: ignore[no-any-return]


class Convolutions(nn.Module):
    """Residual blocks over images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        images = self.stem(images)
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean((2, 3)))  # type: ignore[no-any-return]


class Skips(nn.Module):
    """A network in the shape of a U: what goes down is read again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.merges = nn.ModuleList(nn.Conv2d(32, 16, 1) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        first = self.blocks[0](self.stem(images))
        second = self.blocks[1](functional.max_pool2d(first, 2))
        images = self.blocks[2](functional.max_pool2d(second, 2))
        for merge, skip in zip(self.merges, (second, first), strict=True):
            images = merge(torch.cat([functional.interpolate(images, scale_factor=2.0), skip], 1))
        return self.head(images.mean((2, 3)))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM, which stays as it is, and blocks over what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(50, WIDTH), nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, 50)
        self.blocks = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # oneDNN has no such kernel on every machine
            rows, _ = self.lstm(self.embedding(tokens))
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows).flatten(0, 1)  # type: ignore[no-any-return]


def mixture() -> nn.Module:
    """A language model of mixtures of experts."""
    return Language(Experts)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "language": Language, "vision": Vision, "convolutions": Convolutions, "skips": Skips, "recurrent": Recurrent,
    "mixture": mixture,
}  # fmt: skip


def blocks_in_place(model: nn.Module, backend: str) -> nn.Module:
    """Compile each block where it is."""
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend=backend)
    return model


def blocks_wrapped(model: nn.Module, backend: str) -> nn.Module:
    """Put a compiled block in place of each."""
    model.blocks = nn.ModuleList(torch.compile(block, backend=backend) for block in model.blocks)  # type: ignore
    return model


def whole(model: nn.Module, backend: str) -> nn.Module:
    """Compile all of it."""
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def whole_without_breaks(model: nn.Module, backend: str) -> nn.Module:
    """Compile all of it as one graph."""
    return torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[return-value]


def whole_in_place(model: nn.Module, backend: str) -> nn.Module:
    """Compile all of it where it is."""
    model.compile(backend=backend)
    return model


@dataclass(frozen=True)
class Trained:
    """What training has given.

    Attributes:
        losses: Of the steps.
        tensors: Parameters, gradients of the last step and buffers.
        compiled: How many graphs and frames were compiled.
        random: The state of the generator.
    """

    losses: list[float]
    tensors: list[Tensor]
    compiled: tuple[int, int]
    random: Tensor

    def is_as(self, other: Trained) -> bool:
        """Whether all bits are the same."""
        return (
            self.losses == other.losses
            and torch.equal(self.random, other.random)
            and len(self.tensors) == len(other.tensors)
            and all(map(torch.equal, self.tensors, other.tensors))
        )


def data_of(name: str, generator: torch.Generator, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Return inputs and targets for a model."""
    if name in ("vision", "convolutions", "skips"):
        return torch.randn(ROWS, 3, 32, 32, generator=generator), torch.randint(10, (ROWS,), generator=generator)
    tokens = torch.randint(50, (2 * ROWS, length), generator=generator)
    return tokens, tokens.roll(1).flatten()


def trained(
    name: str,
    way: Way,
    backend: str,
    *,
    steps: int = 5,
    autocast: bool = False,
    lengths: tuple[int, ...] = (LENGTH,),
    prepared: Callable[[Any], Any] = nullcontext,
    prepare: Callable[[Tensor], None] = lambda inputs: None,
) -> Trained:
    """Train a model that is compiled in some way, from the same seeds, and count what is compiled.

    Args:
        name: Of the model.
        way: How it is compiled.
        backend: By what.
        steps: How many steps.
        autocast: Whether in bfloat16.
        lengths: Of the sequences, in turns.
        prepared: Returns the context of the training, given the model.
        prepare: Called with the inputs of each step.
    """
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = way(MODELS[name](), backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, losses = torch.Generator().manual_seed(1), []
    with prepared(model):
        for step in range(steps):
            inputs, targets = data_of(name, generator, lengths[step % len(lengths)])
            prepare(inputs)
            optimizer.zero_grad()
            with torch.autocast("cpu", enabled=autocast):
                loss = functional.cross_entropy(model(inputs).float(), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    tensors = [each.detach().clone() for each in (*model.parameters(), *gradients, *model.buffers())]
    compiled = (counters["stats"]["unique_graphs"], counters["frames"]["total"])
    return Trained(losses, tensors, compiled, torch.get_rng_state())
