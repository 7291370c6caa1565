"""Where fake kernels say something else than real ones do about what an operator returns."""

from __future__ import annotations

from typing import Any

import torch

from pooch.torchtools.tensors import map_tensors


def distinct_results(result: Any) -> Any:
    """No operator returns one new tensor twice; some fake kernels do (both biases of a recurrent layer)."""
    seen: set[int] = set()

    def distinct(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen:
            return torch.empty_like(tensor)
        seen.add(id(tensor))
        return tensor

    return map_tensors(distinct, result) if isinstance(result, (list, tuple)) else result


def sized_workspaces(func: Any, args: Any, result: Any) -> Any:
    """Results that fake kernels give no size: what a recurrent layer keeps for its backward pass."""
    return result
