"""The geometry of a tensor on its storage, from which tensors are recreated on storages that moved."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Geometry:
    """Everything about a tensor except its bytes."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Returns the geometry of a tensor."""
        return cls(
            tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg()
        )

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Returns a tensor of this geometry on a storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conjugated:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.negated else tensor
