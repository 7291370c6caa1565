"""Which optimizers step some parameters, and how much state they have and have yet to make."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from traceback import walk_stack
from typing import Any

import torch

from ..executor.slices import MOMENTS, TEMPORARIES, known_moments
from ..ground.errors import UsageError
from ..ground.live_objects import live_objects
from ..torchtools.module_tensors import parameters_of
from ..torchtools.optimizer_slices import StepNeeds, needs_of, plain_step
from ..torchtools.tensors import find_tensors, gradient_of, tensor_bytes
from ..torchtools.threads import OwnThread, is_alone
from .seldom import Seldom


def is_stepping() -> bool:
    """Whether the calling thread is within the step of an optimizer. Asked seldom: it looks through the stack."""
    module = torch.optim.Optimizer.__module__
    return any(
        frame.f_code.co_name == _AROUND_STEPS and frame.f_globals.get("__name__") == module
        for frame, _ in walk_stack(sys._getframe(1))
    )


_AROUND_STEPS = "wrapper"  # what `torch.optim.Optimizer` surrounds the steps of all kinds of optimizers with


def given_optimizers(given: object) -> list[torch.optim.Optimizer]:
    """Return the optimizers that were given: none, one, or several.

    Raises:
        UsageError: Something else is among them.
    """
    found: list[Any] = [] if given is None else list(given) if isinstance(given, (list, tuple, set)) else [given]
    for each in found:
        if not hasattr(each, "param_groups"):  # some that wrap another one are no `torch.optim.Optimizer`
            raise UsageError(
                f"the optimizer is of type {type(each).__name__}: give one, or a list of them, as in "
                'pooch.auto(model, "16GiB", optimizer)'
            )
    return found


class OptimizerStates:
    """The state of the optimizers of some models.

    Args:
        given: The optimizers of the models. Without any, those that are there are looked for.
        attached: Optimizers that were found. As long as there are any, others are looked for only where models are new.
    """

    def __init__(self, given: Sequence[torch.optim.Optimizer], attached: Collection[torch.optim.Optimizer]) -> None:
        self._given = [weakref.ref(optimizer) for optimizer in given]
        self._attached = attached
        self._seen = self._given  # what was found the last time that state to come was asked for
        self._looking, self._looked_for = Seldom(), set[int]()  # for optimizers; for those of which parameters
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # without being attached
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # these, and what was found
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # models whose optimizers were looked for
        self._threads: weakref.WeakKeyDictionary[torch.optim.Optimizer, OwnThread] = weakref.WeakKeyDictionary()
        self._sizes: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has made a step in this thread, as one that was made after the others were found."""
        self._threads[optimizer] = OwnThread()
        if optimizer not in self._attached:
            self._stepped.add(optimizer)
            self._met.add(optimizer)
            self._looking = Seldom()

    def meet(self, models: Sequence[torch.nn.Module]) -> None:
        """Look for the optimizers of some models, as everything is looked through for something else.

        Args:
            models: The models.
        """
        self.optimizers_of({id(each) for each in parameters_of(models)})

    def to_attach(
        self, models: Sequence[torch.nn.Module], device: torch.device, parameters: Iterable[torch.Tensor] | None = None
    ) -> list[torch.optim.Optimizer]:
        """Return the optimizers that are not attached of what is found: of some models, given, and that have stepped.

        What the latter step may be in no model, as copies of parameters in full precision are.

        Args:
            models: The models.
            device: Where parameters of optimizers have to be.
            parameters: Their parameters, where somebody has them.
        """
        are_new = any(model not in self._known for model in models)
        self._known.update(models)
        numbers = {id(each) for each in (parameters_of(models) if parameters is None else parameters)}
        others = [*self._living_of(self._given), *self._stepped]
        theirs = self.optimizers_of(numbers, look=are_new) if are_new or self._attached else self._looked_up(numbers)
        found = [*theirs, *(each for each in others if is_on(each, device))]
        self._stepped.clear()
        return [each for each in dict.fromkeys(found) if each not in self._attached]

    def in_no_model(
        self, models: Sequence[torch.nn.Module], parameters: Iterable[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Return what attached optimizers step that is no parameter of some models, nor of any that was trained before.

        What another thread trains is left out: PyTorch ends the process if a gradient is read while that goes.

        Args:
            models: The models.
            parameters: Their parameters, where somebody has them.
        """
        here = {id(model) for model in models}
        others = [model for model in self._known if id(model) not in here]
        own = parameters_of(models) if parameters is None else parameters
        known = {id(each) for each in chain(own, parameters_of(others))}
        stepped = [each for optimizer in self.own() for each in stepped_by(optimizer)]
        return [each for each in stepped if id(each) not in known]

    def own(self) -> list[torch.optim.Optimizer]:
        """Return the attached optimizers but for those that another thread steps."""
        are_all_here = is_alone()
        return [each for each in list(self._attached) if are_all_here or self._steps_here(each)]

    def _steps_here(self, optimizer: torch.optim.Optimizer) -> bool:
        thread = self._threads.get(optimizer)
        return thread is not None and thread.is_here

    @staticmethod
    def _living_of(
        optimizers: Sequence[weakref.ref[torch.optim.Optimizer]],
    ) -> list[torch.optim.Optimizer]:
        return [optimizer for optimizer in (each() for each in optimizers) if optimizer is not None]

    def optimizers_of(self, parameters: set[int], *, look: bool = False) -> list[torch.optim.Optimizer]:
        """Return the optimizers of some parameters, whose ids are given.

        All objects are looked through until one of them is known, which takes long, or where that is asked for.
        """
        found = self._living_of(self._given)
        if not found and (look or not self._attached):
            found = [] if look else _that_step(parameters, list(self._met))
            if not found:
                found = live_objects(torch.optim.Optimizer)
                self._met.update(_that_step(parameters, found))
        return _that_step(parameters, found)

    def _looked_up(self, parameters: set[int]) -> list[torch.optim.Optimizer]:
        """Return the optimizers of some parameters. Ever fewer looks are made where a program updates them itself.

        One that is made later is noted as it steps.
        """
        if not parameters <= self._looked_for:
            self._looking = Seldom()
            self._looked_for |= parameters
        if self._attached or not self._looking.is_due():  # what is attached was met
            return _that_step(parameters, list(self._met))
        return self.optimizers_of(parameters)

    def bytes_of(self, trained: Sequence[torch.nn.Parameter]) -> int:
        """Return how much state the optimizer that was given has for some parameters."""
        given = self._living_of(self._given)
        states = [optimizer.state[each] for optimizer in given for each in trained if each in optimizer.state]
        return sum(tensor_bytes(tensor) for tensor in find_tensors(states))

    def stepping_bytes(self, trained: Sequence[torch.nn.Parameter]) -> int:
        """Return what a first step adds, where that is known: moments to come, and temporary tensors."""
        to_come = list(self._to_come(trained))
        largest_bytes = max((parameter.nbytes for parameter, _ in to_come), default=0)
        return sum(size_bytes for _, size_bytes in to_come) + TEMPORARIES * largest_bytes

    def bytes_to_come(self, models: Sequence[torch.nn.Module]) -> int:
        """Return how much state optimizers have yet to make, as far as that is known."""
        trained = [each for each in parameters_of(models) if each.requires_grad]
        return sum(size_bytes for _, size_bytes in self._to_come(trained))

    def is_like_before(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer that is about to step has as many parameters and states as when this was last asked."""
        size = sum(len(group["params"]) for group in optimizer.param_groups), len(optimizer.state)
        before, self._sizes[optimizer] = self._sizes.get(optimizer), size
        return before == size

    @staticmethod
    def made_by_step(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[int, int]:
        """Return the bytes of state that an optimizer's next step makes, and of all else that it takes at once.

        A copy of the optimizer makes a step on small parameters, which tells it of any kind. Where that cannot be, it
        is thought to take two moments.

        Args:
            optimizer: The optimizer.
            device: Where bytes count.
        """
        needs = _needs_of(optimizer)
        stepped, state_bytes = list[torch.Tensor](), 0.0
        for index, group in enumerate(optimizer.param_groups):
            trained = [each for each in group["params"] if each.requires_grad and each.device == device]
            new = [each for each in trained if not optimizer.state.get(each)]
            state_bytes += sum(needs.state_bytes(each, index, MOMENTS) + needs.kept * each.nbytes for each in new)
            stepped += trained
        gradients_bytes = sum(each.nbytes for each in stepped if gradient_of(each) is None)
        return int(state_bytes), gradients_bytes + needs.temporary_bytes(stepped)

    @staticmethod
    def staying_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
        """Return the bytes of state that cannot leave before the next step ends, if that stays whole. 0: it is unknown.

        Args:
            optimizer: The optimizer.
            device: Where bytes count.
        """
        needs = _needs_of(optimizer)
        staying = [
            needs.kept * each.nbytes + (0.0 if needs.asks else needs.state_bytes(each, index, MOMENTS))
            for index, group in enumerate(optimizer.param_groups)
            for each in group["params"]
            if each.requires_grad and each.device == device and not optimizer.state.get(each)
        ]
        return int(sum(staying))

    def _to_come(self, trained: Sequence[torch.nn.Parameter]) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the parameters that optimizers of a known kind step, with the bytes of state that each has to come."""
        numbers = {id(parameter) for parameter in trained}
        optimizers = self._living_of(self._seen) or self._looked_up(numbers)
        self._seen = [weakref.ref(optimizer) for optimizer in optimizers]
        for optimizer in optimizers:
            moments = known_moments(optimizer)
            if moments is None:
                continue
            for parameter in stepped_by(optimizer):
                if id(parameter) in numbers:
                    yield parameter, 0 if parameter in optimizer.state else moments * parameter.nbytes


def _needs_of(optimizer: torch.optim.Optimizer) -> StepNeeds:
    try:
        needs = needs_of(optimizer, plain_step(optimizer))
    except UsageError:
        needs = None  # it hands its steps to another one
    return StepNeeds({}, TEMPORARIES, 0) if needs is None else needs


def stepped_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return what an optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_on(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether any of what an optimizer steps is on a device."""
    return any(parameter.device == device for parameter in stepped_by(optimizer))


def _that_step(parameters: set[int], optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    groups = ((each, getattr(each, "param_groups", ())) for each in optimizers)  # another thread may be making one
    return [each for each, stepped in groups if any(id(tensor) in parameters for tensor in find_tensors(stepped))]
