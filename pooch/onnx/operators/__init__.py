"""The operators by family. Importing this package fills the registry."""

from . import (
    attention,
    convolution,
    elementwise,
    indexing,
    linear,
    losses,
    normalization,
    pooling,
    recurrent,
    reductions,
    resizing,
    shapes,
)

__all__ = [
    "attention",
    "convolution",
    "elementwise",
    "indexing",
    "linear",
    "losses",
    "normalization",
    "pooling",
    "recurrent",
    "reductions",
    "resizing",
    "shapes",
]
