"""Recording a whole step: the forward pass under the recorder, the backward pass as plain training runs it.

No dispatch mode is active during the backward pass. Autograd itself looks whether one is (it then stops adding
gradients in
place), so a mode would change the very memory that is measured. The backward pass is read from torch's profiler
instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from pooch.errors import ProfileError
from pooch.profiler.recorder import ForwardRecorder
from pooch.torchtools.memory_trace import MemoryTrace, MemoryTracer, marker, quiet_collector
from pooch.torchtools.raw_looks import RawLooks
from pooch.torchtools.tensors import has_plain_storage


class SavedStore(Protocol):
    """Where saved tensors wait for the backward pass."""

    def put(self, tensor: torch.Tensor) -> object:
        """Take the tensor; returns a handle."""

    def get(self, handle: object) -> torch.Tensor:
        """Give the tensor back."""


class InPlaceStore:
    """Plain training: the tensor itself is the handle."""

    def put(self, tensor: torch.Tensor) -> object:
        """The tensor itself."""
        return tensor

    def get(self, handle: object) -> torch.Tensor:
        """The tensor itself."""
        assert isinstance(handle, torch.Tensor)
        return handle


@dataclass(frozen=True, slots=True)
class Unpack:
    """One read of a saved value by the backward pass; `pointer` is where its storage lay then."""

    value: int
    pointer: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A recorded step: forward ops and values, reads of the backward pass in order, and the memory trace."""

    recorder: ForwardRecorder
    unpacks: tuple[Unpack, ...]
    trace: MemoryTrace


def check_loss(loss: object) -> torch.Tensor:
    """The loss, if a backward pass can start from it.

    Raises:
        ProfileError: it is no tensor, not a scalar, or needs no gradient.
    """
    if not isinstance(loss, torch.Tensor):
        raise ProfileError(f"forward() returned {type(loss).__name__}, not a tensor: return the loss")
    if loss.numel() != 1:
        raise ProfileError(f"forward() returned a tensor of shape {tuple(loss.shape)}: return a scalar loss")
    if not loss.requires_grad:
        raise ProfileError("the loss needs no gradient: no parameter with requires_grad=True takes part in it")
    return loss


def record_step(
    forward: Callable[[], torch.Tensor], model: torch.nn.Module, device: torch.device, store: SavedStore | None = None
) -> StepRecord:
    """Run one step and record it. `store`: where saved tensors wait (in place if None)."""
    store = store or InPlaceStore()
    recorder = ForwardRecorder(model)
    unpacks: list[Unpack] = []

    def pack(tensor: torch.Tensor) -> tuple[int | None, object]:
        value = recorder.note_saved(tensor)
        made = value is not None and recorder.values[value].role == "made"
        if not made:
            return value, tensor
        with torch._C._DisableTorchDispatch(), recorder.unwatched():  # the recorder must not see what the store does
            return value, store.put(tensor)

    def unpack(handle: tuple[int | None, object]) -> torch.Tensor:
        value, kept = handle
        with marker(f"unpack {len(unpacks)}"), torch._C._DisableTorchDispatch():
            tensor = kept if isinstance(kept, torch.Tensor) else store.get(kept)
        pointer = tensor.untyped_storage().data_ptr() if has_plain_storage(tensor) else 0
        unpacks.append(Unpack(-1 if value is None else value, pointer))
        return tensor

    tracer = MemoryTracer(device)
    with quiet_collector():
        tracer.start()
        try:
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
            with hooks, recorder.path.watched(), RawLooks(recorder.looked), recorder:
                loss = check_loss(forward())
            recorder.end_forward()
            with marker("backward"):
                loss.backward()
            with marker("end"):
                pass
        finally:
            trace = tracer.stop()
    return StepRecord(recorder, tuple(unpacks), trace)
