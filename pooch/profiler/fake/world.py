"""A world of fake tensors: shapes, strides, dtypes and lifetimes as in the real one, but no memory and no data.

A workload is either built inside it, so that a model larger than this machine needs no memory, or the parameters and
buffers of a live model are replaced by fake ones while its step is recorded.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ...ground.live_objects import live_objects
from ...torchtools.module_attributes import put_back
from ...torchtools.tensors import fakes_are_plain_with, map_tensors, storage_bytes
from ...torchtools.training_state import random_state_kept
from .contents import KnownContents

Built = TypeVar("Built")


class FakeWorld:
    """A world of fake tensors. Tensors can only be combined with tensors of the same world."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes_are_plain_with(self)
        self._contents = KnownContents()
        self._fakes: Any = WeakTensorKeyDictionary()

    def build(self, builder: Callable[[], Built]) -> Built:
        """Calls a builder such that all tensors it creates are fake; random states are restored afterwards."""
        with random_state_kept(torch.device("cpu")), self.entered(), _Forgetful(self.mode):
            return builder()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager in which new tensors are fake, and real ones are treated as fakes of the same geometry."""
        with self.mode, self._contents, _libraries_as_ever():
            yield

    def as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the fake for a tensor, always the same one; views of one storage share a fake storage."""
        if isinstance(tensor, FakeTensor) or tensor.ndim == 0:
            return tensor  # real scalars are numbers of the program; only the mode knows how they promote types
        if tensor not in self._fakes:  # the mode itself forgets a fake as soon as nobody holds it
            self._fakes[tensor] = self.mode.from_tensor(tensor)
        fake: torch.Tensor = self._fakes[tensor]
        return fake

    def live_bytes(self) -> int:
        """Returns the bytes of the distinct storages of all live fake tensors of this world."""
        gc.collect()
        found = [each for each in live_objects(FakeTensor) if self.owns(each)]
        return storage_bytes(found)

    def made_bytes(self) -> int:
        """As `live_bytes`, without the fakes of real tensors that ops have met."""
        return self.live_bytes() - storage_bytes(list(self._fakes.values()))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Returns whether the tensor is a fake tensor of this world."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode

    @contextmanager
    def inhabited_by(self, model: torch.nn.Module) -> Iterator[None]:
        """Context manager in which the model's parameters and buffers are fake.

        Attributes that its forward pass sets are restored as well.
        """
        before = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in model.modules()]
        known: dict[int, Any] = {}

        def fake_of(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor) or self.owns(tensor):
                return tensor
            if id(tensor) not in known:  # tied parameters stay tied
                fake = self.mode.from_tensor(tensor.detach())
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                known[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
            return known[id(tensor)]

        try:
            for module, _, parameters, buffers in before:
                module._parameters.update({name: fake_of(each) for name, each in parameters.items()})
                module._buffers.update({name: fake_of(each) for name, each in buffers.items()})
            for module, attributes, _, _ in before:  # recurrent layers keep lists of their parameters
                held = {name: each for name, each in attributes.items() if isinstance(each, (list, torch.Tensor))}
                module.__dict__.update({name: map_tensors(fake_of, each) for name, each in held.items()})
            yield
        finally:
            for module, attributes, parameters, buffers in before:
                put_back(module._parameters, parameters)
                put_back(module._buffers, buffers)
                put_back(module.__dict__, attributes)


class _Forgetful(TorchDispatchMode):
    """Empties the fake mode's weak references to the tensors it created after each op.

    Modules move their parameters by swapping them, which PyTorch refuses for tensors that have weak references.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory: Any = mode.fake_tensor_converter.meta_converter.tensor_memo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._memory.clear()
        return result


@contextmanager
def _libraries_as_ever() -> Iterator[None]:
    """Hides from Transformers that tensors are fake, since it would take another path than in plain training."""
    library: Any = sys.modules.get("transformers.utils.import_utils")
    asked = getattr(library, "is_fake_tensor", None)
    if asked is None:
        yield
        return
    library.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        library.is_fake_tensor = asked


def data_dependence(error: BaseException) -> str | None:
    """Returns the message for a step that reads data, which fake tensors do not have, or None for other errors."""
    if not isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return None
    return (
        f"the step reads the contents of a tensor ({error.func}), and fake tensors have none: profile it with "
        "--mode run or --mode offload"
    )
