"""Costs from a device model: nothing is run."""

from __future__ import annotations

from typing import Any

from ...devices import DeviceModel
from ...torchtools.tensors import find_tensors
from .costs import OpCost, signature
from .flops import arithmetic_type, is_convolution, moved_bytes, operations
from .kernels import sized_workspaces

# A guess for a GPU's convolutions; libraries choose the algorithm at run time.
_MOST_WORKSPACE_BYTES = 64 * 2**20


class ModelledCosts:
    """Costs from the roofline of one device."""

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._known: dict[tuple[object, ...], OpCost] = {}

    def cost(self, func: Any, args: Any, kwargs: Any, result: Any) -> OpCost:
        """Returns the cost from arithmetic, memory traffic and launch.

        A convolution's workspace is taken to be as large as its results, at most 64 MiB.
        """
        key = signature(func, args, kwargs)
        if key not in self._known:
            self._known[key] = self._cost(func, args, kwargs, result)
        return self._known[key]

    def _cost(self, func: Any, args: Any, kwargs: Any, result: Any) -> OpCost:
        convolves = is_convolution(func)
        time_ms = self._model.op_ms(
            operations(func, args, kwargs, result),
            moved_bytes(func, args, kwargs, result),
            arithmetic_type(args),
            "convolution" if convolves else "matmul",
        )
        made = sum(tensor.numel() * tensor.element_size() for tensor in find_tensors(result))
        return OpCost(time_ms, min(made, _MOST_WORKSPACE_BYTES) if convolves else 0)

    def corrected(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Returns the result with workspaces, whose size fake kernels do not know."""
        return sized_workspaces(func, args, result)

    def notes(self) -> list[str]:
        """Returns notes that all times are modelled."""
        model = self._model
        note = f"modelled: no op was run; times from a roofline of {model.title} ({model.source or 'no source named'})"
        return [note, "modelled: a convolution's workspace is taken to be as large as its results, at most 64 MiB"]
