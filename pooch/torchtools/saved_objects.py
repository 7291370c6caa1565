"""Functions that the program writes in Python get back the tensor objects that they have saved.

PyTorch gives hooks of saved tensors a further tensor on the same memory, and a function what is made from their answer.
Without hooks, a function gets the very object that it saved, unless it has returned it: a parameter, with attributes
such as the `main_grad` of Megatron's layers, or a tensor of a subclass. A backward pass may depend on any of that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx

from .stand_ins import Place, StandIns
from .tensors import has_plain_storage, storage_key

_NOTED = "_pooch_saved"


class _Saved:
    """A tensor that a function has saved.

    Autograd holds a leaf that requires gradients anyway. To hold any other tensor would keep its memory, so of that one
    what makes it special is held: its class and its attributes.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        try:
            is_held = tensor.requires_grad and tensor.is_leaf
        except RuntimeError:  # a view made without gradients, of which PyTorch refuses to tell the history
            is_held = False
        self._tensor: Callable[[], torch.Tensor | None] = (lambda: tensor) if is_held else weakref.ref(tensor)
        self._kind, self._attributes = type(tensor), vars(tensor)

    def given_back(self, found: torch.Tensor) -> torch.Tensor:
        """Return what the function gets.

        Args:
            found: What autograd gives it.
        """
        tensor = self._tensor()
        if tensor is found or not has_plain_storage(found):
            return found
        if tensor is not None and has_plain_storage(tensor) and storage_key(tensor) == storage_key(found):
            return tensor
        if type(found) is torch.Tensor and self._kind is not torch.Tensor:
            found = found.as_subclass(self._kind)
        vars(found).update(self._attributes)
        return found


def _saving(original: Any) -> Any:
    @wraps(original)
    def save_for_backward(ctx: Any, *tensors: Any) -> None:
        original(ctx, *tensors)
        if isinstance(ctx, BackwardCFunction):
            with torch._C.DisableTorchFunction():  # modes and subclasses of the program see what the program does
                setattr(ctx, _NOTED, [_Saved(each) if isinstance(each, torch.Tensor) else None for each in tensors])
            _READING.use(_FOR_GOOD)

    return save_for_backward


def _reading(original: Any) -> Any:
    def saved_tensors(ctx: Any) -> Any:
        found = original.__get__(ctx)
        noted = vars(ctx).get(_NOTED, ())
        if len(noted) != len(found):
            return found
        with torch._C.DisableTorchFunction():
            return tuple(
                each if saved is None or each is None or each.grad_fn is ctx else saved.given_back(each)
                for saved, each in zip(noted, found, strict=True)
            )

    return property(saved_tensors)


class _User:
    """Uses stand-ins."""


# Graphs may outlive the budget under which they were built. Where nothing was noted, this gives what PyTorch gives.
_FOR_GOOD = _User()
_READING = StandIns(Place(BackwardCFunction, "saved_tensors", _reading))
SAVED_OBJECTS = StandIns(Place(FunctionCtx, "save_for_backward", _saving))
