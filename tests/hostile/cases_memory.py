"""Bytes that are read or written behind PyTorch's dispatcher: through NumPy, pointers, other threads."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tests.hostile.case import ROWS, WIDTH, Hostile, hostile


class _NumpyCube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return torch.from_numpy(rows.detach().numpy() ** 3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3 * ctx.saved_tensors[0] ** 2


class _NumpyInto(_NumpyCube):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        result = torch.empty_like(rows)
        np.power(rows.detach().numpy(), 3, out=result.numpy())
        return result


class _PointerCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        result = torch.empty_like(rows)
        ctypes.memmove(result.data_ptr(), rows.data_ptr(), rows.nbytes)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5


class _MemoryView(_PointerCopy):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        result = torch.zeros(rows.shape)
        view = memoryview(result.numpy()).cast("B")
        view[:] = memoryview(rows.detach().contiguous().numpy()).cast("B")
        return result


@hostile("an autograd function computes with NumPy, as PyTorch's tutorial does")
class NumpyFunction(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return super().layer(_NumpyCube.apply(rows) + rows)


@hostile("an autograd function fills empty_like through NumPy")
class NumpyFillsEmpty(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(_NumpyInto.apply(self.first(rows)))))


@hostile("an autograd function fills a tensor through its address")
class PointerFunction(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(_PointerCopy.apply(self.first(rows)))))


@hostile("an autograd function fills a tensor through a memoryview")
class MemoryViewFunction(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(_MemoryView.apply(self.first(rows)))))


@hostile("an activation is written through its NumPy view")
class NumpyWritesActivation(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        hidden.detach().numpy()[:, 0] = 0.0
        return torch.tanh(self.second(functional.gelu(hidden)))


@hostile("a buffer is written through a NumPy view that was taken when the model was built")
class NumpyViewOfBuffer(Hostile):
    def add_parts(self) -> None:
        self.register_buffer("scale", torch.ones(WIDTH))
        self.numpy_scale = self.scale.numpy()

    def layer(self, rows: Tensor) -> Tensor:
        self.numpy_scale *= 0.9
        return super().layer(rows * self.scale)


@hostile("a parameter is written through a NumPy view at the end of the forward pass")
class NumpyViewOfParameter(Hostile):
    def add_parts(self) -> None:
        self.numpy_bias = self.first.bias.detach().numpy()

    def forward(self, rows: Tensor) -> Tensor:
        loss = super().forward(rows)
        self.numpy_bias *= 0.9
        return loss


@hostile("the input of an op is written through NumPy after the op")
class NumpyWritesInputLater(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        mask = torch.ones(ROWS, WIDTH)
        hidden = functional.gelu(self.first(rows) * mask.sin())
        mask.numpy()[:] = 7.0
        return torch.tanh(self.second(hidden))


@hostile("the batch is a NumPy array that the next batch is written over before the backward pass")
class BatchOverwritten(Hostile):
    def add_parts(self) -> None:
        self.array = np.zeros((ROWS, WIDTH), dtype=np.float32)

    def batch(self, number: int) -> Tensor:
        self.array[:] = super().batch(number).numpy()
        return torch.from_numpy(self.array)

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows.sin())

    def between(self) -> None:
        self.array[:] = 3.0


@hostile("apply_ writes with a Python function")
class ApplyInPlace(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        hidden.detach()[0].apply_(lambda value: value * 0.5)
        return torch.tanh(self.second(functional.gelu(hidden)))


@hostile("map_ writes with a Python function")
class MapInPlace(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        hidden.detach()[1].map_(rows.detach()[1].contiguous(), lambda one, other: one - other)
        return torch.tanh(self.second(functional.gelu(hidden)))


@hostile("an activation is written through DLPack")
class DlpackAlias(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        torch.from_dlpack(hidden.detach())[:, 0] = 0
        return torch.tanh(self.second(functional.gelu(hidden)))


@hostile("a part of an activation that begins at an offset is written through DLPack")
class DlpackAliasWithOffset(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        torch.from_dlpack(hidden.detach()[5:, 3:])[:2, :9] *= 2.0
        return torch.tanh(self.second(functional.gelu(hidden)))


@hostile("two storages over the same memory: writes through one are reads of the other")
class TwoStorages(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        memory = np.zeros((ROWS, WIDTH), dtype=np.float32)
        written, read = torch.from_numpy(memory), torch.from_numpy(memory)
        written.copy_(rows.detach().cos())
        return torch.tanh(self.second(functional.gelu(self.first(rows) * read)))


@hostile("torch.frombuffer over a bytearray that is changed later")
class FromBuffer(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        memory = bytearray(np.linspace(0.5, 1.5, WIDTH, dtype=np.float32).tobytes())
        scale = torch.frombuffer(memory, dtype=torch.float32)
        hidden = functional.gelu(self.first(rows) * scale.exp())
        memory[: WIDTH * 2] = bytes(WIDTH * 2)
        return torch.tanh(self.second(hidden))


@hostile("another thread writes an activation")
class ThreadWrites(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        thread = threading.Thread(target=hidden.detach().mul_, args=(0.5,))
        thread.start()
        thread.join()
        return torch.tanh(self.second(functional.gelu(hidden)))


@hostile("another thread computes a part of the layer without gradients")
class ThreadComputes(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(rows.detach().sin()))
        thread.start()
        thread.join()
        return super().layer(rows * found[0].exp())


@hostile("a thread that a buffer was handed to writes it between the passes")
class ThreadWritesBetween(Hostile):
    def add_parts(self) -> None:
        self.register_buffer("scale", torch.ones(WIDTH))

    def layer(self, rows: Tensor) -> Tensor:
        return super().layer(rows * self.scale.exp().data)

    def between(self) -> None:
        thread = threading.Thread(target=self.scale.data.mul_, args=(0.5,))
        thread.start()
        thread.join()


@hostile("memory from torch.empty is partly written by NumPy, and only that part is read")
class EmptyPartlyWritten(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        room = torch.empty(2 * ROWS, WIDTH)
        room.numpy()[:ROWS] = rows.detach().numpy() * 2
        return super().layer(rows * room[:ROWS].sigmoid())


@hostile("the storage of an activation is written through untyped_storage")
class StorageWritten(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        storage = hidden.detach().untyped_storage()
        for number in range(4):
            storage[number] = 0
        return torch.tanh(self.second(functional.gelu(hidden)))


@hostile("a forward hook replaces outputs through NumPy")
class NumpyForwardHook(Hostile):
    def add_parts(self) -> None:
        self.first.register_forward_hook(self._written)

    @staticmethod
    def _written(module: object, args: object, output: Tensor) -> Tensor:
        output.detach().numpy()[:, 1] += 1.0
        return output


@hostile("NumPy writes only from the fourth step on", may_stop=True)
class NumpyLate(Hostile):
    steps = 7

    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        view = hidden.detach().numpy()
        view[:, 0] *= 1.0 if self.number < 4 else 0.25
        return torch.tanh(self.second(functional.gelu(hidden)))


@hostile("NumPy writes in every third step alone", may_stop=True)
class NumpyNowAndThen(Hostile):
    steps = 7

    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        view = hidden.detach().numpy()
        view[:, 0] *= 0.25 if self.number % 3 == 2 else 1.0
        return torch.tanh(self.second(functional.gelu(hidden)))
