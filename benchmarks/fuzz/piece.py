"""What a piece of a random model is: it maps (rows, width) to the same shape, whatever it does in between."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": functional.leaky_relu,
    "softplus": functional.softplus,
    "elu": functional.elu,
    "hardswish": functional.hardswish,
    "mish": functional.mish,
    "relu_": functional.relu_,
    "tanh_": torch.tanh_,
    "sigmoid_": torch.sigmoid_,
    "silu_": lambda rows: functional.silu(rows, inplace=True),
}
PIECES: dict[str, type[Piece]] = {}


class Piece(nn.Module):
    """A piece of a model. `width` is a multiple of 16, the number of rows one of 8."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        self.width, self.options = width, options
        self.build(**options)

    def __init_subclass__(cls) -> None:
        PIECES[cls.__name__] = cls

    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        """Return random options, which describe the piece together with its name."""
        return {}

    def build(self, **options: Any) -> None:
        """Make the parts."""
