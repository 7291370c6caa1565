"""Operators that act on each element: arithmetic, comparisons, activations."""

from __future__ import annotations

import functools
import operator as python
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..operation import HostNumbers, Operation, number
from ..registry import operator

_PLAIN: dict[str, Callable[..., Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh,
    "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "HardSwish": functional.hardswish, "IsNaN": torch.isnan,
    "Log": torch.log, "Mish": functional.mish, "Neg": torch.neg, "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round, "Sigmoid": torch.sigmoid,
    "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh, "Softplus": functional.softplus,
    "Softsign": functional.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh,
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor,
    "BitwiseNot": torch.bitwise_not, "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor, "Det": torch.linalg.det,
}  # fmt: skip

# One of the two may be a Python number.
_WITH_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": python.add, "Sub": python.sub, "Mul": python.mul, "Equal": python.eq, "Greater": python.gt,
    "GreaterOrEqual": python.ge, "Less": python.lt, "LessOrEqual": python.le,
}  # fmt: skip

_MANY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"Max": torch.maximum, "Min": torch.minimum, "Sum": torch.add}

_WITH_ALPHA: dict[str, tuple[Callable[[Tensor, float], Tensor], float]] = {
    "LeakyRelu": (functional.leaky_relu, 0.01), "Elu": (functional.elu, 1.0), "Celu": (functional.celu, 1.0),
    "ThresholdedRelu": (lambda x, alpha: functional.threshold(x, alpha, 0.0), 1.0),
}  # fmt: skip


def _without_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda op, *inputs: function(*inputs)


def _of_many(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda op, *inputs: functools.reduce(function, inputs)


def _with_alpha(function: Callable[[Tensor, float], Tensor], default: float) -> Callable[..., Tensor]:
    return lambda op, x: function(x, op.get("alpha", default))


for _name, _function in _PLAIN.items():
    operator(_name)(_without_operation(_function))
for _name, _binary in _WITH_NUMBERS.items():
    operator(_name, numbers=(0, 1))(_without_operation(_binary))
for _name, _binary in _MANY.items():
    operator(_name)(_of_many(_binary))
for _name, (_activation, _default) in _WITH_ALPHA.items():
    operator(_name)(_with_alpha(_activation, _default))


@operator("Div", numbers=(0, 1))
def _div(op: Operation, left: Any, right: Any) -> Any:
    tensor = left if isinstance(left, Tensor) else right
    if tensor.is_floating_point():
        return left / right
    return torch.div(torch.as_tensor(left), right, rounding_mode="trunc")  # like integer division in C


@operator("Pow", numbers=(1,))
def _pow(op: Operation, base: Tensor, exponent: Any) -> Tensor:
    return torch.pow(base, exponent).to(base.dtype)  # the result has the type of the base


@operator("Mod")
def _mod(op: Operation, left: Tensor, right: Tensor) -> Tensor:
    return torch.fmod(left, right) if op.get("fmod", 0) else torch.remainder(left, right)


@operator("Mean")
def _mean(op: Operation, *inputs: Tensor) -> Tensor:
    return functools.reduce(torch.add, inputs) / len(inputs)


@operator("Where", numbers=(1, 2))
def _where(op: Operation, condition: Tensor, yes: Any, no: Any) -> Tensor:
    return torch.where(condition, yes, no)


@operator("Clip", numbers=(1, 2))
def _clip(op: Operation, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    limits = [op.get(name) if given is None else given for name, given in (("min", low), ("max", high))]
    if limits == [None, None]:
        return x
    if any(isinstance(limit, Tensor) for limit in limits):  # `torch.clamp` takes no number beside a tensor
        limits = [None if limit is None else torch.as_tensor(limit, dtype=x.dtype, device=x.device) for limit in limits]
    return torch.clamp(x, *limits)


@operator("Shrink")
def _shrink(op: Operation, x: Tensor) -> Tensor:
    bias, edge = op.get("bias", 0.0), op.get("lambd", 0.5)
    return torch.where(x < -edge, x + bias, torch.where(x > edge, x - bias, torch.zeros_like(x)))


@operator("IsInf")
def _isinf(op: Operation, x: Tensor) -> Tensor:
    found = torch.zeros_like(x, dtype=torch.bool)
    if op.get("detect_positive", 1):
        found = found | torch.isposinf(x)
    return found | torch.isneginf(x) if op.get("detect_negative", 1) else found


@operator("PRelu")
def _prelu(op: Operation, x: Tensor, slope: Tensor) -> Tensor:
    per_channel = x.dim() > 1 and slope.dim() == x.dim() - 1 and slope.numel() == slope.shape[0] == x.shape[1]
    if slope.numel() == 1 or per_channel:
        return functional.prelu(x, slope.reshape(-1))
    return torch.where(x < 0, x * slope, x)


@operator("Selu")
def _selu(op: Operation, x: Tensor) -> Tensor:
    alpha, gamma = op.get("alpha", 1.67326319217681884765625), op.get("gamma", 1.05070102214813232421875)
    scaled: Tensor = gamma * functional.elu(x, alpha)
    return scaled


@operator("Gelu")
def _gelu(op: Operation, x: Tensor) -> Tensor:
    return functional.gelu(x, approximate=op.get("approximate", "none"))


@operator("Swish")
def _swish(op: Operation, x: Tensor) -> Tensor:
    alpha = op.get("alpha", 1.0)
    return functional.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@operator("HardSigmoid")
def _hard_sigmoid(op: Operation, x: Tensor) -> Tensor:
    return torch.clamp(op.get("alpha", 0.2) * x + op.get("beta", 0.5), 0, 1)


@operator("Dropout", host=(1, 2), ignores=("seed",))
def _dropout(op: Operation, x: Tensor, ratio: HostNumbers | None = None, training: HostNumbers | None = None) -> Any:
    share = number(ratio, op.get("ratio", 0.5))
    active = op.trains(bool(training.item()) if training is not None else False)
    if not op.reads(1):
        return functional.dropout(x, share, training=active)
    if not active:
        return x, torch.ones_like(x, dtype=torch.bool)
    return torch.native_dropout(x, share, True)
