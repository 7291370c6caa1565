"""The operators, by family. Importing this fills the registry."""

from pooch.onnx.operators import (
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
