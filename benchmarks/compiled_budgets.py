"""A model that is compiled as a whole, under PyTorch's own `activation_memory_budget` and under Pooch.

    python -m benchmarks.compiled_budgets [--backend inductor] [--ratios 0.2 0.5 0.8] [--steps 12]

At each ratio, the peak that PyTorch's own takes is measured. Pooch gets it as its budget in bytes. Steps of one come
after those of the other, since both models would share what is compiled: times that differ by 20% say nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._functorch import config
from torch.nn import functional

import pooch
from benchmarks.tables import Row, markdown_table, tell
from pooch.ground.units import format_bytes
from pooch.torchtools.memory_meter import MemoryMeter

WIDTH, HEADS, LENGTH, ROWS, TOKENS = 256, 4, 128, 8, 512
WARM_UP_STEPS = 8  # of which Pooch records one, and plans beside the others
DEVICE = torch.device("cpu")


class Block(nn.Module):
    """A block of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.projection, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        """Return rows."""
        parts = self.projection(self.norm(rows)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        rows = rows + self.out(mixed.transpose(1, 2).flatten(2))
        return rows + self.down(functional.gelu(self.up(self.second(rows))))  # type: ignore[no-any-return]


class Language(nn.Sequential):
    """Blocks between an embedding and a head."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__(nn.Embedding(TOKENS, WIDTH), *(Block() for _ in range(blocks)), nn.Linear(WIDTH, TOKENS))


def step_of(model: nn.Module) -> Callable[[], Tensor]:
    """Return a training step of a model, always on the same data."""
    tokens = torch.randint(TOKENS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))

    def step() -> Tensor:
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step


def built(backend: str) -> nn.Module:
    """Return a model that is compiled at its first call."""
    torch.manual_seed(0)
    model = Language()
    model.compile(backend=backend)
    return model


def peak_bytes(step: Callable[[], Tensor]) -> int:
    """Return the highest live bytes of a step."""
    with MemoryMeter(DEVICE) as meter:
        step()
    return meter.peak_bytes


def times_ms(step: Callable[[], Tensor], steps: int) -> float:
    """Return what a step takes, as a median."""
    times = []
    for _ in range(steps):
        begin_s = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - begin_s))
    return statistics.median(times)


def compared(backend: str, ratio: float, steps: int) -> Row:
    """Train under PyTorch's own budget, and under Pooch at the peak that it takes."""
    tell(f"{backend}, {ratio}")
    torch._dynamo.reset()
    with config.patch(activation_memory_budget=ratio):
        theirs = step_of(built(backend))
        theirs()
    most_bytes, their_ms = peak_bytes(theirs), times_ms(theirs, steps)
    del theirs
    torch._dynamo.reset()
    model = built(backend)
    with pooch.auto(model, most_bytes, tell=tell) as auto:
        ours = step_of(model)
        times_ms(ours, WARM_UP_STEPS)
        our_ms = times_ms(ours, steps)
        summary = auto.summary()
    return {
        "backend": backend,
        "ratio": ratio,
        "measured peak": format_bytes(most_bytes),
        "ms": f"{their_ms:.0f}",
        "Pooch at this budget, ms": f"{our_ms:.0f}",
        "Pooch / PyTorch's own": f"{our_ms / their_ms:.2f}",
        "steps over it": f"{summary.steps_over_budget} of {summary.steps}",
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["aot_eager", "inductor"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.2, 0.4, 0.6, 0.8])
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    print(
        markdown_table(
            [compared(backend, ratio, options.steps) for backend in options.backend for ratio in options.ratios]
        )
    )


if __name__ == "__main__":
    main()
