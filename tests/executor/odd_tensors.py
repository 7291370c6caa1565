"""Random chains of ops on tensors that are not all in their bytes and their geometry, for `fuzz_native_watch`.

A chain turns two square matrices into a tensor of some kind, which is sparse, quantized, complex, nested, opaque, of a
subclass, without dimensions, on the meta device or in inference mode, runs ops on it that the kind knows, and returns a
matrix. Autograd saves such tensors wherever their kind has gradients.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

Make = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor], Tensor]


class Seeing(Tensor):
    """A subclass that sees functions alone."""


@dataclass(frozen=True)
class Kind:
    """A kind of tensors.

    Attributes:
        make: Makes one of two matrices.
        steps: Ops that take one and give one.
        back: Makes something of it that a matrix can be multiplied by.
        sees_ops: Whether a class of theirs is asked about each op.
    """

    make: Make
    steps: tuple[Step, ...]
    back: Step
    sees_ops: bool = False


def _thin(one: Tensor) -> Tensor:
    return one * (one.detach() > 0)


def _two(one: Tensor, other: Tensor) -> TwoTensor:
    return TwoTensor(one.detach().clone(), other.detach().clone())


def _parts_of_two(both: Tensor) -> Tensor:
    both = both.detach()
    assert isinstance(both, TwoTensor)
    return both.a + both.b


def _on_meta(one: Tensor) -> Tensor:
    return torch.empty_like(one, device="meta", requires_grad=True).tanh()


@torch.inference_mode()
def _in_inference(one: Tensor, other: Tensor) -> Tensor:
    return one.detach() * other.detach()


def _by_channels(one: Tensor, other: Tensor) -> Tensor:
    scales, zeros = torch.full((len(one),), 0.1), torch.zeros(len(one), dtype=torch.long)
    return torch.quantize_per_channel((one * other).detach().tanh(), scales, zeros, 0, torch.qint8)


_MILD: tuple[Step, ...] = (
    torch.sin, torch.tanh, lambda x: x * x, lambda x: x.clone().mul_(0.5), lambda x: x.clone().add_(x).neg_(),
)  # fmt: skip
_REAL: tuple[Step, ...] = (*_MILD, lambda x: x.t().contiguous(), lambda x: x.t(), lambda x: x.exp().clamp(max=2.0))
_COMPLEX: tuple[Step, ...] = (
    torch.conj, lambda x: x * 1j, lambda x: x.conj() * x, lambda x: x.resolve_conj().clone(),
    lambda x: x.clone().mul_(x), lambda x: torch.complex(x.imag, x.real),
    lambda x: torch.view_as_complex(torch.view_as_real(x.resolve_conj()).flip(-1)),
    lambda x: torch.polar(x.abs(), x.angle().detach()),
)  # fmt: skip
_SPARSE: tuple[Step, ...] = (
    torch.abs, torch.neg, lambda x: x * 2, lambda x: (x + x).coalesce(), lambda x: x.t(), lambda x: x.clone().mul_(0.5),
)  # fmt: skip

KINDS = {
    "no dimensions": Kind(
        lambda one, other: one.mean() * other.sum().tanh(), (*_MILD, lambda x: x.view(1).exp().squeeze()), lambda x: x
    ),
    "no elements": Kind(lambda one, other: one[:0] * other[:0], _MILD, lambda x: x.sum() + 1),
    "no strides": Kind(lambda one, other: (one[0] * other[0]).expand(len(one), -1), _REAL[:3], lambda x: x),
    "complex": Kind(lambda one, other: torch.complex(one.tanh(), other.tanh()), _COMPLEX, lambda x: x.real + x.imag),
    "complex, in double precision": Kind(
        lambda one, other: torch.complex(one.tanh().double(), other.tanh().double()), _COMPLEX, lambda x: x.imag.float()
    ),
    "half": Kind(lambda one, other: (one * other).bfloat16(), _REAL, lambda x: x.float()),
    "eighth": Kind(lambda one, other: one.to(torch.float8_e4m3fn), (torch.clone, lambda x: x.t()), lambda x: x.float()),
    "boolean": Kind(lambda one, other: one > other, (torch.logical_not, lambda x: x | x.t()), lambda x: x.float()),
    "sparse": Kind(lambda one, other: _thin(one).to_sparse(), _SPARSE, lambda x: x.to_dense()),
    "sparse, by rows": Kind(
        lambda one, other: _thin(one).to_sparse_csr(), (torch.neg, torch.clone, lambda x: x * 2), lambda x: x.to_dense()
    ),
    "sparse, of one dimension": Kind(
        lambda one, other: one.to_sparse(1), (torch.neg, lambda x: x * 3, torch.clone), lambda x: x.to_dense()
    ),
    "quantized": Kind(
        lambda one, other: torch.quantize_per_tensor(one.detach().tanh(), 0.05, 2, torch.quint8),
        (torch.relu, torch.clone, lambda x: x.t().contiguous()),
        lambda x: x.dequantize(),
    ),
    "quantized, by channels": Kind(_by_channels, (torch.clone,), lambda x: x.dequantize()),
    "on the meta device": Kind(
        lambda one, other: _on_meta(one) * _on_meta(other), _REAL, lambda x: torch.ones(x.dim())[0]
    ),
    "opaque": Kind(lambda one, other: one.to_mkldnn(), (torch.relu, torch.clone), lambda x: x.to_dense()),
    "nested": Kind(
        lambda one, other: torch.nested.as_nested_tensor([one, other[:3]]),
        (torch.relu, lambda x: x + x, lambda x: x * 2, torch.clone),
        lambda x: x.unbind()[0],
    ),
    "zeros without memory": Kind(
        lambda one, other: torch._efficientzerotensor(one.shape) * other, (torch.neg,), lambda x: x + 1
    ),
    "in inference mode": Kind(_in_inference, (torch.clone, torch.neg), lambda x: x.clone()),
    "of a class that sees functions": Kind(
        lambda one, other: one.as_subclass(Seeing) * other, _REAL, lambda x: x.as_subclass(Tensor)
    ),
    "of a class that sees ops": Kind(_two, _MILD, _parts_of_two, sees_ops=True),
    "of a class that sees ops, in the graph": Kind(
        lambda one, other: _two(one, other).requires_grad_() * 2, _MILD, _parts_of_two, sees_ops=True
    ),
}


@dataclass(frozen=True)
class Chain:
    """Some ops on a tensor of one kind."""

    name: str
    steps: tuple[int, ...]

    @property
    def kind(self) -> Kind:
        """What the tensor is."""
        return KINDS[self.name]

    def __call__(self, one: Tensor, other: Tensor) -> Tensor:
        made = self.kind.make(one, other)
        for step in self.steps:
            made = self.kind.steps[step % len(self.kind.steps)](made)
        return other.tanh() * self.kind.back(made).tanh()


def drawn(numbers: random.Random) -> Chain:
    """Return a random chain."""
    return Chain(numbers.choice(list(KINDS)), tuple(numbers.randrange(100) for _ in range(numbers.randint(1, 5))))
