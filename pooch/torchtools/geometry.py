"""How a tensor lies in its storage. Storages move and are made again; the tensors on them are put back by geometry."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Geometry:
    """Everything about a tensor but its bytes."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Read it off a tensor."""
        return cls(
            tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg()
        )

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of this geometry on a storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conjugated:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.negated else tensor
