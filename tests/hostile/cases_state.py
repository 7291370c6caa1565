"""State of modules that moves: statistics, power iterations, caches, buffers that are made late, modes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.hostile.case import ROWS, WIDTH, Hostile, hostile


@hostile("a batch norm is called in eval mode, then in training mode")
class BatchNormBothModes(Hostile):
    def add_parts(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        for number in range(4):
            self.norm.train(number % 2 == 1)
            rows = torch.tanh(self.second(functional.gelu(self.norm(self.first(rows)))))
        return rows.square().mean()


@hostile("a batch norm averages over all its calls (momentum None)")
class BatchNormCumulative(Hostile):
    def add_parts(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def layer(self, rows: Tensor) -> Tensor:
        normed = self.norm(self.first(rows))
        return torch.tanh(self.second(functional.gelu(normed * self.norm.running_mean.exp())))


@hostile("statistics are gathered by hand, and used in the same pass")
class StatisticsByHand(Hostile):
    def add_parts(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return torch.tanh(self.second(functional.gelu(hidden - self.mean)))


@hostile("statistics are assigned as new tensors by hand")
class StatisticsAssigned(Hostile):
    def add_parts(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        self.mean.data = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return torch.tanh(self.second(functional.gelu(hidden - self.mean.exp())))


@hostile("running statistics are written between the passes, which a replay in eval mode reads")
class StatisticsWrittenBetween(Hostile):
    def add_parts(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH).eval()

    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(self.norm(self.first(rows)))))

    def between(self) -> None:
        self.norm.running_mean.numpy()[:] += 0.1


@hostile("spectral norm iterates in place in each forward pass")
class SpectralNorm(Hostile):
    def add_parts(self) -> None:
        nn.utils.parametrizations.spectral_norm(self.first)

    def layer(self, rows: Tensor) -> Tensor:
        return super().layer(super().layer(rows))


@hostile("the older spectral norm, which is a hook and sets the weight")
class SpectralNormHook(Hostile):
    def add_parts(self) -> None:
        nn.utils.spectral_norm(self.first)


@hostile("weight norm, which makes the weight anew in each call")
class WeightNorm(Hostile):
    def add_parts(self) -> None:
        nn.utils.parametrizations.weight_norm(self.first)


@hostile("a table is made and kept in the first call, as rotary embeddings do")
class LazyTable(Hostile):
    table: Tensor | None = None

    def layer(self, rows: Tensor) -> Tensor:
        if self.table is None or self.number == 3:
            self.table = torch.arange(WIDTH).float().div(7).cos()
        return super().layer(rows * self.table.exp())


@hostile("a buffer is registered in the second step")
class LateBuffer(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        if self.number == 1 and not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        return super().layer(rows * self.scale if hasattr(self, "scale") else rows)


@hostile("a cache of keys is kept from call to call and written in place")
class KeyCache(Hostile):
    def add_parts(self) -> None:
        self.cache = torch.zeros(4 * ROWS, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        for number in range(3):
            self.cache[number * ROWS : (number + 1) * ROWS] = rows.detach()
            rows = self.layer(rows * torch.sigmoid(self.cache[: (number + 1) * ROWS].mean(0)))
        return rows.square().mean()


@hostile("a preallocated buffer is copied into and reused by each layer")
class ReusedBuffer(Hostile):
    def add_parts(self) -> None:
        self.register_buffer("room", torch.zeros(ROWS, WIDTH), persistent=False)

    def layer(self, rows: Tensor) -> Tensor:
        self.room.copy_(rows.detach().sin())
        return super().layer(rows + self.room.exp())


@hostile("an out= argument writes over a buffer that an earlier op read")
class OutOverBuffer(Hostile):
    def add_parts(self) -> None:
        self.register_buffer("room", torch.ones(ROWS, WIDTH))

    def layer(self, rows: Tensor) -> Tensor:
        scaled = rows * self.room.exp()
        torch.cos(rows.detach(), out=self.room)
        return super().layer(scaled)


@hostile("modules are toggled between training and evaluation from step to step")
class ModesToggled(Hostile):
    def add_parts(self) -> None:
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def before_step(self) -> None:
        self.train(self.number % 2 == 0)

    def layer(self, rows: Tensor) -> Tensor:
        return super().layer(self.drop(self.norm(rows)))


@hostile("layers are skipped at random")
class LayersSkipped(Hostile):
    def forward(self, rows: Tensor) -> Tensor:
        for _ in range(4):
            if torch.rand(()) < 0.6:
                rows = self.layer(rows)
        return self.layer(rows).square().mean()


@hostile("a checkpoint inside, over layers with dropout")
class CheckpointInside(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return checkpoint(self._dropping, rows, use_reentrant=False)

    def _dropping(self, rows: Tensor) -> Tensor:
        return super().layer(functional.dropout(rows, 0.1))


@hostile("a reentrant checkpoint inside, which runs the forward pass in the backward pass")
class ReentrantCheckpoint(Hostile):
    def forward(self, rows: Tensor) -> Tensor:
        rows = self.layer(rows)
        rows = checkpoint(lambda x: self.layer(functional.dropout(x, 0.1)), rows, use_reentrant=True)
        return self.layer(rows).square().mean()


@hostile("a hook of a gradient writes a buffer that replays read")
class GradientHookWrites(Hostile):
    def add_parts(self) -> None:
        self.register_buffer("scale", torch.ones(WIDTH))

    def layer(self, rows: Tensor) -> Tensor:
        result = super().layer(rows * self.scale.exp())
        result.register_hook(self._write)
        return result

    def _write(self, gradient: Tensor) -> None:
        self.scale.data.mul_(0.9)


@hostile("a hook of a module's backward pass changes the gradient by a counter")
class BackwardHookCounts(Hostile):
    def add_parts(self) -> None:
        self.calls = 0
        self.first.register_full_backward_hook(self._scaled)

    def _scaled(self, module: nn.Module, inputs: tuple[Tensor, ...], outputs: object) -> tuple[Tensor | None, ...]:
        self.calls += 1
        return tuple(None if gradient is None else gradient * (1 + 0.01 * self.calls) for gradient in inputs)


@hostile("two forward passes before the backward passes, with a moving buffer")
class TwoForwards(Hostile):
    def add_parts(self) -> None:
        self.register_buffer("scale", torch.ones(WIDTH))

    def layer(self, rows: Tensor) -> Tensor:
        scaled = rows * self.scale.exp()
        self.scale.data.mul_(0.95)
        return super().layer(scaled)

    def between(self) -> None:
        self(self.batch(50)).backward()
