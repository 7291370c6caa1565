"""Why a step may need more than its plan foresaw, in words: what the runtime can notice of it while steps run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from pooch.ir import Plan
from pooch.torchtools.tensors import storage_bytes
from pooch.units import format_bytes

AGAIN = "profile and plan again"


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that the plan does not know of.

    Attributes:
        kind: told once under a run. text: what was noticed. remedy: what to do about it.
    """

    kind: str
    text: str
    remedy: str


# The likeliest first: what is certain to need memory before what may be harmless.
ORDER = (
    "off the path",
    "trainable",
    "parameters",
    "second order",
    "forwards",
    "retained",
    "gradients",
    "bytes",
    "unknown",
)
OFF_PATH = Cause("off the path", "the step left the profiled path, so the rest of it was kept", AGAIN)
SECOND_ORDER = Cause(
    "second order",
    "its backward pass builds a graph of its own (create_graph=True), which no plan covers",
    "plan for that much less, or do without second-order gradients",
)
RETAINED = Cause(
    "retained",
    "its graph, or a part of it, outlives the backward pass (retain_graph=True, or outputs that are kept), and so does "
    "what was brought back",
    "drop retain_graph=True, or delete the loss and the outputs before the next step",
)
ROUNDING = Cause(
    "rounding",
    "the tensors themselves keep to it, the rest is what PyTorch's allocator rounds their blocks up by",
    "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or plan for that much less",
)
UNKNOWN = Cause("unknown", "what needs it is not known", f"{AGAIN}, or train with pooch.guard, which plans tighter")


def forwards(count: int) -> Cause:
    """Several forward passes before one backward pass."""
    text = f"{count} forward passes came before one backward pass, and the plan was made for one"
    return Cause("forwards", text, "profile all of them as one step, with region='step'")


def gradients(size_bytes: int) -> Cause:
    """Gradients of earlier steps."""
    text = f"{format_bytes(size_bytes)} of gradients lived before the step, and the plan expects none"
    return Cause("gradients", text, "call zero_grad() with set_to_none=True before the forward pass, or plan for less")


def unknown_bytes(size_bytes: int) -> Cause:
    """More lives before the step than the profile saw."""
    text = f"{format_bytes(size_bytes)} lived before the step that the profile did not know"
    return Cause("bytes", text, f"let go of tensors and caches made since, or {AGAIN}")


@dataclass(frozen=True, slots=True)
class Overrun:
    """A measured peak over the budget.

    Attributes:
        step: counted from 1. peak_bytes, budget_bytes: measured, and promised.
        is_off_path: the step left the profiled path. cause: the likely one.
    """

    step: int
    peak_bytes: int
    budget_bytes: int
    is_off_path: bool
    cause: Cause

    @property
    def is_rounding(self) -> bool:
        """Whether the tensors themselves keep to the budget."""
        return self.cause.kind == ROUNDING.kind

    @property
    def excess_bytes(self) -> int:
        """By how much."""
        return self.peak_bytes - self.budget_bytes

    @property
    def text(self) -> str:
        """One line for people."""
        return (
            f"step {self.step} took {format_bytes(self.peak_bytes)}, {format_bytes(self.excess_bytes)} over the "
            f"budget of {format_bytes(self.budget_bytes)}: {self.cause.text}; {self.cause.remedy}"
        )


def unmeasured_text(step: int, cause: Cause, plan: Plan) -> str:
    """One line on a step of which no peak is known."""
    return (
        f"step {step} may have passed the budget of {format_bytes(plan.budget_bytes)} (predicted were "
        f"{format_bytes(plan.predicted_peak_bytes)}, it was not measured): {cause.text}; {cause.remedy}"
    )


class ParameterWatch:
    """Notices parameters that became trainable, or came, since a plan was applied.

    Each step compares identities and flags alone; names are looked up once something differs.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)  # whoever trains it holds it
        self._trainable_at_first = {name: p.requires_grad for name, p in model.named_parameters()}
        self._causes: tuple[Cause, ...] = ()
        self._remember(model)

    def _remember(self, model: torch.nn.Module) -> None:
        self._modules = [weakref.ref(module) for module in model.modules()]
        self._seen = self._look()

    def _look(self) -> tuple[list[int], list[bool]]:
        """Identities of submodules and parameters, and which of these are trainable."""
        modules = [module for module in (each() for each in self._modules) if module is not None]
        children = chain.from_iterable(module._modules.values() for module in modules)
        parameters = _parameters_of(modules)
        return [*map(id, children), *map(id, parameters)], [p.requires_grad for p in parameters]

    def causes(self) -> tuple[Cause, ...]:
        """What is another way now than when the plan was applied."""
        model = self._model()
        if model is not None and self._look() != self._seen:
            self._remember(model)
            self._causes = tuple(self._compare(model))
        return self._causes

    def gradients(self) -> list[torch.Tensor]:
        """Those that live now."""
        modules = [module for module in (each() for each in self._modules) if module is not None]
        return [p.grad for p in _parameters_of(modules) if p.grad is not None]

    def _compare(self, model: torch.nn.Module) -> Iterator[Cause]:
        now, before = dict(model.named_parameters()), self._trainable_at_first
        unfrozen = {n: p for n, p in now.items() if p.requires_grad and not before.get(n, True)}
        if unfrozen:
            text = f"{_named(unfrozen)} became trainable since, with gradients of {_size(unfrozen)}"
            yield Cause("trainable", text, AGAIN)
        added = {n: p for n, p in now.items() if n not in before}
        if added:
            yield Cause("parameters", f"{_named(added)} came to the model since, of {_size(added)}", AGAIN)


def _parameters_of(modules: list[torch.nn.Module]) -> list[torch.nn.Parameter]:
    return [p for module in modules for p in module._parameters.values() if p is not None]


def _named(parameters: dict[str, torch.nn.Parameter]) -> str:
    first = next(iter(parameters))
    if len(parameters) == 1:
        return f"the parameter {first}"
    return f"{len(parameters)} parameters ({first}, ...)"


def _size(parameters: dict[str, torch.nn.Parameter]) -> str:
    return format_bytes(storage_bytes(list(parameters.values())))
