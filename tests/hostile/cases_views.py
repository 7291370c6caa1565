"""Views and in-place operators: what is written over, aliased, conjugated, or seen under another shape."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.hostile.case import ROWS, WIDTH, Hostile, hostile


@hostile("a chain of in-place activations")
class InPlaceChain(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh_(self.second(functional.relu_(self.first(rows).mul_(0.9))).add_(0.1).mul_(1.5).sub_(0.5))


@hostile("slices are written in place after other slices were saved")
class SlicesWritten(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows) * 1.0
        hidden[:, : WIDTH // 2] *= torch.sigmoid(hidden[:, WIDTH // 2 :])
        hidden[3:5] += 1.0
        return torch.tanh(self.second(functional.gelu(hidden)))


@hostile("a view is written in place after its base was saved by an op, which PyTorch refuses", raises=True)
class SavedThenWritten(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        result = functional.gelu(hidden)
        hidden[0].mul_(2.0)
        return torch.tanh(self.second(result))


@hostile("a saved result is written in place, which PyTorch refuses", raises=True)
class SavedResultWritten(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.first(rows))
        result = self.second(hidden * 2)
        hidden.add_(1.0)
        return torch.tanh(result)


@hostile("a saved conjugate view is written in place, which PyTorch refuses", raises=True)
class SavedConjugateWritten(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        numbers = torch.complex(self.first(rows), rows)
        result = numbers.conj() * numbers.sin()
        numbers.mul_(0.5)
        return torch.tanh(self.second(result.real))


@hostile("a saved negative view is written in place, which PyTorch refuses", raises=True)
class SavedNegativeWritten(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        numbers = torch.complex(self.first(rows), rows)
        view = numbers.conj().imag
        result = view * view.sin()
        numbers.mul_(0.5)
        return torch.tanh(self.second(result))


@hostile("conjugate and negative views are saved")
class ConjugateViews(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        numbers = torch.complex(self.first(rows), rows)
        return torch.tanh(self.second((numbers.conj() * numbers.sin()).conj().imag))


@hostile("a buffer is saved and written between the passes, which PyTorch refuses", raises=True)
class BufferWrittenBetween(Hostile):
    def add_parts(self) -> None:
        self.register_buffer("scale", torch.ones(WIDTH))

    def layer(self, rows: Tensor) -> Tensor:
        return super().layer(rows.sin() * self.scale)

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(self.first(rows))

    def between(self) -> None:
        self.scale.mul_(0.5)


@hostile("an expanded tensor is written through as_strided")
class AsStrided(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows).clone()
        hidden.detach().as_strided((ROWS // 2, WIDTH), (2 * WIDTH, 1), WIDTH).mul_(0.5)
        return torch.tanh(self.second(functional.gelu(hidden)))


@hostile("the same memory under another dtype is written")
class OtherDtypeView(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        hidden.detach().view(torch.int32).bitwise_and_(-4096)
        return torch.tanh(self.second(functional.gelu(hidden)))


@hostile("an activation is written without gradients after a view of it was saved elsewhere")
class WrittenWithoutGradients(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows) + 0.0
        with torch.no_grad():
            hidden.mul_(0.9)
        return torch.tanh(self.second(functional.gelu(hidden.view(-1)).view_as(hidden)))


@hostile("a mask is made, used, refilled and used again")
class MaskRefilled(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        mask = torch.full((ROWS, WIDTH), 0.5)
        rows = rows + mask.exp()
        mask.uniform_()
        return super().layer(rows * mask.exp())


@hostile("unbind, split and chunk are written separately")
class PartsWritten(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows).clone()
        with torch.no_grad():
            for number, part in enumerate(hidden.view(4, -1, WIDTH)):
                part.mul_(1 + 0.1 * number)
        left, right = hidden.chunk(2, 1)
        return torch.tanh(self.second(torch.cat([left.sigmoid() * right, right], 1)))
