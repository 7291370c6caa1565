"""Tries, on small parameters, whether an optimizer that nobody knows treats each parameter by itself.

Two copies of the optimizer get the same few small parameters, of made-up values, and the same gradients. One of them
steps them together, and the other one after the other. Gradients are of ordinary size, large and small, zero, and not
a number. If that makes no difference, two further copies have as many parameters as the optimizer. Nothing of the
optimizer or its parameters is read but settings and shapes, and nothing large is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy
import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from ...ground.errors import first_line
from ..training_state import RandomStates
from .diversion import Step
from .shadow import Part, Shadow
from .small_copies import (
    TRIAL_STEPS,
    TRIAL_STEPS_OF_ALL,
    NotOneByOne,
    Sample,
    all_samples_of,
    have_states,
    results_of,
    same,
    samples_of,
    set_gradients,
    settings_of,
    small_copy,
)
from .unseen import steps_unseen

_CPU = torch.device("cpu")

_Samples = Sequence[Sequence[Sample]]


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What a trial has shown.

    Attributes:
        why_whole: why the step cannot be cut.
        has_raised: whether that is an error of the step's.
        refuses_empty_groups: whether it raised where a group was empty.
        changes: names of attributes and entries of groups that it has set, all slices the same.
    """

    why_whole: str | None
    has_raised: bool = False
    refuses_empty_groups: bool = False
    changes: frozenset[str] = frozenset()


class Trials:
    """Makes each trial once: again only where a setting is switched on or off, or parameters of other kinds appear.

    Args:
        plain: the step that the optimizer's class defines.

    Attributes:
        refuses_empty_groups: whether the last trial that was asked for holds with groups that are not in a slice left
            out. With all of them there the step raises, as what computes on lists of tensors does for an empty one.
    """

    def __init__(self, plain: Step) -> None:
        self._plain = plain
        self._verdicts: dict[object, _Verdict] = {}
        self.refuses_empty_groups, self.changes = False, frozenset[str]()

    def why_whole(self, optimizer: Optimizer, with_closure: bool, arguments: Mapping[str, Any]) -> str | None:
        """Returns why the optimizer's step cannot be cut, or None.

        Args:
            optimizer: the optimizer.
            with_closure: whether it is asked if its step's closure can be called before the slices.
            arguments: what its step is given beside a closure.
        """
        samples = samples_of(optimizer, with_closure)
        if not any(sample.has_gradient for group in samples for sample in group):
            return "no parameter had a gradient to try it with"
        verdict = self._verdict(optimizer, samples, arguments, with_closure, with_state=False)
        if verdict.has_raised and have_states(optimizer, with_closure):  # something else than its step makes it
            samples = samples_of(optimizer, with_closure, with_state=True)
            verdict = self._verdict(optimizer, samples, arguments, with_closure, with_state=True)
        self.refuses_empty_groups, self.changes = verdict.refuses_empty_groups, verdict.changes
        return verdict.why_whole

    def _verdict(
        self,
        optimizer: Optimizer,
        samples: _Samples,
        arguments: Mapping[str, Any],
        with_closure: bool,
        with_state: bool,
    ) -> _Verdict:
        key = with_state, _key(optimizer, with_closure, samples, arguments)
        if key not in self._verdicts:
            verdict = _try(optimizer, self._plain, with_closure, samples, arguments, TRIAL_STEPS)
            if verdict.why_whole is None:
                every = all_samples_of(optimizer, with_closure, with_state)
                of_all = _try(optimizer, self._plain, with_closure, every, arguments, TRIAL_STEPS_OF_ALL)
                verdict = replace(of_all, changes=verdict.changes | of_all.changes)
            self._verdicts[key] = verdict
        return self._verdicts[key]


def _key(optimizer: Optimizer, with_closure: bool, samples: _Samples, arguments: Mapping[str, Any]) -> object:
    """What a verdict holds for: steps of classes, which may be wrapped later, which settings are on, and samples."""
    steps = tuple(each.__dict__.get("step") for each in type(optimizer).__mro__)
    return steps, with_closure, switches([vars(optimizer), *optimizer.param_groups, arguments]), samples


def switches(settings: Sequence[Mapping[str, Any]]) -> tuple[frozenset[tuple[str, object]], ...]:
    """Returns which settings are on, of which others may have any number."""
    return tuple(frozenset((name, _switch(value)) for name, value in each.items()) for each in settings)


def _switch(value: object) -> object:
    if value is None or isinstance(value, (bool, str)):
        return value
    return value != 0 if isinstance(value, (int, float)) else type(value)


def _try(
    optimizer: Optimizer,
    plain: Step,
    with_closure: bool,
    samples: _Samples,
    arguments: Mapping[str, Any],
    steps: int,
) -> _Verdict:
    make = partial(_Trial, optimizer, plain, samples, arguments, steps)
    verdict = _outcome(make, with_closure, samples)
    if verdict.has_raised and len(samples) > 1:
        without_empty = _outcome(partial(make, all_groups=False), with_closure, samples)
        if without_empty.why_whole is None:
            return replace(without_empty, refuses_empty_groups=True)
    return verdict


