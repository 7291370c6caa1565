"""Records a whole step: the forward pass under the recorder, the backward pass as plain training runs it.

No dispatch mode is active during the backward pass. Autograd checks for one, and if it finds one it no longer adds
gradients in place, so a mode would change the very memory that is measured. The backward pass is read from torch's
profiler instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from ..errors import ProfileError
from ..torchtools.memory_trace import MemoryTrace, MemoryTracer, marker, quiet_collector
from ..torchtools.raw_looks import RawLooks
from ..torchtools.standing_aside import StepHooks
from ..torchtools.tensors import has_plain_storage
from .offload import OffloadStore
from .recorder import ForwardRecorder

Forward = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Unpack:
    """One read of a saved value by the backward pass.

    Attributes:
        value: its id, or -1 for memory that is not ordinary.
        pointer: its address then.
        units: of FSDP's, whose parameters are gathered then.
    """

    value: int
    pointer: int
    units: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A recorded step: forward ops and values, reads of saved values by the backward pass in order, memory."""

    recorder: ForwardRecorder
    unpacks: tuple[Unpack, ...]
    trace: MemoryTrace


def check_loss(loss: object) -> torch.Tensor:
    """Checks that a backward pass can start from what the forward pass returned.

    Raises:
        ProfileError: if it is not a tensor, is not a scalar, or does not require grad.
    """
    if not isinstance(loss, torch.Tensor):
        raise ProfileError(f"forward() returned {type(loss).__name__}, not a tensor: return the loss")
    if loss.numel() != 1:
        raise ProfileError(f"forward() returned a tensor of shape {tuple(loss.shape)}: return a scalar loss")
    if not loss.requires_grad:
        raise ProfileError("the loss does not require grad: no parameter with requires_grad=True contributes to it")
    return loss


def record_step(
    forward: Forward, model: torch.nn.Module, device: torch.device, store: OffloadStore | None = None
) -> StepRecord:
    """Runs one step and records it. Saved tensors wait for the backward pass in the store, if there is one."""
    recorder = ForwardRecorder(model)
    unpacks: list[Unpack] = []

    def pack(tensor: torch.Tensor) -> tuple[int | None, object]:
        value = recorder.note_saved(tensor)
        if store is None or value is None or recorder.values[value].role != "made":
            return value, tensor
        with torch._C._DisableTorchDispatch(), recorder.unwatched():  # the recorder must not see what the store does
            return value, store.put(tensor)

    def unpack(handle: tuple[int | None, object]) -> torch.Tensor:
        value, kept = handle
        with marker(f"unpack {len(unpacks)}"), torch._C._DisableTorchDispatch():
            tensor = kept if isinstance(kept, torch.Tensor) else cast(OffloadStore, store).get(kept)
        pointer = tensor.untyped_storage().data_ptr() if has_plain_storage(tensor) else 0
        unpacks.append(Unpack(-1 if value is None else value, pointer, recorder.units_there()))
        return tensor

    tracer = MemoryTracer(device)
    with quiet_collector():
        tracer.start()
        try:
            hooks = StepHooks(pack, unpack)
            with hooks, recorder.path.watched(), RawLooks(recorder.looked), recorder:
                loss = check_loss(forward())
            recorder.end_forward([model])
            with marker("backward"):
                loss.backward()
            with marker("end"):
                pass
        finally:
            trace = tracer.stop()
    return StepRecord(recorder, tuple(unpacks), trace)
