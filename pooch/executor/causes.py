"""Reasons why a step may need more memory than planned, as far as the runtime can notice them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..ground.errors import TierError
from ..ground.units import format_bytes
from ..ir import Plan
from ..torchtools.module_changes import ModuleChanges
from ..torchtools.tensors import gradient_of, storage_bytes

AGAIN = "profile and plan again"
_Place = tuple[weakref.ref[torch.nn.Module], str]  # of a parameter: a module, and its name there


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that changed since the plan was made.

    Attributes:
        kind: Identifies the cause. Each kind is reported once per run.
        text: What was noticed.
        remedy: What to do about it.
    """

    kind: str
    text: str
    remedy: str


# Most likely first: what certainly needs memory comes before what may be harmless.
GRADIENTS = "gradients"
ORDER = (
    "tier",
    "off the path",
    "trainable",
    "parameters",
    "second order",
    "forwards",
    "retained",
    GRADIENTS,
    "bytes",
    "unknown",
)
OFF_PATH = Cause(
    "off the path", "the step left the profiled path, and what it took beyond the plan could not leave", AGAIN
)
SECOND_ORDER = Cause(
    "second order",
    "its backward pass builds a graph of its own (create_graph=True), which no plan covers",
    "lower the budget by that much, or do without second-order gradients",
)
RETAINED = Cause(
    "retained",
    "its graph, or a part of it, outlives the backward pass (retain_graph=True, or outputs that are kept), and so do "
    "the activations that were brought back",
    "drop retain_graph=True, or delete the loss and the outputs before the next step",
)
ROUNDING = Cause(
    "rounding",
    "the tensors themselves stay within it, and the rest comes from blocks whose sizes PyTorch's allocator rounds up",
    "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lower the budget by that much",
)
CHECKSUMS = Cause(
    "checksums",
    "the tensors themselves stay within it, and the rest is for checksums of what is computed again, which the device "
    "takes in order to compare",
    "lower the budget by that much, or give verify='off'",
)
UNKNOWN = Cause("unknown", "the cause is not known", f"{AGAIN}, or train with pooch.guard, which makes a tighter plan")


def forwards(count: int, planned: int) -> Cause:
    """More forward passes before a backward pass than the plan was made for."""
    text = f"{count} forward passes ran before one backward pass, but the plan was made for {planned}"
    return Cause("forwards", text, f"plan with microbatches_in_flight={count}, or with the forward passes as one step")


def gradients(size_bytes: int) -> Cause:
    """Gradients of earlier steps."""
    text = f"{format_bytes(size_bytes)} of gradients were alive before the step, but the plan expects none"
    remedy = (
        "call zero_grad() with set_to_none=True before the forward pass, or, where gradients accumulate, profile with "
    )
    return Cause(GRADIENTS, text, remedy + "accumulate=True and plan again")


def tier(size_bytes: int, fault: TierError) -> Cause:
    """What the plan swaps, and the tier did not take."""
    what, _, remedy = str(fault).rpartition(": ")
    stayed = f"{format_bytes(size_bytes)} that the plan swaps stayed, as {what or remedy}"
    return Cause("tier", stayed, remedy if what else "repeat the step")


def unknown_bytes(size_bytes: int) -> Cause:
    """More bytes alive before the step than in the profile."""
    text = f"{format_bytes(size_bytes)} that the profile does not contain were alive before the step"
    return Cause("bytes", text, f"release tensors and caches created since then, or {AGAIN}")


