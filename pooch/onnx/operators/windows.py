"""Shared by convolutions and pooling: windows that slide over the axes after batch and channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor
from torch.nn import functional

from ..operation import Operation
from ..registry import UnsupportedVariant

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Windows:
    """Kernel, strides, dilations, and padding before and after, with one entry per axis."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]

    @property
    def is_symmetric(self) -> bool:
        """Whether PyTorch's own padding can be used."""
        return self.before == self.after

    def pad(self, x: Tensor, value: float) -> Tensor:
        """Apply the padding as a separate op."""
        pairs = list(zip(self.before, self.after, strict=True))
        return functional.pad(x, [width for pair in reversed(pairs) for width in pair], value=value)


def windows_of(op: Operation, x: Tensor, kernel: list[int]) -> Windows:
    """Read the window from the attributes of a node."""
    rank = len(kernel)
    strides = list(op.get("strides", [1] * rank))
    dilations = list(op.get("dilations", [1] * rank))
    pads = list(op.get("pads", [0] * (2 * rank)))
    before, after = pads[:rank], pads[rank:]
    how = op.get("auto_pad", "NOTSET")
    if how in ("SAME_UPPER", "SAME_LOWER"):
        sizes = list(x.shape[2:])
        totals = [
            max(0, (-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size)
            for size, stride, width, dilation in zip(sizes, strides, kernel, dilations, strict=True)
        ]
        small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
        before, after = (small, large) if how == "SAME_UPPER" else (large, small)
    elif how == "VALID":
        before, after = [0] * rank, [0] * rank
    return Windows(kernel, strides, dilations, before, after)


def of_rank(functions: tuple[Function, Function, Function], rank: int) -> Function:
    """Return the function for one, two or three axes.

    Raises:
        UnsupportedVariant: there are more axes.
    """
    if not 1 <= rank <= 3:
        raise UnsupportedVariant(f"windows over {rank} axes")
    return functions[rank - 1]
