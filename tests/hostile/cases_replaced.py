"""Tensors whose data is written or replaced where version counters do not tell."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.hostile.case import ROWS, WIDTH, Hostile, hostile


@hostile("a parameter's data is written in place between the passes")
class DataWrittenBetween(Hostile):
    def between(self) -> None:
        self.first.bias.data.mul_(0.9)


@hostile("a parameter's data is written in place in the forward pass, after it was used")
class DataWrittenInForward(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        result = super().layer(rows)
        self.first.bias.data.mul_(0.9)
        return result


@hostile("a parameter's data is assigned in the forward pass")
class DataAssignedInForward(Hostile):
    def forward(self, rows: Tensor) -> Tensor:
        loss = super().forward(rows)
        self.first.bias.data = self.first.bias.data * 0.9
        return loss


@hostile("a parameter's data is assigned between the passes")
class DataAssignedBetween(Hostile):
    def between(self) -> None:
        self.first.bias.data = self.first.bias.data * 0.9


@hostile("the data of a saved activation is assigned, which the caller still holds")
class SavedDataAssigned(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        result = functional.gelu(hidden)
        hidden.data = torch.ones_like(hidden)
        self.held = hidden
        return torch.tanh(self.second(result))


@hostile("the data of a saved activation is assigned, and nobody holds it any longer")
class SavedDataAssignedAndDropped(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        result = functional.gelu(hidden)
        hidden.data = torch.ones_like(hidden)
        return torch.tanh(self.second(result))


@hostile("the data of an op's saved result is assigned")
class SavedResultAssigned(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.first(rows))
        hidden.data = hidden.data * 0.5
        return torch.tanh(self.second(hidden))


@hostile("a saved activation is written through .data, which keeps its version")
class SavedDataWritten(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        result = functional.gelu(hidden)
        hidden.data.mul_(0.5)
        return torch.tanh(self.second(result))


@hostile("a saved activation is written through .data between the passes")
class SavedDataWrittenBetween(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        self.held = self.first(rows)
        return torch.tanh(self.second(functional.gelu(self.held)))

    def between(self) -> None:
        self.held.data.add_(1.0)


@hostile("the contents of two tensors are swapped in the forward pass")
class TensorsSwapped(Hostile):
    def forward(self, rows: Tensor) -> Tensor:
        one, other = torch.linspace(0, 1, WIDTH), torch.linspace(1, 2, WIDTH)
        rows = self.layer(rows * one.exp())
        torch.utils.swap_tensors(one, other)
        return super().forward(rows * one.exp() + other.exp())


@hostile("set_ gives a tensor another storage after it was used")
class SetStorage(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        scale = torch.linspace(0, 1, WIDTH)
        hidden = functional.gelu(self.first(rows) * scale.exp())
        scale.set_(torch.ones(WIDTH))
        return torch.tanh(self.second(hidden * scale.exp()))


@hostile("resize_ makes a tensor larger, and what is new is written")
class ResizedInPlace(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        scale = torch.full((WIDTH // 2,), 0.5)
        half = functional.gelu(self.first(rows))[:, : WIDTH // 2] * scale.exp()
        scale.resize_(WIDTH)
        scale.data[WIDTH // 2 :] = 2.0
        scale.data[: WIDTH // 2] = 3.0
        return torch.tanh(self.second(torch.cat([half, half], 1) * scale.exp()))


@hostile("an inference tensor, which has no version, is changed")
class InferenceTensorChanged(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = torch.linspace(0, 1, WIDTH)
        hidden = functional.gelu(self.first(rows) + scale.exp().clone().sin())
        with torch.inference_mode():
            scale.mul_(0.5)
        return torch.tanh(self.second(hidden))


@hostile("a weight is rewritten through .data before each forward pass, as an average")
class AverageBefore(Hostile):
    def before_step(self) -> None:
        self.first.weight.data.mul_(0.9).add_(self.second.weight.data, alpha=0.1)


@hostile("a weight is rewritten through .data in a forward pre-hook of its module")
class AverageInPreHook(Hostile):
    def add_parts(self) -> None:
        self.first.register_forward_pre_hook(lambda module, args: self._averaged())

    def _averaged(self) -> None:
        self.first.weight.data.mul_(0.9).add_(self.second.weight.data, alpha=0.1)


@hostile("an embedding table renormalizes its weight in the forward pass")
class RenormalizedEmbedding(Hostile):
    def add_parts(self) -> None:
        self.table = nn.Embedding(ROWS, WIDTH, max_norm=1.0)

    def layer(self, rows: Tensor) -> Tensor:
        places = rows.detach()[:, 0].mul(100).long().abs() % ROWS
        scale = self.table.weight.detach().exp()[places]
        return super().layer(rows + self.table(places) * scale)


@hostile("an embedding bag renormalizes its weight in the forward pass")
class RenormalizedBag(Hostile):
    def add_parts(self) -> None:
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, max_norm=0.5, mode="sum")

    def layer(self, rows: Tensor) -> Tensor:
        places = (rows.detach()[:, :3] * 100).long().abs() % ROWS
        return super().layer(rows * self.bag.weight.detach().sigmoid() + self.bag(places))


@hostile("parameters are other objects from step to step")
class ParametersReplaced(Hostile):
    def before_step(self) -> None:
        self.first.weight = nn.Parameter(self.first.weight.detach() * 0.9)


@hostile("state is loaded between the passes, into buffers that replays read")
class StateLoadedBetween(Hostile):
    def add_parts(self) -> None:
        self.register_buffer("scale", torch.ones(WIDTH))

    def layer(self, rows: Tensor) -> Tensor:
        return super().layer(rows + self.scale.exp())

    def between(self) -> None:
        self.load_state_dict({"scale": self.scale * 0.5}, strict=False)


@hostile("state is assigned before some steps, so that parameters are other tensors")
class StateAssigned(Hostile):
    def before_step(self) -> None:
        if self.number % 2:
            self.load_state_dict({k: v * 0.9 for k, v in self.state_dict().items()}, assign=True)


@hostile("two models share their parameters, and the second writes them")
class SharedParameters(Hostile):
    def add_parts(self) -> None:
        self.twin = [nn.Linear(WIDTH, WIDTH)]
        self.twin[0].weight = self.first.weight

    def other_models(self) -> list[nn.Module]:
        return list(self.twin)

    def between(self) -> None:
        with torch.no_grad():
            self.twin[0](torch.ones(2, WIDTH))
            self.twin[0].weight.data.mul_(0.99)


@hostile("a parameter is clamped through .data from the fourth step on", may_stop=True)
class DataWrittenLate(Hostile):
    steps = 7

    def between(self) -> None:
        if self.number >= 4:
            self.first.bias.data.add_(0.5)


@hostile("a parameter's storage is moved into another one's, as flattened parameters are")
class ParametersFlattened(Hostile):
    def before_step(self) -> None:
        if self.number == 2:
            flat = torch.cat([self.first.bias.data, self.second.bias.data])
            self.first.bias.data, self.second.bias.data = flat[:WIDTH], flat[WIDTH:]
            self.flat = flat

    def between(self) -> None:
        if self.number >= 2:
            self.flat.mul_(0.9)
