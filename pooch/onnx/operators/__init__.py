"""The operators by family. Importing this package fills the registry."""

from . import (  # noqa: F401 - each enters its operators
    attention,
    convolution,
    elementwise,
    indexing,
    linear,
    losses,
    normalization,
    pooling,
    randomness,
    recurrent,
    reductions,
    resizing,
    sampling,
    sequences,
    shapes,
    signals,
)
