"""The state of optimizers leaves while it is being made, parameter by parameter, wherever that is.

A step that stays whole makes the state of all parameters before it ends, and so does a method of the program's. An
optimizer asks its `state`, a `defaultdict`, for that of a parameter which has none. Then no op of this thread is
running, and what there was before for other parameters is complete. So it may leave from there on.

One that puts state there without asking (`if parameter not in self.state`) is found where an op needs room and nothing
else can leave. Of that state, what the op works on stays: it has further references then.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch

from ..executor.persistent import PersistentMemory
from ..torchtools.tensors import find_tensors
from ..torchtools.threads import is_alone


class _Maker:
    """Makes the state of a parameter, and has that of the parameters before leave. It keeps nothing alive.

    A copy of it, or what is read from a file, is what makes states in PyTorch.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, memory: PersistentMemory) -> None:
        self._optimizer, self.memory = weakref.ref(optimizer), weakref.ref(memory)
        self._seen = len(optimizer.state)  # how many states there were

    def __call__(self) -> dict[str, Any]:
        optimizer, memory = self._optimizer(), self.memory()
        if optimizer is not None and memory is not None:
            new = list(islice(reversed(optimizer.state), max(0, len(optimizer.state) - self._seen)))
            self._seen = len(optimizer.state)
            memory.adopt_state(optimizer, [each for each in new if isinstance(each, torch.Tensor)])
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type, ({},)

    def __deepcopy__(self, _: dict[int, Any]) -> type[dict[str, Any]]:
        return dict


def place_makers(optimizer: torch.optim.Optimizer, memory: PersistentMemory) -> None:
    """Have the state of an optimizer leave as it is made, unless that is so, or the program makes it otherwise."""
    state = vars(optimizer).get("state")
    if type(state) is not defaultdict:
        return
    factory: Any = state.default_factory
    if factory is dict or (isinstance(factory, _Maker) and factory.memory() is not memory):
        state.default_factory = _Maker(optimizer, memory)


def take_makers_away(optimizer: torch.optim.Optimizer) -> None:
    """Have the state of an optimizer be made as PyTorch does."""
    state = vars(optimizer).get("state")
    if type(state) is defaultdict and isinstance(state.default_factory, _Maker):
        state.default_factory = dict


class PutStates:
    """State that optimizers have put there without asking for it, while their steps run."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()

    def adopt(self, optimizers: Iterable[torch.optim.Optimizer], memory: PersistentMemory) -> bool:
        """Have such state leave in the middle of an op that needs room, and return whether there is any.

        Args:
            optimizers: The optimizers.
            memory: What may leave.
        """
        if not memory.library.is_in_op() or not is_alone():
            return False
        found = [self._adopt(optimizer, memory) for optimizer in optimizers]  # of all of them
        return any(found)

    def _adopt(self, optimizer: torch.optim.Optimizer, memory: PersistentMemory) -> bool:
        state = vars(optimizer).get("state")
        if not isinstance(state, dict):
            return False
        count, _ = before = self._seen.get(optimizer, (0, 0))
        now = len(state), sum(1 for _ in find_tensors(next(reversed(state.values()), ())))
        if now == before:
            return False
        self._seen[optimizer] = now
        last = 1 + max(0, len(state) - count)  # with the one that was last then: a part of it may be new
        new = [each for each in islice(reversed(state), last) if isinstance(each, torch.Tensor)]
        free = [each for each in new if _is_free(state[each], memory)]
        memory.adopt_state(optimizer, free)
        return bool(free)


def _is_free(state: Mapping[str, Any], memory: PersistentMemory) -> bool:
    """Whether no op works on the state of a parameter. The one that is running holds what it works on."""
    return all(each._base is None and memory.library.references_to(each) == 1 for each in find_tensors(state))
