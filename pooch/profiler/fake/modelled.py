"""Costs from a device model: nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ...devices import DeviceModel
from ...torchtools.operators import operator_facts
from ...torchtools.split import in_plain_operators
from ...torchtools.tensors import find_tensors
from .costs import OpCost, signature
from .flops import arithmetic_type, is_convolution, moved_bytes, operations
from .kernels import sized_workspaces
from .trace import FakeTrace

# A guess for a GPU's convolutions; libraries choose the algorithm at run time.
_MOST_WORKSPACE_BYTES = 64 * 2**20


class ModelledCosts:
    """Costs from the roofline of one device."""

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._known: dict[tuple[object, ...], OpCost] = {}

    def cost(self, func: Any, args: Any, kwargs: Any, result: Any) -> OpCost:
        """Returns the cost from arithmetic, memory traffic and launch.

        A convolution's workspace is taken to be as large as its results, at most 64 MiB. A loss in slices costs what
        the operators of all slices do, and its workspace is what they hold at most beside its results.
        """
        key = signature(func, args, kwargs)
        if key not in self._known:
            parts = in_plain_operators(func)
            cost = self._cost(func, args, kwargs, result) if parts is None else self._cost_of(parts, args, kwargs)
            self._known[key] = cost
        return self._known[key]

    def _cost_of(self, run: Callable[..., object], args: Any, kwargs: Any) -> OpCost:
        """Returns the cost of what a loss in slices runs, and the most that it holds beside its results."""
        parts = _Parts(self)
        with parts:
            result = run(*args, **kwargs, each=parts.distinct)
        trace = parts.trace.finish()
        made = sum(event.size_bytes for event in trace.events)
        del result
        return OpCost(parts.time_ms, trace.peak_bytes - made)

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


class _Parts(TorchDispatchMode):
    """Adds up the costs of operators, and traces their memory."""

    def __init__(self, costs: ModelledCosts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._costs, self.trace, self.time_ms, self._times = costs, FakeTrace(), 0.0, 1

    def distinct(self, slices: Sequence[slice]) -> Iterator[slice]:
        """Yields the first slice, which counts for all but the last, and the last, which may have fewer rows."""
        if len(slices) > 1:
            self._times = len(slices) - 1
            yield slices[0]
        self._times = 1
        yield slices[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not operator_facts(func).is_view and func.namespace != "prim":
            cost = self._costs.cost(func, args, kwargs, result)
            self.time_ms += self._times * cost.time_ms
            self.trace.results(args, kwargs, result)
            self.trace.passing(cost.workspace_bytes)
        return result
