"""What stays on the device where nothing more can leave: mostly what only the program can release."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ..executor.evictor import Evictor
from ..ground.units import format_bytes
from ..torchtools.memory_trace import live_tensors
from ..torchtools.tensors import describe, find_tensors, has_own_memory, storage_key, storage_of
from ..torchtools.threads import is_alone
from .optimizer_states import OptimizerStates
from .persistence import tensors_of

_NAMED = 3  # tensors
_MOST_LOOKS = 5  # at all objects, which takes long
_CLEARLY_MORE = 1.2


class Staying:
    """Looks at what is live where the budget is passed, as long as that becomes more and is not told yet.

    Args:
        evictor: Holds the budget.
        models: Returns the models that are trained.
        states: Their optimizers.
    """

    def __init__(
        self, evictor: Evictor, models: Callable[[], Sequence[torch.nn.Module]], states: OptimizerStates
    ) -> None:
        self._evictor, self._models, self._states = evictor, models, states
        self._looks, self._most_bytes = 0, 0
        self._found: str | None = None

    def look(self) -> None:
        """Look at what is live, where nothing more can leave.

        Not while other threads may train: their ops free storages without the interpreter's lock, and PyTorch ends the
        process if something looks at one just then.
        """
        if not is_alone():
            return
        live_bytes = self._evictor.live.now()
        if self._looks == _MOST_LOOKS or live_bytes < _CLEARLY_MORE * self._most_bytes:
            return
        self._looks, self._most_bytes = self._looks + 1, live_bytes
        try:
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                self._found = self._described(live_bytes)
        except (MemoryError, RuntimeError):  # the process has no memory to look with: that is no failure of the step
            self._looks = _MOST_LOOKS

    def take(self) -> str | None:
        """Return what was seen, in one line, or None if that is nothing new. Then nobody looks again."""
        found, self._found = self._found, None
        if found is not None:
            self._looks = _MOST_LOOKS
        return found

    def _described(self, live_bytes: int) -> str:
        models = self._models()
        parameters = {id(each) for model in models for each in model.parameters()}
        states = [dict(optimizer.state) for optimizer in self._states.optimizers_of(parameters)]
        of_models = [each for model in models for each in tensors_of(model)]
        trained = self._by_storage([*of_models, *self._states.in_no_model(models), *find_tensors(states)])
        others = self._by_storage(live_tensors(self._evictor.device.type))
        held = sorted((each for key, each in others.items() if key not in trained), reverse=True)
        trained_bytes, held_bytes = (sum(size for size, _ in each) for each in (trained.values(), held))
        largest = ", ".join(f"{name} {format_bytes(size_bytes)}" for size_bytes, name in held[:_NAMED])
        rest_bytes = max(0, live_bytes - trained_bytes - held_bytes)
        return (
            f"when {format_bytes(live_bytes)} were live and nothing more could leave, {format_bytes(held_bytes)} were "
            f"tensors that the program holds{f' (the largest: {largest})' if largest else ''}, "
            f"{format_bytes(trained_bytes)} parameters, gradients, buffers and the optimizer's state, and "
            f"{format_bytes(rest_bytes)} what autograd holds and ops work on"
        )

    def _by_storage(self, tensors: Iterable[torch.Tensor]) -> dict[int, tuple[int, str]]:
        """The bytes of each storage on the device, and its tensor that has most elements."""
        found: dict[int, tuple[int, int, torch.Tensor]] = {}
        for tensor in tensors:
            if not has_own_memory(tensor) or tensor.device != self._evictor.device:
                continue
            key, elements = storage_key(tensor), tensor.numel()
            if elements > found.get(key, (0,))[0]:
                found[key] = elements, storage_of(tensor).nbytes(), tensor
        away = {value.key for value in self._evictor.persistent or () if value.storage is None}
        return {
            key: (size_bytes, describe(tensor)) for key, (_, size_bytes, tensor) in found.items() if key not in away
        }
