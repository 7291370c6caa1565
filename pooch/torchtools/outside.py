"""Tensors that were read before, and have changed or gone since: those that replays read, and those of autograd."""

from __future__ import annotations

import torch

from ..ground.errors import PlanMismatch, ReplayDiffers
from .tensors import describe, has_plain_storage, storage_of


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor has elements and its storage has none."""
    return has_plain_storage(tensor) and tensor.numel() > 0 and storage_of(tensor).nbytes() == 0


def refuse(tensor: torch.Tensor, version: int) -> None:
    """Refuses to replay a call that read a tensor from outside of the step.

    Args:
        tensor: what it read, which has changed since, or is empty.
        version: of the tensor when it was read.

    Raises:
        ReplayDiffers: if it has changed.
        PlanMismatch: if it is empty.
    """
    if has_no_memory(tensor):
        raise PlanMismatch(
            f"a replay needs a tensor {describe(tensor)} whose storage is empty, such as a parameter that FSDP has not "
            "gathered: the backward pass runs in another order than when it was profiled, so profile and plan this "
            "step again"
        )
    raise ReplayDiffers(
        "one of the variables needed for recomputing an activation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead"
    )


def changed_in_place(what: object, sizes: list[int]) -> RuntimeError:
    """Returns the error that PyTorch raises without hooks.

    Args:
        what: the type or dtype of a tensor that autograd has saved.
        sizes: its shape.
    """
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{what} {sizes}] was changed after autograd saved it"
    )
