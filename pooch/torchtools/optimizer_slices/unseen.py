"""Steps of small copies of an optimizer of which the program sees nothing."""

from __future__ import annotations

import contextlib
import dis
import inspect
import pickle
import random
from collections.abc import Callable, Iterator
from itertools import chain
from types import FunctionType
from typing import Any

import numpy
import torch
from torch.optim import Optimizer
from torch.optim import optimizer as of_torch

from ..eager_threads import eager_in_this_thread
from ..mode_stacks import UnnotedMode
from .small_copies import NotOneByOne

_DRAWS = "its step draws random numbers"


@contextlib.contextmanager
def steps_unseen(*copies: Optimizer) -> Iterator[None]:
    """Context manager in which the program does not notice steps of copies of one optimizer.

    Neither its hooks nor its own random generators nor attributes of the optimizer's class are touched, or they are
    as before afterwards. Nothing is compiled: under a mode, Dynamo gives up what the step has compiled, and for good.

    Raises:
        NotOneByOne: the step would call hooks, has changed something of these, or may change what is beside its class.
    """
    kinds = [kind for kind in type(copies[0]).__mro__ if issubclass(kind, Optimizer) and kind is not Optimizer]
    functions = _functions_of(kinds)
    if names := {name for function in functions for name in _set_outside(function)}:
        raise NotOneByOne(f"its class sets {' and '.join(sorted(names))} outside of itself")
    states = [copy.state for copy in copies]

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        if any(vars(optimizer).get("state") is state for state in states):
            raise NotOneByOne("its step calls that of another class, with all hooks")

    handle = of_torch.register_optimizer_step_pre_hook(refuse)
    hooks: Any = of_torch._global_optimizer_pre_hooks
    hooks.move_to_end(handle.id, last=False)
    restores = [*map(_keep_attributes, kinds), *map(_keep_generator, _generators_of(kinds, functions))]
    why: list[str] = []
    try:
        with eager_in_this_thread(), _NoGenerators():
            yield
    finally:
        handle.remove()
        why += [reason for restore in restores if (reason := restore())]
    if why:
        raise NotOneByOne(why[0])


class _NoGenerators(UnnotedMode):
    """Refuses ops that draw from a generator of the program's own."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(each, torch.Generator) for each in chain(args, kwargs.values())):
            raise NotOneByOne(_DRAWS)
        return function(*args, **kwargs)


def _keep_attributes(kind: type) -> Callable[[], str]:
    """Returns what gives a class its attributes back, and tells why the step is not to be cut if others were there."""
    before = dict(vars(kind))

    def restore() -> str:
        changed = [name for name, value in vars(kind).items() if before.get(name) is not value]
        for name in changed:
            if name in before:
                setattr(kind, name, before[name])
            else:
                delattr(kind, name)
        return f"its step changes {' and '.join(sorted(changed))} of its class" if changed else ""

    return restore


def _functions_of(kinds: list[type[Optimizer]]) -> list[FunctionType]:
    """The methods of some classes, without what is wrapped around them."""
    methods = [inspect.unwrap(each) for kind in kinds for each in vars(kind).values() if callable(each)]
    return [each for each in methods if isinstance(each, FunctionType)]


def _set_outside(function: FunctionType) -> list[str]:
    """The names of globals, and of variables of a function around it, that a function sets."""
    code = function.__code__
    return [
        each.argval
        for each in dis.get_instructions(code)
        if each.opname == "STORE_GLOBAL" or (each.opname == "STORE_DEREF" and each.argval in code.co_freevars)
    ]


def _generators_of(
    kinds: list[type[Optimizer]], functions: list[FunctionType]
) -> list[random.Random | numpy.random.Generator]:
    """The random generators that some classes have, and those beside their methods, where programs have them."""
    beside = {id(each.__globals__): each.__globals__ for each in functions}
    places = [*map(vars, kinds), *beside.values()]
    found = [each for names in places for each in list(names.values())]
    return [each for each in found if isinstance(each, (random.Random, numpy.random.Generator))]


def _keep_generator(generator: random.Random | numpy.random.Generator) -> Callable[[], str]:
    """Returns what gives a generator its state back, and tells why the step is not to be cut if it had another."""
    before = pickle.dumps(_state_of(generator))

    def restore() -> str:
        if pickle.dumps(_state_of(generator)) == before:
            return ""
        if isinstance(generator, random.Random):
            generator.setstate(pickle.loads(before))
        else:
            generator.bit_generator.state = pickle.loads(before)
        return _DRAWS

    return restore


def _state_of(generator: random.Random | numpy.random.Generator) -> Any:
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state