@dataclass(frozen=True, slots=True)
class Overrun:
    """A measured peak over the budget.

    Attributes:
        step: Number of the step, from 1.
        peak_bytes: The measured peak.
        budget_bytes: The budget of the plan.
        is_off_path: Whether the step left the profiled path.
        cause: The most likely cause.
    """

    step: int
    peak_bytes: int
    budget_bytes: int
    is_off_path: bool
    cause: Cause

    @property
    def is_of_tensors(self) -> bool:
        """Whether the tensors themselves exceed the budget, so that another plan helps."""
        return self.cause.kind not in (ROUNDING.kind, CHECKSUMS.kind)

    @property
    def excess_bytes(self) -> int:
        """By how much the peak exceeds the budget."""
        return self.peak_bytes - self.budget_bytes

    @property
    def text(self) -> str:
        """A one-line message."""
        return (
            f"step {self.step} took {format_bytes(self.peak_bytes)}, {format_bytes(self.excess_bytes)} over the "
            f"budget of {format_bytes(self.budget_bytes)}: {self.cause.text}; {self.cause.remedy}"
        )


def unmeasured_text(step: int, cause: Cause, plan: Plan) -> str:
    """A one-line message about a step whose peak was not measured."""
    return (
        f"step {step} may have exceeded the budget of {format_bytes(plan.budget_bytes)} (its peak was not measured; "
        f"{format_bytes(plan.predicted_peak_bytes)} were predicted): {cause.text}; {cause.remedy}"
    )


class ParameterWatch:
    """Notices parameters that were added or became trainable after a plan was applied.

    The model is looked through once some module was given something. In other steps only the flags of those parameters
    are compared that were not trainable at first.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)  # the training program holds it
        self._trainable_at_first = {name: p.requires_grad for name, p in model.named_parameters()}
        self._causes: tuple[Cause, ...] = ()
        self.changes = ModuleChanges()
        # Where the parameters are: PyTorch refuses to swap tensors that have weak references.
        self._parameters: list[_Place] = []
        self._frozen: list[_Place] = []
        self._remember(model)

    def _remember(self, model: torch.nn.Module) -> None:
        self._seen = self.changes.given.count
        before, self._parameters, self._frozen = self._trainable_at_first, [], []
        seen: set[int] = set()
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(path, recurse=False):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    self._parameters.append(place := (weakref.ref(module), name.rpartition(".")[2]))
                    if not before.get(name, True):
                        self._frozen.append(place)
        self._flags = self._flags_now()

    def _flags_now(self) -> list[bool]:
        return [p.requires_grad for p in map(_at, self._frozen) if p is not None]

    def causes(self) -> tuple[Cause, ...]:
        """Return what differs from when the plan was applied."""
        is_as_seen = self._seen == self.changes.given.count and (not self._frozen or self._flags_now() == self._flags)
        if is_as_seen and not self._causes:  # what differs may be taken away again, which nothing tells
            return ()
        model = self._model()
        if model is not None:
            self._remember(model)
            self._causes = tuple(self._compare(model))
        return self._causes

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that are alive."""
        found = []
        for place in self._parameters:  # of every step: a generator takes twice as long
            parameter = _at(place)
            if parameter is not None and (gradient := gradient_of(parameter)) is not None:
                found.append(gradient)
        return found

    def _compare(self, model: torch.nn.Module) -> Iterator[Cause]:
        now, before = dict(model.named_parameters()), self._trainable_at_first
        unfrozen = {n: p for n, p in now.items() if p.requires_grad and not before.get(n, True)}
        if unfrozen:
            text = f"{_named(unfrozen)} became trainable after the plan was made, with gradients of {_size(unfrozen)}"
            yield Cause("trainable", text, AGAIN)
        added = {n: p for n, p in now.items() if n not in before}
        if added:
            text = f"{_named(added)} of {_size(added)} joined the model after the plan was made"
            yield Cause("parameters", text, AGAIN)


def _at(place: _Place) -> torch.nn.Parameter | None:
    """The parameter of that name that a module has now."""
    module = place[0]()
    return None if module is None else module._parameters.get(place[1])


def _named(parameters: dict[str, torch.nn.Parameter]) -> str:
    first = next(iter(parameters))
    if len(parameters) == 1:
        return f"the parameter {first}"
    return f"{len(parameters)} parameters ({first}, ...)"


def _size(parameters: dict[str, torch.nn.Parameter]) -> str:
    return format_bytes(storage_bytes(list(parameters.values())))
