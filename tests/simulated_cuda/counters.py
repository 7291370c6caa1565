"""Ten trainings in which nothing has to move, and what PyTorch's memory counters say after each of them.

`python -m tests.simulated_cuda.counters plain` and `... governed` print as JSON, by training, its losses, and of the
steps after the first ones the counters that began with them, and how much the others have grown.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pooch

STEPS = 6
PREPARING = 3  # steps that may be recorded, for which a linear layer adds its bias out of place
BUDGET = "3GiB"  # of which these trainings take little
Around = Callable[[list[nn.Module]], AbstractContextManager[object]]
Training = Callable[[Around], Iterator[Tensor]]
TRAININGS: dict[str, Training] = {}


def training(train: Training) -> Training:
    """List a training by its name."""
    TRAININGS[train.__name__] = train
    return train


def layers(*widths: int) -> nn.Sequential:
    """Linear layers with activations."""
    return nn.Sequential(*[part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.GELU())]).cuda()


def rows(*shape: int) -> Tensor:
    """Random numbers on the device."""
    return torch.randn(*shape, device="cuda")


def simple(model: nn.Module, make: Callable[[], Tensor], around: Around, optimizer: object = None) -> Iterator[Tensor]:
    """A loop as in every tutorial."""
    chosen = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    with around([model]):
        for _ in range(STEPS):
            loss = model(make()).float().square().mean()
            loss.backward()
            chosen.step()  # type: ignore[attr-defined]
            chosen.zero_grad()  # type: ignore[attr-defined]
            yield loss.detach()


@training
def perceptron(around: Around) -> Iterator[Tensor]:
    """Layers and SGD."""
    return simple(layers(64, 256, 256, 32), lambda: rows(512, 64), around)


@training
def with_adam(around: Around) -> Iterator[Tensor]:
    """State of an optimizer that appears in the first step."""
    model = layers(64, 128, 64)
    return simple(model, lambda: rows(256, 64), around, torch.optim.AdamW(model.parameters()))


@training
def convolutions(around: Around) -> Iterator[Tensor]:
    """Buffers that the forward pass writes to."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)).cuda()
    return simple(model, lambda: rows(4, 3, 24, 24), around)


@training
def attention(around: Around) -> Iterator[Tensor]:
    """Masks of dropout."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.2, batch_first=True).cuda()
    return simple(layer, lambda: rows(4, 32, 64), around)


@training
def steps_of_a_recurrence(around: Around) -> Iterator[Tensor]:
    """Many small ops."""

    class Recurrence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(16, 32)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = inputs.new_zeros(inputs.shape[1], 32)
            for each in inputs:
                hidden = self.cell(each, hidden)
            return hidden

    return simple(Recurrence().cuda(), lambda: rows(12, 64, 16), around)


@training
def mixed_precision(around: Around) -> Iterator[Tensor]:
    """Autocast."""
    model = layers(64, 256, 64)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, inputs: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                result: Tensor = self.inner(inputs)
            return result

    return simple(Cast(), lambda: rows(256, 64), around)


@training
def checkpointed(around: Around) -> Iterator[Tensor]:
    """The program's own saved tensor hooks."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers(64, 128, 64), layers(64, 128, 64)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden: Tensor = checkpoint(self.first, inputs, use_reentrant=False)
            result: Tensor = checkpoint(self.second, hidden, use_reentrant=False)
            return result

    return simple(Blocks().cuda(), lambda: rows(256, 64), around)


@training
def accumulated(around: Around) -> Iterator[Tensor]:
    """Two backward passes for a step of the optimizer."""
    model = layers(64, 128, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with around([model]):
        for _ in range(STEPS):
            optimizer.zero_grad()
            for _ in range(2):
                loss = model(rows(128, 64)).square().mean() / 2
                loss.backward()
            optimizer.step()
            yield loss.detach()


@training
def two_models(around: Around) -> Iterator[Tensor]:
    """A generator and a discriminator."""
    generator, critic = layers(16, 64, 32), layers(32, 64, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (generator, critic)]
    with around([generator, critic]):
        for _ in range(STEPS):
            made = generator(rows(64, 16))
            loss = critic(made.detach()).square().mean() + (critic(rows(64, 32)) - 1).square().mean()
            loss.backward()
            optimizers[1].step()
            (critic(made) - 1).square().mean().backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            yield loss.detach()


@training
def evaluated(around: Around) -> Iterator[Tensor]:
    """Forward passes without gradients between steps, and a loss over a vocabulary."""
    model = layers(32, 64, 100)
    optimizer = torch.optim.Adam(model.parameters())
    with around([model]):
        for _ in range(STEPS):
            loss = functional.cross_entropy(model(rows(128, 32)), torch.arange(128, device="cuda") % 100)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                yield loss.detach() + model(rows(256, 32)).mean()


def governed(models: list[nn.Module]) -> AbstractContextManager[object]:
    """A budget that is far away."""
    return pooch.auto(models, BUDGET, quiet=True)


def main() -> None:
    """Run all of them, one after the other."""
    around = governed if sys.argv[1] == "governed" else lambda models: nullcontext()
    found = {name: _ran(train, around) for name, train in TRAININGS.items()}
    sys.stdout.write(json.dumps(found) + "\n")


def _ran(train: Training, around: Around) -> dict[str, object]:
    torch.manual_seed(0)
    gc.collect()  # models whose classes are defined where they are made go with a collection
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses = []
    for loss in train(around):
        losses.append(loss.item().hex())
        if len(losses) == PREPARING:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()
    after = torch.cuda.memory_stats()
    peaks = {name: size for name, size in after.items() if name.endswith((".peak", ".current"))}
    growth = {name: size - before.get(name, 0) for name, size in after.items() if name not in peaks}
    highest = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"losses": losses, "highest": highest, "peaks": peaks, "growth": growth}


if __name__ == "__main__":
    main()
