"""Runs an optimizer's step one slice of its parameters after the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from ...ground.errors import UsageError
from .coupling import are_odd, is_known, why_whole_by_settings, why_whole_by_tensors
from .cutting import Cutter, Load, Stepped, joined, with_gradients
from .diversion import divert, plain_step
from .needs import KnownNeeds, StepNeeds
from .shadow import Part, Shadow
from .trial import Trials

OnParameters = Callable[[Sequence[torch.Tensor]], object]
LoadsOf = Callable[[Sequence[Sequence[torch.Tensor]], StepNeeds | None], Sequence[Load]]
_CHANGED = "its step has changed {} of its own in a way that it did not do in a trial"


class OptimizerSlices:
    """Lets `optimizer.step()` run in slices, so that only what one slice needs has to be on the device at a time.

    Parameters, state, hooks and everything else are as after a step as a whole, bit by bit. Where that is not known of
    an optimizer, it is tried once on small parameters, and where it does not hold, or is not known, the step is one
    slice.

    Args:
        optimizer: the optimizer, which is not kept alive.
        slice_bytes: parameters, gradients and state in a slice; a parameter that has more is a slice by itself.
        before: is called with the parameters of each slice before it is stepped.
        after: is called with them after it has been.
        failed: is called with them instead if an exception comes from then on, be it from `before` or `after`.
        tell: is called with a line that says why the optimizer is not run in slices, once for each reason.
        before_whole: is called instead of `before` where a step is not cut. None: `before` is.
        loads_of: returns what each of some slices takes, given the parameters of each and what a step is known to take.
            Slices for which there is room together are one. None: each is by itself.
        before_next: is called with the parameters of the slice that follows, before one is stepped.

    Attributes:
        slices_in_last_step: slices of the last step that has ended; 1 for one that was not cut.

    Example:
        slices = OptimizerSlices(optimizer, 2**28, before=bring, after=take, failed=take, tell=print)
        slices.attach()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        slice_bytes: int,
        *,
        before: OnParameters,
        after: OnParameters,
        failed: OnParameters,
        tell: Callable[[str], object],
        before_whole: OnParameters | None = None,
        loads_of: LoadsOf | None = None,
        before_next: OnParameters | None = None,
    ) -> None:
        if slice_bytes <= 0:
            raise UsageError(f"slices of {slice_bytes} bytes hold nothing: give slice_bytes a positive number")
        self._optimizer = weakref.ref(optimizer)
        self._plain = plain_step(optimizer)
        self._before, self._after, self._failed, self._tell = before, after, failed, tell
        self._before_whole = before if before_whole is None else before_whole
        self._loads_of, self._before_next = loads_of, before_next
        self._cutter, self._needs = Cutter(slice_bytes), KnownNeeds(self._plain)
        self._trials = Trials(self._plain)
        self._told: set[str] = set()
        self._given_up: str | None = None
        self._end: Callable[[], object] | None = None
        self.slices_in_last_step = 0

    def attach(self) -> None:
        """Run the optimizer's steps in slices from now on.

        Steps of a copy of the optimizer, and of one that is read from a file, are plain ones. So are steps under
        `torch.compile`, and a function of the program's own in the place of `optimizer.step` that does not call the
        step of the class: neither `before` nor `after` hears of them.

        Raises:
            UsageError: they are run in slices already, or the optimizer hands its steps to another one.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            raise UsageError("the optimizer is gone: attach slices to one that lives")
        self._end = divert(optimizer, self._step)

    def detach(self) -> None:
        """Run steps as before. What the program has wrapped around `optimizer.step` stays, and finds the plain one."""
        if self._end is not None:
            self._end()
            self._end = None

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        optimizer = args[0]
        known = is_known(optimizer, self._plain)
        closure, others = _closure_of(args, kwargs)
        reason = None if others is not None and not (others and known) else "its step was given arguments of its own"
        others = others or {}
        reason = reason or self._given_up or why_whole_by_settings(optimizer.param_groups)
        if closure is not None and not known:  # is it the same if it is called before the slices?
            reason = reason or self._trials.why_whole(optimizer, True, others)
        if reason is not None:
            return self._whole(reason, args, kwargs, known and closure is None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_gradients(optimizer, known, others)
        return loss

    def _step_gradients(self, optimizer: Optimizer, known: bool, arguments: dict[str, Any]) -> None:
        """Make a step with the gradients that there are.

        Args:
            optimizer: the optimizer.
            known: whether its step is one of PyTorch's own.
            arguments: what its step is given beside a closure.
        """
        stepped = with_gradients(optimizer.param_groups)
        again = not are_odd(stepped) and self._cutter.remembers(stepped, optimizer.state)
        reason = None if again else why_whole_by_tensors(optimizer, stepped, known)
        if not known:
            reason = reason or self._trials.why_whole(optimizer, False, arguments)
        if reason is not None:
            self._whole(reason, (optimizer,), arguments, only_with_gradient=known)
        else:
            self._in_slices(optimizer, stepped, again, known, arguments)

    def _whole(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any], only_with_gradient: bool) -> Any:
        """Step all parameters at once, those without a gradient too unless the step is known not to touch them."""
        optimizer: Optimizer = args[0]
        if reason not in self._told:
            self._told.add(reason)
            self._tell(f"{type(optimizer).__name__} steps all its parameters at once: {reason}")
        groups = optimizer.param_groups
        parameters = with_gradients(groups) if only_with_gradient else [group["params"] for group in groups]
        result = self._between(self._before_whole, list(chain(*parameters)), partial(self._plain, *args, **kwargs))
        self.slices_in_last_step = 1
        return result

    def _in_slices(
        self, optimizer: Optimizer, stepped: Stepped, again: bool, known: bool, arguments: dict[str, Any]
    ) -> None:
        slices: list[list[Part]] | None = None  # they depend on what the first of them makes
        if again:
            slices = self._joined(optimizer, self._cutter.again(stepped))
        elif self._cutter.guesses_nothing(stepped, optimizer.state):
            slices = self._joined(optimizer, list(self._cutter.anew(stepped, optimizer.state)))
        if slices is not None and len(slices) == 1:
            self._between(self._before, _parameters_in(slices[0]), partial(self._plain, optimizer, **arguments))
            self.slices_in_last_step = 1
            return
        shadow = Shadow(optimizer, not known and not self._trials.refuses_empty_groups, arguments)
        count = 0
        changes = set[str]()
        try:
            for parts in self._cutter.anew(stepped, optimizer.state) if slices is None else slices:
                following = slices[count + 1] if slices is not None and count + 1 < len(slices) else []
                before = partial(self._begin, _parameters_in(following))
                self._between(before, _parameters_in(parts), partial(shadow.step, self._plain, parts))
                count += 1
        finally:
            changes = shadow.finish()
        self.slices_in_last_step = count
        surprises = shadow.differing | (changes - self._trials.changes)
        if surprises and not known:
            self._given_up = _CHANGED.format(" and ".join(sorted(surprises)))
            self._tell(f"{type(optimizer).__name__} was run in slices, and this step may differ: {self._given_up}")

    def _joined(self, optimizer: Optimizer, slices: list[list[Part]]) -> list[list[Part]]:
        """Return slices that are as large as there is room for."""
        if self._loads_of is None:
            return slices
        return joined(slices, self._loads_of(list(map(_parameters_in, slices)), self._needs.of(optimizer)))

    def _begin(self, following: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        self._before(parameters)
        if following and self._before_next is not None:
            self._before_next(following)

    def _between(self, before: OnParameters, parameters: Sequence[torch.Tensor], step: Callable[[], Any]) -> Any:
        try:
            before(parameters)
            result = step()
            self._after(parameters)
        except BaseException:
            self._failed(parameters)
            raise
        return result


def _parameters_in(parts: Sequence[Part]) -> list[torch.Tensor]:
    return [parameter for part in parts for parameter in part.parameters]


def _closure_of(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any] | None, dict[str, Any] | None]:
    """Returns the closure among the arguments of a step, and the others: None if these are more than settings."""
    closure = args[1] if len(args) == 2 else kwargs.get("closure")
    others = {name: value for name, value in kwargs.items() if name != "closure"}
    is_ordinary = len(args) <= 2 and (len(args) == 1 or "closure" not in kwargs)
    are_settings = all(value is None or isinstance(value, (bool, int, float, str)) for value in others.values())
    return closure, others if is_ordinary and are_settings else None
