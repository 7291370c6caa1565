"""Where the bytes of one saved activation are."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from ..engines.protocol import Ticket
from ..records import Identity, PackedRecord, SavedRecord
from ..witness import Witness
from .tier import Room

if TYPE_CHECKING:
    from .step import OnlineStep


class OnlineRecord(SavedRecord):
    """One value that autograd has saved, wherever its bytes are.

    They are on the device (`storage`), in the tier (`room`), in both, or in neither: then they are replayed.

    Attributes:
        value: Id of the value in its step.
        owner: Weak reference to the step, which can replay it.
        size_bytes: Size of its storage.
        storage: Its bytes on the device, or None.
        room: Its place in the tier, or None.
        is_copied: Whether the tier holds its bytes.
        ticket: The copy under way, if any: in, if `is_copied`, else out.
        saved_at: Position of its saving among all saves of the evictor's steps. A backward pass reads the latest first.
        is_shared: Whether autograd holds the storage for its earlier contents too.
        is_busy: Whether it is being read or brought back, so that it must stay.
        witness: What a replay of it is compared with, or None.
        copy: Its copy in the tier that is only there until its replay is proven, or None.
    """

    __slots__ = (
        "__weakref__", "copy", "is_busy", "is_copied", "is_shared", "owner", "room", "saved_at", "size_bytes",
        "storage", "ticket", "value", "witness",
    )  # fmt: skip

    def __init__(self, value: int, owner: OnlineStep, storage: torch.UntypedStorage, saved_at: int) -> None:
        super().__init__()
        self.value, self.owner = value, weakref.ref(owner)
        self.storage: torch.UntypedStorage | None = storage
        self.size_bytes = storage.nbytes()
        self.saved_at = saved_at
        self.room: Room | None = None
        self.ticket: Ticket | None = None
        self.is_copied = False
        self.is_busy = False
        self.is_shared = False
        self.witness: Witness | None = None
        self.copy: Room | None = None

    @property
    def is_of_this_thread(self) -> bool:
        """Whether the calling thread runs its step, or nobody does.

        Only that thread may let go of the storage: PyTorch ends the process if one thread takes or releases the Python
        object of a storage while another one releases the storage in C++.
        """
        owner = self.owner()
        return owner is None or owner.thread == threading.get_ident()

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether anything but this record holds the storage, so that dropping it would free nothing."""
        return (
            self.storage is None or not self.is_of_this_thread or self.is_shared or use_count(self.storage._cdata) > 1
        )


class OnlineHandle(PackedRecord[OnlineRecord]):
    """What autograd holds in place of a tensor on an `OnlineRecord`."""

    __slots__ = ()


class KeptTensor:
    """What autograd holds in place of a tensor that a plan keeps. It gets a handle if it has to leave after all.

    A handle for each kept value of each step would double what following a plan costs.

    Attributes:
        tensor: The tensor, without its history; None once it has a handle.
        version: Of the tensor when it was saved.
        value: Id of the value in its step.
        identity: Of the tensor that autograd has saved.
        handle: The handle, or None.
    """

    __slots__ = ("__weakref__", "handle", "identity", "tensor", "value", "version")

    def __init__(self, tensor: torch.Tensor, version: int, value: int, identity: Identity | None) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version, self.value, self.identity = version, value, identity
        self.handle: OnlineHandle | None = None


use_count = torch._C._storage_Use_Count
