"""What tells one kind of step from another before it runs: the key under which its plan is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch

from ..torchtools.tensors import dtype_name, gradient_of

REGION = -1  # what is called, where it is no module; parts of the first model share it, and are given tensors


@dataclass(frozen=True, slots=True)
class StepKey:
    """The key of a step: the call that begins it, and the state of training around it.

    Attributes:
        family: Everything but the sizes: steps of a family differ in shape alone.
        sizes: All sizes of all tensors of the call, in order.
    """

    family: tuple[object, ...]
    sizes: tuple[int, ...]

    @property
    def text(self) -> str:
        """The shapes, for people."""
        shapes, position = [], 0
        for kind in self.family[0]:  # type: ignore[attr-defined]
            if isinstance(kind, tuple):
                shapes.append("x".join(map(str, self.sizes[position : position + kind[1]])) or "scalar")
                position += kind[1]
        is_region = self.family[1:2] == (REGION,)  # which is given nothing
        return ", ".join(dict.fromkeys(shapes)) or ("any shape" if is_region else "no tensors")


def step_key(
    call: int, args: Any, kwargs: Any, models: list[torch.nn.Module], parameters: list[torch.nn.Parameter]
) -> StepKey:
    """Return the key of the step that a call begins.

    Numbers among the arguments do not count, since a counter would make every step a new one.

    Args:
        call: Which of the governed modules is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        models: The governed models.
        parameters: Their parameters.
    """
    kinds: list[object] = []
    sizes: list[int] = []
    for leaf in _leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            kinds.append((dtype_name(leaf.dtype), leaf.dim(), leaf.requires_grad))
            sizes.extend(_nested_sizes(leaf) if leaf.is_nested else leaf.shape)
        elif isinstance(leaf, (str, bool)) or leaf is None:
            kinds.append(leaf)
    with_gradient = sum(gradient_of(parameter) is not None for parameter in parameters)
    trainable = sum(parameter.requires_grad for parameter in parameters)
    modes = tuple(model.training for model in models)
    state = (call, with_gradient > 0, trainable, modes, *casts_now())
    return StepKey((tuple(kinds), *state), tuple(sizes))


def casts_now() -> tuple[str, ...]:
    """Return to what ops are cast now, on which kinds of devices."""
    found: list[str] = []
    for device_type in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device_type):
            found.append(f"{device_type} {torch.get_autocast_dtype(device_type)}")
    return tuple(found)


def _nested_sizes(tensor: torch.Tensor) -> list[int]:
    """Return a number for each dimension of a nested tensor, whose own sizes are none that can be compared."""
    return [tensor.size(0), tensor.values().numel(), *[1] * (tensor.dim() - 2)]


def _leaves(item: Any) -> Iterator[object]:
    if isinstance(item, (list, tuple)):
        for each in item:
            yield from _leaves(each)
    elif isinstance(item, Mapping):
        for name, each in item.items():
            yield str(name)
            yield from _leaves(each)
    elif is_dataclass(item) and not isinstance(item, type):
        for each in vars(item).values():
            yield from _leaves(each)
    else:
        yield item
