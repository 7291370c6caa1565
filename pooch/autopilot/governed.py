"""The models that a budget is held over, and the regions around their calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..executor.attachment import callable_parts
from ..ground.errors import UsageError
from ..torchtools import accelerators
from ..torchtools.calls import (
    COMPILED_LATER,
    PLACE,
    SAVED_WITHOUT,
    CallContext,
    CallingThread,
    CallRegion,
    FirstCall,
    compiled_of,
    is_compiled,
    refuse_taken,
)
from ..torchtools.tensors import gradient_of
from ..torchtools.training_state import model_device
from ..torchtools.watch import LIBRARY
from .carrying import Carrier
from .quiet import QuietCalls

# Surrounds one outermost call: the number of what is called (negative for parts of a model), its arguments, and the
# calls of the same module that need next to nothing.
Surround = Callable[[int, Any, Any, QuietCalls], CallContext]


_USE = 'pooch.auto(model, "16GiB")'


def models_of(given: object) -> list[Any]:
    """What `pooch.auto` was given for its models, as a list; `GovernedModels` says which of them are none.

    Raises:
        UsageError: There is none.
    """
    if isinstance(given, torch.nn.Module | str) or not isinstance(given, Iterable):
        return [given]
    models = list(given)
    if not models:
        raise UsageError(f"auto() needs at least one model: {_USE}")
    return models


def device_named(name: torch.device | str) -> torch.device:
    """Return a device that a user has named.

    Raises:
        UsageError: There is none of that name here.
    """
    try:
        device = torch.device(name)
        is_there = accelerators.is_available(device.type)
    except RuntimeError:
        raise UsageError(f"there is no device {str(name)!r}: give one such as 'cuda' or 'cuda:0'") from None
    if not is_there:
        raise UsageError(f"PyTorch finds no {device.type} device here: check its driver, or leave out device=")
    return device


def _refuse_lazy(model: torch.nn.Module) -> None:
    """Refuse a model with parameters or buffers whose shapes its first call decides on."""
    named = (*model.named_parameters(), *model.named_buffers())
    name = next((name for name, tensor in named if is_lazy(tensor)), None)
    if name is not None:
        raise UsageError(
            f"{name} of the model has no shape yet, as its module is lazy: call the model once, under torch.no_grad(), "
            "before pooch.auto, or run the script under pooch exec"
        )


class _GovernedCall(CallRegion):
    """A call of a governed module, which may begin a step."""

    def __init__(
        self, module: torch.nn.Module, surround: Surround, here: CallingThread, number: int, carrier: Carrier | None
    ) -> None:
        super().__init__(module, nullcontext, "auto" if number >= 0 else "watch", here, takes_compiled=True)
        self.stays = self.is_whole = number >= 0
        self._surround, self._number = surround, number  # the model keeps the budget alive, and nothing else does
        self._carrier = carrier
        self._quiet = QuietCalls()
        self.wrapped: Callable[[torch.nn.Module], None] | None = None

    def run(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        around = self._surround(self._number, args, kwargs, self._quiet)
        try:
            with around:
                if self._carrier is not None:
                    return self._carrier.call(partial(self._called, module), args, kwargs)
                return self.plain(module, args, kwargs)
        finally:
            around.is_left = True

    def _called(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.plain(module, args, kwargs)

    def compiled_in_place(self) -> None:
        super().compiled_in_place()
        run_natively, module = getattr(self, "run_natively", None), self._module()
        if run_natively is not None and module is not None:
            run_natively(None, module, False)

    def compiled_outside(self, compiled: torch.nn.Module) -> None:
        if self.wrapped is not None:
            self.wrapped(compiled)


@cache
def _native_kind() -> type[_GovernedCall]:
    """The class of regions whose calls come to the native part first."""
    library = LIBRARY.get()
    if library is None:
        return _GovernedCall
    kind: type[_GovernedCall] = type("_NativelyGovernedCall", (_GovernedCall, library.GovernedCall), {})
    library.take_calls(kind)
    return kind


class GovernedModels:
    """Models with a region around each of their calls, and around calls of their parts on their own.

    Only the models hold the regions; this holds neither.

    Args:
        models: The models. There may be none yet, in programs that train tensors of no module.
        device: Where they compute, if they are to be moved there. Then batches are as well. Of no models: where they
            would be.

    Attributes:
        device: Their device.
        quiet_steps: Runs steps for which nothing is to be done natively, if anything does.

    Raises:
        UsageError: If one of them is no module, is under a plan, or if they are on several devices.
    """

    def __init__(self, models: Sequence[torch.nn.Module], device: torch.device | None = None) -> None:
        given: Sequence[object] = models
        for model in given:
            if not isinstance(model, torch.nn.Module):
                kind = type(model).__name__
                raise UsageError(f"auto() takes a torch.nn.Module or a list of them, not {kind}: {_USE}")
            refuse_taken(model, can_replace=True, takes_compiled=True)
            _refuse_lazy(model)
        if device is not None and str(device) == device.type:
            device = accelerators.current_device(device.type)
        self._carrier = None if device is None or not models else Carrier(device)
        devices = {model_device(model) for model in models} if device is None else {device}
        if len(devices) != 1:
            raise UsageError(f"the models are on {len(devices)} devices: use pooch.auto for those of one device")
        self.device = devices.pop()
        self._models: list[Callable[[], torch.nn.Module | None]] = [weakref.ref(model) for model in models]
        self._calls: list[weakref.ref[_GovernedCall]] = []
        self._expected: list[weakref.ref[FirstCall]] = []
        self._comes: Callable[[torch.nn.Module], None] | None = None
        self.quiet_steps: Any = None

    @property
    def living(self) -> list[torch.nn.Module]:
        """The models that are still there."""
        return [model for model in (each() for each in self._models) if model is not None]

    @property
    def have_gradients(self) -> bool:
        """Whether a parameter of theirs has a gradient."""
        return any(gradient_of(each) is not None for model in self.living for each in model.parameters())

    def is_governed(self, module: object) -> bool:
        """Whether a module is one of the models."""
        return any(each() is module for each in self._models)

    def is_part(self, module: torch.nn.Module) -> bool:
        """Whether a module is a part of one of the models."""
        return any(each is module for model in self._models for each in _modules_of(model()))

    @property
    def is_one(self) -> bool:
        """Whether no other model was ever governed than the first."""
        return len(self._models) == 1

    def called(self, number: int) -> list[torch.nn.Module]:
        """The model of a call, given its number: that of the model, or a negative one for a part of it."""
        place = number if number >= 0 else -1 - number
        model = self._models[place]() if place < len(self._models) else None
        return [] if model is None else [model]

    @property
    def name(self) -> str:
        """Their kinds, for people."""
        return " + ".join(type(model).__name__ for model in self.living)

    def place(self, surround: Surround, here: CallingThread, comes: Callable[[torch.nn.Module], None]) -> None:
        """Put regions around the calls of all models.

        Args:
            surround: Surrounds each outermost call.
            here: What the calling thread does.
            comes: Called with what `torch.compile` has made of a model, or makes of it later, when that is first
                called. Until then the model is governed itself: the program may train either.
        """
        COMPILED_LATER.use(self)
        SAVED_WITHOUT.use(self)
        self._comes = comes
        for number, model in enumerate(self.living):
            self._place(model, number, surround, here)
        for compiled in compiled_of(self.living):
            self._expect(compiled)

    def _expect(self, compiled: torch.nn.Module) -> None:
        if self._comes is not None and vars(compiled).get(PLACE) is None:
            self._expected.append(weakref.ref(FirstCall(compiled, self._comes)))

    def _place(self, model: torch.nn.Module, number: int, surround: Surround, here: CallingThread) -> None:
        placed = [self._region(model, number, surround, here)]
        placed[0].wrapped = self._expect
        # What a compiled graph calls is part of it, and would be compiled anew with a region.
        parts = [] if is_compiled(model) else [part for _, part in callable_parts(model) if not is_compiled(part)]
        placed += [self._region(part, -1 - number, surround, here) for part in parts]
        living = [each for each in self._calls if each() is not None]  # models may come and go with every step
        self._calls = living + [weakref.ref(each) for each in placed]

    def _region(self, module: torch.nn.Module, number: int, surround: Surround, here: CallingThread) -> _GovernedCall:
        if self.quiet_steps is None:
            return _GovernedCall(module, surround, here, number, self._carrier)
        region = _native_kind()(module, surround, here, number, self._carrier)
        if not is_compiled(module) and self._carrier is None:
            region.run_natively(self.quiet_steps, module, number == 0)  # type: ignore[attr-defined]
        return region

    def add(self, model: torch.nn.Module, surround: Surround, here: CallingThread) -> bool:
        """Govern a further model, and return whether it is no part of one that is governed already.

        A part of a governed model is from now on also governed where it is called on its own. Parts that were governed
        on their own belong to the model from now on.

        Raises:
            UsageError: It is under a plan, or on another device.
        """
        for number, whole in enumerate(self._models):
            if any(each is model for each in _modules_of(whole())):
                if not isinstance(vars(model).get(PLACE), _GovernedCall):
                    self._calls.append(weakref.ref(self._region(model, -1 - number, surround, here)))
                return False
        if model_device(model) != self.device:
            raise UsageError(f"the budget is held on {self.device}, and the model is on {model_device(model)}")
        self.release(model)
        refuse_taken(model, takes_compiled=True)
        free = (number for number, each in enumerate(self._models) if each() is None)
        number = next(free, len(self._models))  # copies that live for one step share a number, and so their plans
        self._models[number : number + 1] = [weakref.ref(model)]
        self._place(model, number, surround, here)
        return True

    def release(self, model: torch.nn.Module) -> None:
        """Govern a model and its parts no longer."""
        parts = list(model.modules())
        for part in parts:
            placed = vars(part).get(PLACE)
            if isinstance(placed, _GovernedCall):
                placed.remove()
        for number, reference in enumerate(self._models):
            if any(each is reference() for each in parts):
                self._models[number] = _no_model  # others keep their numbers

    def release_parts(self) -> None:
        """Govern parts no longer where they are called on their own: a compiled graph may call them, region and all."""
        for placed in [each() for each in self._calls]:
            if placed is not None and not placed.is_whole:
                placed.remove()

    def remove(self) -> None:
        """Take all regions away."""
        COMPILED_LATER.leave(self)
        SAVED_WITHOUT.leave(self)
        self._comes = None
        placed = [each() for each in self._calls]
        expected = [each() for each in self._expected]
        for region in (*placed, *expected):
            if region is not None:
                region.remove()


def _no_model() -> None:
    return None


def _modules_of(model: torch.nn.Module | None) -> Iterator[torch.nn.Module]:
    return iter(()) if model is None else model.modules()