def _outcome(make: Callable[[], _Trial], with_closure: bool, samples: _Samples) -> _Verdict:
    """Makes a trial, and returns what it says."""
    devices = {sample.device for group in samples for sample in group} | {_CPU}
    states = {device: RandomStates.of(device) for device in devices}
    try:
        with _disable_current_modes(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            changes = make().run(with_closure)
        if any(_differ(RandomStates.of(device), state) for device, state in states.items()):
            return _Verdict("its step draws random numbers")
    except NotOneByOne as reason:
        return _Verdict(str(reason))
    except Exception as error:  # noqa: BLE001
        why_whole = f"a trial on small parameters raised {type(error).__name__}: {first_line(error)}"
        return _Verdict(why_whole, has_raised=True)
    finally:
        for device, state in states.items():
            state.restore(device)
    return _Verdict(None, changes=changes)


def _differ(one: RandomStates, other: RandomStates) -> bool:
    same_numpy = all(numpy.array_equal(mine, theirs) for mine, theirs in zip(one.numpy, other.numpy, strict=True))
    return not same_numpy or (one.python, one.cpu, one.device) != (other.python, other.cpu, other.device)


class _Trial:
    """Two copies of an optimizer, of which one steps its parameters together.

    Args:
        optimizer: the optimizer.
        plain: the step that its class defines.
        samples: what its parameters are like.
        arguments: what its step is given beside a closure.
        steps: how many steps they make.
        all_groups: as `Shadow` takes it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        plain: Step,
        samples: _Samples,
        arguments: Mapping[str, Any],
        steps: int,
        all_groups: bool = True,
    ) -> None:
        kinds = {sample.kind for group in samples for sample in group}
        if not kinds <= {torch.Tensor, torch.nn.Parameter}:
            raise NotOneByOne(f"parameters are of {' and '.join(sorted(kind.__name__ for kind in kinds))}")
        if hasattr(type(optimizer), "__del__") or not {"state", "param_groups"} <= vars(optimizer).keys():
            raise NotOneByOne("there cannot be a copy of it")
        self._plain, self._samples, self._all_groups = plain, samples, all_groups
        self._arguments, self._steps = arguments, steps
        self._together, self._apart = small_copy(optimizer, samples), small_copy(optimizer, samples)

    def run(self, with_closure: bool) -> frozenset[str]:
        """Step both copies, and return what steps set beside state. Raises `NotOneByOne`, or what a step raises."""
        changes = frozenset[str]()
        containers = _containers(self._together)
        with steps_unseen(self._together, self._apart):
            for number in range(self._steps):
                self._step_together(number, with_closure)
                set_gradients(self._apart, self._samples, number)
                changes |= self._step_apart()
                if not same(results_of(self._together), results_of(self._apart)):
                    raise NotOneByOne("parameters that are stepped together and one by one differ")
                settings, others = settings_of(self._together), settings_of(self._apart)
                if not same(settings, others) or _containers(self._together) != containers:
                    raise NotOneByOne(f"its step changes {_changed(settings, others)}, beside the state of parameters")
        return changes

    def _step_together(self, number: int, with_closure: bool) -> None:
        good_calls: list[bool] = []
        loss = object()

        def closure() -> object:
            good_calls.append(torch.is_grad_enabled() and same(results_of(self._together), results_of(self._apart)))
            set_gradients(self._together, self._samples, number)
            return loss

        if with_closure:
            result = self._plain(self._together, closure, **self._arguments)
        else:
            set_gradients(self._together, self._samples, number)
            result = self._plain(self._together, **self._arguments)
        if with_closure and good_calls != [True]:
            raise NotOneByOne("it does not call its closure once, before everything else")
        if result is not (loss if with_closure else None):
            raise NotOneByOne("its step returns something of its own")

    def _step_apart(self) -> set[str]:
        shadow = Shadow(self._apart, self._all_groups, self._arguments)
        for index, group in enumerate(self._apart.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shadow.step(self._plain, [Part(index, [parameter])])
        if shadow.differing:
            names = " and ".join(sorted(shadow.differing))
            raise NotOneByOne(f"its step changes {names}, beside the state of parameters")
        return shadow.finish()


def _containers(optimizer: Optimizer) -> list[int]:
    """The identities of what a step may fill, but not replace: a slice would replace it for itself alone."""
    groups = optimizer.param_groups
    return [id(optimizer.state), id(groups), *map(id, groups), *(id(group["params"]) for group in groups)]


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    names = {name for name in before.keys() | after.keys() if not same(before.get(name), after.get(name))}
    return " and ".join(sorted(names)) or "its groups"
