"""Operators of one's own whose result depends on more than their arguments, or that do more than they declare."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tests.hostile.case import WIDTH, Hostile, hostile

CALLS = [0]  # what the counting operators count; a fresh model sets it back
HIDDEN: dict[str, Tensor] = {}


def _halved(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * 0.5


class _Counting(Hostile):
    def add_parts(self) -> None:
        CALLS[0] = 0


@torch.library.custom_op("hostile::noisy", mutates_args=())
def noisy(rows: Tensor) -> Tensor:
    return rows + torch.randn_like(rows)


@torch.library.custom_op("hostile::numpy_noisy", mutates_args=())
def numpy_noisy(rows: Tensor) -> Tensor:
    return rows + torch.from_numpy(np.random.rand(*rows.shape).astype(np.float32))  # noqa: NPY002


@torch.library.custom_op("hostile::counting", mutates_args=())
def counting(rows: Tensor) -> Tensor:
    CALLS[0] += 1
    return rows * (1 + 0.1 * CALLS[0])


@torch.library.custom_op("hostile::reads_hidden", mutates_args=())
def reads_hidden(rows: Tensor) -> Tensor:
    return rows * HIDDEN["scale"]


@torch.library.custom_op("hostile::writes_argument", mutates_args=())
def writes_argument(rows: Tensor) -> Tensor:
    result = rows.sin()
    rows.data.mul_(0.5)
    return result


@torch.library.custom_op("hostile::writes_hidden", mutates_args=())
def writes_hidden(rows: Tensor) -> Tensor:
    HIDDEN["scale"].mul_(0.9)
    return rows * HIDDEN["scale"]


@torch.library.custom_op("hostile::through_numpy", mutates_args=())
def through_numpy(rows: Tensor) -> Tensor:
    return torch.from_numpy(np.cos(rows.numpy()))


@torch.library.custom_op("hostile::fills", mutates_args=("into",))
def fills(rows: Tensor, into: Tensor) -> None:
    into.numpy()[:] = rows.numpy() * 2


@torch.library.custom_op("hostile::autocasting", mutates_args=())
def autocasting(rows: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (rows @ weight).float()


@torch.library.custom_op("hostile::asks_autocast", mutates_args=())
def asks_autocast(rows: Tensor) -> Tensor:
    return rows * (0.5 if torch.is_autocast_enabled("cpu") else 2.0)


@torch.library.custom_op("hostile::asks_dtype", mutates_args=())
def asks_dtype(rows: Tensor) -> Tensor:
    return rows * (0.5 if torch.get_default_dtype() == torch.float64 else 2.0)


for _operator in (noisy, numpy_noisy, counting, reads_hidden, writes_argument, writes_hidden, through_numpy):
    _operator.register_autograd(_halved)
asks_autocast.register_autograd(_halved)
asks_dtype.register_autograd(_halved)
autocasting.register_autograd(lambda ctx, gradient: (gradient, None))

LIBRARY = torch.library.Library("hostile_defined", "DEF")
LIBRARY.define("counting(Tensor rows) -> Tensor")
LIBRARY.define("alias(Tensor rows) -> Tensor")
LIBRARY.define("conceals(Tensor rows, Tensor scale) -> Tensor")


def _counting_kernel(rows: Tensor) -> Tensor:
    CALLS[0] += 1
    return rows * (1 + 0.1 * CALLS[0])


def _concealing_kernel(rows: Tensor, scale: Tensor) -> Tensor:
    scale.mul_(0.9)
    return rows * scale


LIBRARY.impl("counting", _counting_kernel, "CompositeExplicitAutograd")
LIBRARY.impl("alias", lambda rows: rows, "CompositeExplicitAutograd")
LIBRARY.impl("conceals", _concealing_kernel, "CompositeExplicitAutograd")


class _Defined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, name: str, *more: Tensor) -> Tensor:
        return getattr(torch.ops.hostile_defined, name)(rows, *more)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient * 0.5, None, *(None for _ in ctx.needs_input_grad[2:])


@hostile("an operator draws random numbers")
class OperatorNoise(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(noisy(self.first(rows)))))


@hostile("an operator draws NumPy's random numbers")
class OperatorNumpyNoise(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(numpy_noisy(self.first(rows)))))


@hostile("an operator counts its calls")
class OperatorCounter(_Counting):
    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(counting(self.first(rows)))))


@hostile("an operator of torch.library.Library counts its calls")
class LibraryCounter(_Counting):
    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(_Defined.apply(self.first(rows), "counting"))))


@hostile("an operator returns its argument, which its schema does not say")
class LibraryAlias(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(_Defined.apply(self.first(rows), "alias") * 1.5)))


@hostile("an operator writes a buffer among its arguments, which its schema conceals")
class LibraryConcealedWrite(Hostile):
    def add_parts(self) -> None:
        self.register_buffer("scale", torch.ones(WIDTH))

    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(_Defined.apply(self.first(rows), "conceals", self.scale))))


@hostile("an operator reads a tensor that is no argument and changes between the passes")
class OperatorGlobalState(Hostile):
    def add_parts(self) -> None:
        HIDDEN["scale"] = torch.ones(WIDTH)

    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(reads_hidden(self.first(rows)))))

    def between(self) -> None:
        HIDDEN["scale"] *= 0.9


@hostile("an operator writes its argument, which its schema conceals")
class OperatorWritesArgument(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(writes_argument(self.first(rows)))))


@hostile("an operator writes a buffer that is no argument")
class OperatorWritesBuffer(Hostile):
    def add_parts(self) -> None:
        self.register_buffer("scale", torch.ones(WIDTH))
        HIDDEN["scale"] = self.scale

    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(writes_hidden(self.first(rows)))))


@hostile("an operator computes with NumPy, which repeats")
class OperatorNumpy(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(through_numpy(self.first(rows)))))


@hostile("an operator fills a tensor that it says it writes, through NumPy")
class OperatorFills(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        into = torch.empty(rows.shape)
        fills(rows.detach(), into)
        return super().layer(rows * into.sigmoid())


@hostile("an operator enters autocast inside")
class OperatorAutocasts(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(autocasting(self.first(rows), self.second.weight.detach()))))


@hostile("an operator asks whether autocast is enabled")
class OperatorAsksAutocast(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = asks_autocast(self.first(rows).float())
        return torch.tanh(self.second(functional.gelu(hidden)))


@hostile("an operator asks for the default dtype, which is another one in the forward pass")
class OperatorAsksDtype(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        hidden = asks_dtype(self.first(rows))
        torch.set_default_dtype(torch.float32)
        return torch.tanh(self.second(functional.gelu(hidden)))


@hostile("an operator counts its calls from the fourth step on", may_stop=True)
class OperatorCounterLate(_Counting):
    steps = 7

    def layer(self, rows: Tensor) -> Tensor:
        if self.number < 4:
            CALLS[0] = 0
        return torch.tanh(self.second(functional.gelu(counting(self.first(rows)))))
