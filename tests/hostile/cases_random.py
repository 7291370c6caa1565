"""Random numbers that a replay has to draw again: own generators, other libraries', states that change."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.hostile.case import ROWS, WIDTH, Hostile, hostile


class _OwnGenerator(Hostile):
    def add_parts(self) -> None:
        self.generator = torch.Generator().manual_seed(5)


@hostile("bernoulli_ draws from a generator of its own")
class OwnBernoulli(_OwnGenerator):
    def layer(self, rows: Tensor) -> Tensor:
        mask = torch.empty_like(rows).bernoulli_(0.9, generator=self.generator)
        return torch.tanh(self.second(functional.gelu(self.first(rows) * mask)))


@hostile("randn draws noise from a generator of its own, as diffusers do")
class OwnNoise(_OwnGenerator):
    def layer(self, rows: Tensor) -> Tensor:
        return super().layer(rows * torch.randn(rows.shape, generator=self.generator).exp())


@hostile("normal_ and uniform_ draw from a generator of their own in place")
class OwnNormalInPlace(_OwnGenerator):
    def layer(self, rows: Tensor) -> Tensor:
        noise = torch.zeros(ROWS, WIDTH).normal_(generator=self.generator)
        return super().layer(rows * (noise + torch.zeros(WIDTH).uniform_(generator=self.generator)).cos())


@hostile("a permutation from a generator of its own")
class OwnPermutation(_OwnGenerator):
    def layer(self, rows: Tensor) -> Tensor:
        return super().layer(rows[torch.randperm(ROWS, generator=self.generator)] * 1.1)


@hostile("multinomial draws from a generator of its own")
class OwnMultinomial(_OwnGenerator):
    def layer(self, rows: Tensor) -> Tensor:
        places = torch.multinomial(torch.ones(ROWS), ROWS, replacement=True, generator=self.generator)
        return super().layer(rows[places].sin())


@hostile("a generator that two modules share")
class SharedGenerator(_OwnGenerator):
    def add_parts(self) -> None:
        super().add_parts()
        self.inner = nn.Module()
        self.inner.generator = self.generator

    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows) * torch.rand(rows.shape, generator=self.generator).exp()
        return torch.tanh(self.second(hidden * torch.rand(rows.shape, generator=self.inner.generator).exp()))


@hostile("several generators in turns")
class SeveralGenerators(Hostile):
    def add_parts(self) -> None:
        self.one, self.other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)

    def layer(self, rows: Tensor) -> Tensor:
        noise = torch.rand(rows.shape, generator=self.one) + torch.randn(rows.shape, generator=self.other)
        return super().layer(rows * (noise + torch.rand(rows.shape)).cos())


@hostile("a generator that is seeded in the forward pass")
class GeneratorSeededInForward(_OwnGenerator):
    def layer(self, rows: Tensor) -> Tensor:
        self.generator.manual_seed(self.number)
        return super().layer(rows * torch.rand(rows.shape, generator=self.generator).exp())


@hostile("a generator whose clone draws, so that the first stays where it is")
class GeneratorCloned(_OwnGenerator):
    def layer(self, rows: Tensor) -> Tensor:
        clone = self.generator.clone_state()
        result = super().layer(rows * torch.rand(rows.shape, generator=clone).exp())
        self.generator.set_state(clone.get_state())
        return result


@hostile("a generator of its own that is drawn from between the passes")
class GeneratorDrawnBetween(_OwnGenerator):
    def layer(self, rows: Tensor) -> Tensor:
        return super().layer(rows * torch.rand(rows.shape, generator=self.generator).exp())

    def between(self) -> None:
        torch.rand(7, generator=self.generator)


@hostile("the random state is seeded in the forward pass")
class SeededInForward(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        torch.manual_seed(self.number)
        return super().layer(functional.dropout(rows, 0.2))


@hostile("the random state changes between the passes")
class SeededBetween(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return super().layer(functional.dropout(rows, 0.2).exp())

    def between(self) -> None:
        torch.manual_seed(17 + self.number)


@hostile("random numbers inside of fork_rng")
class ForkedState(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            rows = functional.dropout(rows, 0.2)
        return super().layer(rows * torch.rand_like(rows).exp())


@hostile("dropout by hand with NumPy's random numbers")
class NumpyRandomMask(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        mask = torch.from_numpy(np.random.rand(ROWS, WIDTH).astype(np.float32))  # noqa: NPY002
        return super().layer(rows * mask.round())


@hostile("NumPy's own Generator object draws the noise")
class NumpyGeneratorNoise(Hostile):
    def add_parts(self) -> None:
        self.drawing = np.random.default_rng(3)

    def layer(self, rows: Tensor) -> Tensor:
        noise = torch.empty(ROWS, WIDTH)
        self.drawing.standard_normal(dtype=np.float32, out=noise.numpy())
        return super().layer(rows * noise.cos())


@hostile("Python's random numbers choose a scale and a layer")
class PythonRandomBranch(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        if random.random() < 0.5:
            rows = rows * random.uniform(0.5, 1.0)
        return super().layer(rows) + self.second(rows) * random.random()


@hostile("an RNN with dropout between its layers")
class RecurrentDropout(Hostile):
    def add_parts(self) -> None:
        self.recurrent = nn.RNN(WIDTH, WIDTH, 2, dropout=0.3)

    def layer(self, rows: Tensor) -> Tensor:
        return super().layer(self.recurrent(rows.view(4, 8, WIDTH))[0].reshape(ROWS, WIDTH))


@hostile("attention with dropout")
class AttentionDropout(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        heads = self.first(rows).view(4, 8, WIDTH)
        return torch.tanh(
            self.second(functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).view(ROWS, -1))
        )


@hostile("a generator of its own draws from the fourth step on", may_stop=True)
class OwnGeneratorLate(_OwnGenerator):
    steps = 7

    def layer(self, rows: Tensor) -> Tensor:
        generator = self.generator if self.number >= 4 else None
        return super().layer(rows * torch.rand(rows.shape, generator=generator).exp())
