"""Gets between an optimizer's step hooks and the step that its class defines.

PyTorch wraps the `step` of every optimizer class: the wrapper opens the profiler's range, calls the hooks, and calls
the function that the class defined, which it holds in a closure. That is where a diversion puts itself. So everything
that is to happen once for a step does, hooks are given what they would be given, and nothing of the optimizer changes:
neither `optimizer.step`, which learning rate schedulers and others wrap and take off again as they like, nor its
attributes, which are copied and pickled. Without a diverted optimizer left, the class is as before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import CellType
from typing import Any

import torch
from torch.optim import Optimizer

from ...ground.errors import UsageError

Step = Callable[..., Any]  # what a class defined, without the wrapper: takes the optimizer first
Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]  # arguments of the step, of which the first is the optimizer

_WRAPPER_CODE: Any = getattr(Optimizer.profile_hook_step(lambda *_: None), "__code__", None)

# By the identity of the optimizer and PyTorch's wrapper: a step may call that of a base class, which has its own.
_HANDLERS: dict[tuple[int, Any], Handler] = {}
_PLAIN_STEPS: dict[Any, Step] = {}  # by PyTorch's wrapper, of those that are diverted
_USERS: dict[Any, int] = {}  # diverted optimizers of each of these wrappers


def wrapper_of(optimizer: Optimizer) -> Any:
    """Returns PyTorch's wrapper around the step of the optimizer's class, beneath what else wraps it.

    Raises:
        UsageError: there is none, as the class hands its steps to another optimizer or does not initialize its base.
    """
    step: Any = type(optimizer).step
    while step is not None and getattr(step, "__code__", None) is not _WRAPPER_CODE:
        step = getattr(step, "__wrapped__", None)
    if step is None:
        raise UsageError(
            f"PyTorch's hooks do not see the steps of {type(optimizer).__name__}, so they cannot be run in slices: "
            "give the optimizer that it wraps"
        )
    return step


def divert(optimizer: Optimizer, handler: Handler) -> Callable[[], object]:
    """Lets steps of one optimizer be run by a handler, which its hooks and the profiler do not notice.

    Args:
        optimizer: the optimizer, which is not kept alive.
        handler: is called instead of the step that the class defines, with its arguments.

    Returns:
        What ends it. It ends by itself when the optimizer is gone.

    Raises:
        UsageError: steps of the optimizer are diverted already, or PyTorch's hooks do not see them.
    """
    wrapper = wrapper_of(optimizer)
    if (id(optimizer), wrapper) in _HANDLERS:
        raise UsageError("the steps of this optimizer are run in slices already: detach the other slices first")
    if wrapper not in _PLAIN_STEPS:
        cell = _cell_of(wrapper)
        _PLAIN_STEPS[wrapper] = cell.cell_contents
        cell.cell_contents = _diverted(wrapper, cell.cell_contents)
    _USERS[wrapper] = _USERS.get(wrapper, 0) + 1
    _HANDLERS[id(optimizer), wrapper] = handler
    end = weakref.finalize(optimizer, _end, id(optimizer), wrapper)
    end.atexit = False
    return end


def plain_step(optimizer: Optimizer) -> Step:
    """Returns the step that the optimizer's class defines, whether it is diverted or not."""
    wrapper = wrapper_of(optimizer)
    step: Step = _PLAIN_STEPS[wrapper] if wrapper in _PLAIN_STEPS else _cell_of(wrapper).cell_contents
    return step


def _end(identity: int, wrapper: Any) -> None:
    del _HANDLERS[identity, wrapper]
    _USERS[wrapper] -= 1
    if not _USERS[wrapper]:
        del _USERS[wrapper]
        _cell_of(wrapper).cell_contents = _PLAIN_STEPS.pop(wrapper)


def _cell_of(wrapper: Any) -> CellType:
    cell: CellType = wrapper.__closure__[_WRAPPER_CODE.co_freevars.index("func")]
    return cell


def _diverted(wrapper: Any, plain: Step) -> Step:
    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        handler = _HANDLERS.get((id(args[0]), wrapper)) if args else None
        return plain(*args, **kwargs) if handler is None else handler(args, kwargs)

    return step
