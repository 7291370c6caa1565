"""A snapshot of what a forward and backward pass change, so that the step can be repeated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..ground.errors import TierError, UsageError
from ..ground.units import round_up
from ..machine.values import Ticket
from ..torchtools.accelerators import has_streams
from ..torchtools.tensors import bytes_of, gradient_of, has_plain_storage, storage_key, version_of
from ..torchtools.training_state import RandomStates, references_of
from .engines.protocol import Arena, CopyEngine

_ROOM_BYTES = 4096  # offsets in a tier are multiples of this
_SMALL_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _InTier:
    storage: torch.UntypedStorage
    offset_bytes: int


class StepSnapshot:
    """Gradients, buffers and random states at the beginning of a step.

    Contents of parameters and the optimizer's state are left out, since the forward and backward pass do not change
    them. Parameters that get other data, as by `parameter.data = other`, get the former again. Gradients
    that accumulate and large buffers go to the swap tier, since a copy on the device would exceed the budget. On a
    device with streams small buffers go there too, in one copy, so that the host waits for nothing. On a CPU, and on
    devices other than the model's, small buffers are kept as bytes in host memory. If the gradients were set to None
    before the step, only buffers are copied.

    Args:
        model: The model that is trained.
        engine: The copy engine of its plan.
        device: The model's device.

    Raises:
        TierError: If the tier has not enough room, or cannot be written.
    """

    def __init__(self, model: torch.nn.Module, engine: CopyEngine, device: torch.device) -> None:
        self._device, self._health = device, engine.health
        self._random = RandomStates.of(device)
        self._put_back = references_of(model)
        self._data = [(each, each.data) for each in (*model.parameters(), *model.buffers()) if has_plain_storage(each)]
        self._versions = [(name, each, version_of(each)) for name, each in model.named_parameters()]
        gradients = [(p, g) for p in model.parameters() if (g := gradient_of(p)) is not None]
        self._opaque = [(p, gradient.clone()) for p, gradient in gradients if not has_plain_storage(gradient)]
        self._large: list[_InTier] = []
        self._arena: Arena | None = None
        self._keep(engine, [*(gradient for _, gradient in gradients), *model.buffers()])

    def _keep(self, engine: CopyEngine, tensors: list[torch.Tensor]) -> None:
        storages = list(_distinct_storages(tensors))
        small = [s for s in storages if s.nbytes() < _SMALL_BYTES and s.device == self._device]
        elsewhere = [s for s in storages if s.device != self._device]
        self._packed = small if has_streams(self._device) else []
        self._small = elsewhere if has_streams(self._device) else [*small, *elsewhere]
        self._contents = b"".join(bytes_of(s).cpu().numpy().tobytes() for s in self._small)
        room_bytes = 0
        for storage in storages:
            if storage.device == self._device and storage.nbytes() >= _SMALL_BYTES:
                self._large.append(_InTier(storage, room_bytes))
                room_bytes += round_up(storage.nbytes(), _ROOM_BYTES)
        self._packed_offset_bytes = room_bytes
        room_bytes += sum(storage.nbytes() for storage in self._packed)
        if room_bytes:
            self._arena = engine.open_arena(room_bytes, "snapshot")
            self._copy_out(self._arena)

    def _copy_out(self, arena: Arena) -> None:
        tickets = [arena.copy_out(each.storage, each.offset_bytes) for each in self._large]
        if self._packed:
            together = torch.cat([bytes_of(storage) for storage in self._packed]).untyped_storage()
            tickets.append(arena.copy_out(together, self._packed_offset_bytes))
        self._finish(tickets)

    def restore(self) -> None:
        """Restore everything in place.

        Raises:
            TierError: If the tier cannot be read.
            UsageError: If the step has written to a parameter.
        """
        for name, parameter, version in self._versions:
            if version_of(parameter) != version:
                raise UsageError(
                    f"memory ran out in a step that had already changed parameter {name}, so it cannot be repeated: "
                    "take optimizer steps out of hooks and in-place changes out of forward, or lower the batch size"
                )
        self._put_back()
        for tensor, data in self._data:
            if storage_key(tensor) != storage_key(data):
                tensor.data = data
        for parameter, copy in self._opaque:
            parameter.grad = copy.clone()
        begin = 0
        for storage in self._small:
            contents = bytearray(self._contents[begin : begin + storage.nbytes()])
            bytes_of(storage).copy_(torch.frombuffer(contents, dtype=torch.uint8))
            begin += storage.nbytes()
        if self._arena is not None:
            self._copy_in(self._arena)
        self._random.restore(self._device)

    def _copy_in(self, arena: Arena) -> None:
        tickets = [arena.copy_in(each.storage, each.offset_bytes) for each in self._large]
        sizes = [storage.nbytes() for storage in self._packed]
        together = torch.UntypedStorage(sum(sizes), device=self._device)
        if self._packed:
            tickets.append(arena.copy_in(together, self._packed_offset_bytes))
        self._finish(tickets)
        for storage, contents in zip(self._packed, bytes_of(together).split(sizes), strict=True):
            bytes_of(storage).copy_(contents)

    def _finish(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            ticket.wait()
            if ticket.error is not None:
                fault = self._health.failed(ticket.error, is_told=False)
                raise TierError(f"gradients cannot be saved: {fault}", fault.kind) from ticket.error

    def close(self) -> None:
        """Release the room in the tier."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _distinct_storages(tensors: list[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    seen: set[int] = set()
    for tensor in tensors:
        if has_plain_storage(tensor) and storage_key(tensor) not in seen:
            seen.add(storage_key(tensor))
            if tensor.untyped_storage().nbytes() > 0:
                yield tensor.untyped_storage()
