"""Which steps treat each parameter by itself, as far as that is known of PyTorch's own optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import optim
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from ..function_modes import past_subclasses
from ..tensors import find_tensors, has_plain_storage, storage_key
from ..watch import LIBRARY
from .cutting import Stepped
from .diversion import Step

# By exact class: whatever derives from one of these may do otherwise. None of them writes to its groups.
_ONE_BY_ONE: frozenset[type[optim.Optimizer]] = frozenset(
    {
        optim.Adadelta,
        optim.Adafactor,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.ASGD,
        optim.Muon,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
        optim.SparseAdam,
    }
)

_GRADIENT, _IS_SPARSE = attrgetter("grad"), attrgetter("is_sparse")

_TORCH_DIRECTORY = str(Path(torch.__file__).parent)


def is_known(optimizer: optim.Optimizer, plain: Step) -> bool:
    """Returns whether the step is one of PyTorch's own that treat each parameter by itself, and nobody has changed it.

    Args:
        optimizer: the optimizer.
        plain: the step that its class defines.
    """
    return type(optimizer) in _ONE_BY_ONE and _is_of_torch(plain)


def _is_of_torch(function: Any) -> bool:
    while function is not None:
        if not function.__code__.co_filename.startswith(_TORCH_DIRECTORY):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def why_whole_by_settings(groups: Sequence[dict[str, Any]]) -> str | None:
    """Returns why no step with these settings can be cut, or None."""
    for setting in ("differentiable", "capturable"):
        if any(group.get(setting) for group in groups):
            return f"it was made with {setting}=True"
    return None


@past_subclasses
def are_odd(stepped: Stepped) -> bool:
    """Returns whether parameters or gradients are on one storage, or a gradient is not dense: what may change later."""
    parameters = list(chain(*stepped))
    gradients = list(map(_GRADIENT, parameters))  # in every step, for every parameter: no loop in Python
    if len(set(map(id, gradients))) < len(gradients) or any(map(_IS_SPARSE, gradients)):
        return True
    keys = list(filter(None, _keys_of([*parameters, *gradients])))
    return len(set(keys)) < len(keys)


def _keys_of(tensors: list[torch.Tensor]) -> list[int | None]:
    library = LIBRARY.loaded
    if library is None:
        return [storage_key(each) if has_plain_storage(each) else None for each in tensors]
    keys: list[int | None] = library.keys_of(tensors)
    return keys


def why_whole_by_tensors(optimizer: optim.Optimizer, stepped: Stepped, known: bool) -> str | None:
    """Returns why these parameters cannot be stepped one after the other, or None.

    Args:
        optimizer: the optimizer.
        stepped: of each group, the parameters with a gradient.
        known: whether the optimizer is known to take each parameter by itself where it is not told to take a list.
    """
    parameters = list(chain(*stepped))
    if _overlap([[each] for each in parameters]) or _overlap([[each.grad] for each in parameters]):
        return "parameters or gradients share memory"
    takes_lists = any(map(_takes_lists, optimizer.param_groups, stepped))
    states = [find_tensors([optimizer.state.get(each)]) for each in parameters] if takes_lists or not known else []
    if _overlap([[each, each.grad, *state] for each, state in zip(parameters, states, strict=False)]):
        return "parameters, gradients or states of different parameters share memory"
    for group, parameters in zip(optimizer.param_groups, stepped, strict=True):
        reason = _why_whole_group(optimizer, group, parameters, known)
        if reason is not None:
            return reason
    if not known and any(parameter.grad.is_sparse for parameter in chain(*stepped) if parameter.grad is not None):
        return "gradients are sparse"
    return None


def _why_whole_group(
    optimizer: optim.Optimizer, group: dict[str, Any], parameters: Sequence[torch.Tensor], known: bool
) -> str | None:
    # Adafactor takes its smallest divisor from the first dtype that it sees, unless it is told one.
    if type(optimizer) is optim.Adafactor and group["eps"][0] is None and len({each.dtype for each in parameters}) > 1:
        return "a group has several dtypes, the first of which decides how all are computed"
    if known and not _takes_lists(group, parameters):
        return None
    if len({*map(_kind, parameters)}) > 1:
        return "a group has parameters of several kinds, which decide together how they are computed"
    # SGD looks whether all parameters of a list have a momentum; others make what is missing beforehand.
    if (
        type(optimizer) is optim.SGD
        and group["momentum"]
        and len({_has_momentum(optimizer, p) for p in parameters}) > 1
    ):
        return "some parameters of a group are stepped for the first time, which decides how all are computed"
    return None


def _has_momentum(optimizer: optim.Optimizer, parameter: torch.Tensor) -> bool:
    return optimizer.state.get(parameter, {}).get("momentum_buffer") is not None


def _takes_lists(group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> bool:
    """Whether a group may be computed by ops on lists of tensors: `foreach` and `fused`, which devices default to."""
    if group.get("foreach") is None and group.get("fused") is None:
        return any(each.device.type in _get_foreach_kernels_supported_devices() for each in parameters)
    return bool(group.get("foreach") or group.get("fused"))


def _kind(parameter: torch.Tensor) -> tuple[object, ...]:
    """What decides, for a list as a whole, whether and by which kernels its tensors are computed together."""
    gradient = parameter.grad
    assert gradient is not None
    is_sparse = gradient.layout is not torch.strided
    same_strides = is_sparse or gradient.stride() == parameter.stride()
    return type(parameter), parameter.device.type, gradient.layout, parameter.is_complex(), same_strides


@past_subclasses
def _overlap(bundles: Sequence[Sequence[torch.Tensor | None]]) -> bool:
    """Returns whether tensors of different bundles share memory."""
    widest: tuple[int, int, int, int] | None = None
    for place in sorted((*each, number) for number, bundle in enumerate(bundles) for each in _places(bundle)):
        if widest is not None and widest[0] == place[0] and place[1] < widest[2] and widest[3] != place[3]:
            return True
        if widest is None or widest[0] != place[0] or place[2] > widest[2]:
            widest = place
    return False


def _places(tensors: Sequence[torch.Tensor | None]) -> Iterator[tuple[int, int, int]]:
    """Storage, first byte and end of each tensor, whether the storage has its bytes now or not."""
    for tensor in tensors:
        if tensor is not None and has_plain_storage(tensor) and tensor.numel():
            item_bytes = tensor.element_size()
            extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            start_byte = int(tensor.storage_offset()) * item_bytes
            yield storage_key(tensor), start_byte, start_byte + extent * item_bytes
