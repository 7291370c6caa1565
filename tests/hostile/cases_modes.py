"""Modes that change results, fast paths that being watched would leave, and kinds of tensors that cannot be watched."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.hostile.case import ROWS, WIDTH, Hostile, hostile


class _Rounding(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.bfloat16().float() if function is torch.ops.aten.addmm.default else result


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is functional.gelu else result


@hostile("a dispatch mode around the model rounds results")
class DispatchModeOutside(Hostile):
    def around(self) -> AbstractContextManager[object]:
        return _Rounding()


@hostile("a dispatch mode inside of the model rounds results")
class DispatchModeInside(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        with _Rounding():
            return super().layer(rows)


@hostile("a dispatch mode inside of the model from the fourth step on", may_stop=True)
class DispatchModeLate(Hostile):
    steps = 7

    def layer(self, rows: Tensor) -> Tensor:
        if self.number < 4:
            return super().layer(rows)
        with _Rounding():
            return super().layer(rows)


@hostile("a function mode around the model changes results")
class FunctionModeOutside(Hostile):
    def around(self) -> AbstractContextManager[object]:
        return _Doubling()


@hostile("a function mode inside of the model changes results")
class FunctionModeInside(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        with _Doubling():
            return super().layer(rows)


@hostile("the default device is a mode, entered inside")
class DefaultDeviceInside(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        with torch.device("cpu"):
            return super().layer(rows * torch.arange(WIDTH).float().cos())


@hostile("a frozen transformer layer in eval mode without gradients takes a fast path unless it is watched")
class FrozenTransformer(Hostile):
    def add_parts(self) -> None:
        self.teacher = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = functional.gelu(self.first(rows)).view(4, 8, WIDTH)
        self.teacher.eval()
        with torch.no_grad():
            taught = self.teacher(hidden)
        return self.second(torch.tanh(hidden + taught)).square().mean()


@hostile("a frozen transformer layer within autocast, whose fused kernel runs operators that are cast")
class FrozenTransformerCast(FrozenTransformer):
    def forward(self, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(rows)


@hostile("attention in eval mode with frozen weights takes a fast path unless it is watched")
class FrozenAttention(Hostile):
    def add_parts(self) -> None:
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True).eval().requires_grad_(False)

    def layer(self, rows: Tensor) -> Tensor:
        heads = rows.view(4, 8, WIDTH)
        with torch.no_grad():
            mixed = self.attention(heads, heads, heads, need_weights=False)[0]
        return super().layer(rows + mixed.reshape(ROWS, WIDTH))


@hostile("a whole encoder in eval mode with a padding mask, which becomes a nested tensor on its fast path")
class FrozenEncoderWithPadding(Hostile):
    def add_parts(self) -> None:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
        self.teacher = nn.TransformerEncoder(layer, 2).requires_grad_(False).eval()

    def forward(self, rows: Tensor) -> Tensor:
        hidden = functional.gelu(self.first(rows)).view(4, 8, WIDTH)
        padding = torch.arange(8) > torch.tensor([[7], [5], [6], [4]])
        self.teacher.eval()
        with torch.no_grad():
            taught = self.teacher(hidden, src_key_padding_mask=padding)
        hidden = torch.tanh(hidden[:, : taught.shape[1]] + taught)
        return self.second(hidden).square().mean()


@hostile("the model asks whether functions are overridden, as PyTorch's own layers do before a fast path")
class AsksForOverrides(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        watched = torch.overrides.has_torch_function((rows,))
        return super().layer(rows * (2.0 if watched else 1.0))


@hostile("parts are quantized, which has no plain storage")
class Quantized(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = functional.gelu(self.first(rows))
        coarse = torch.quantize_per_tensor(hidden.detach(), 0.1, 3, torch.quint8).dequantize()
        return torch.tanh(self.second(hidden * coarse))


@hostile("torch.func.grad inside of the forward pass", is_alone=True)
class FunctionalGradient(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        gradient = torch.func.vmap(torch.func.grad(lambda row: (row.sin() * row.exp()).sum()))
        return torch.tanh(self.second(gradient(self.first(rows))))


@hostile("torch.func.jvp inside of the forward pass")
class FunctionalDerivative(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        _, derivative = torch.func.jvp(torch.sin, (hidden,), (torch.ones_like(hidden),))
        return torch.tanh(self.second(functional.gelu(hidden) * derivative))


@hostile("dual numbers inside of the forward pass")
class DualNumbers(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(hidden, torch.ones_like(hidden))
            derivative = torch.autograd.forward_ad.unpack_dual(dual.sin()).tangent
        return torch.tanh(self.second(functional.gelu(hidden) * derivative))


@hostile("strided nested tensors", is_alone=True)
class StridedNested(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        nested = torch.nested.as_nested_tensor([hidden[:10], hidden[10:]])
        padded = torch.nested.to_padded_tensor(functional.gelu(nested), 0.0)
        return torch.tanh(self.second(padded.reshape(-1, WIDTH)[:ROWS]))


@hostile("a masked tensor, which wraps others", is_alone=True)
class WrapperSubclass(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        from torch.masked import masked_tensor

        scale = masked_tensor(rows, rows > 0).sum(1).to_tensor(0.0)
        return torch.tanh(self.second(functional.gelu(self.first(rows)))) * scale[:, None]


@hostile("an ordinary model, while a masked tensor is alive elsewhere in the process", is_alone=True)
class WrapperAlive(Hostile):
    def add_parts(self) -> None:
        from torch.masked import masked_tensor

        self.alive = [masked_tensor(torch.ones(3), torch.ones(3) > 0)]


@hostile("torch.cond chooses a branch, which is traced", is_alone=True)
class TracedBranch(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        chosen = torch.cond(hidden.sum() > 0, lambda value: value.sin(), lambda value: value.cos(), (hidden,))
        return torch.tanh(self.second(functional.gelu(chosen)))


@hostile("sparse tensors, and products with them")
class SparseProducts(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        chosen = (torch.eye(ROWS) * rows.detach().mean()).to_sparse()
        return super().layer(torch.sparse.mm(chosen, self.first(rows)) + rows)


@hostile("two models are trained in two threads under one budget", is_alone=True)
class TwoThreads(Hostile):
    def add_parts(self) -> None:
        self.beside = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))]

    def other_models(self) -> list[nn.Module]:
        return list(self.beside)

    def before_step(self) -> None:
        self.thread = threading.Thread(target=self._train_beside)
        self.thread.start()

    def _train_beside(self) -> None:
        torch.set_num_threads(1)
        for number in range(3):
            rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
            self.beside[0](rows).square().mean().backward()

    def after_step(self) -> None:
        self.thread.join()
        del self.thread
        for parameter in self.beside[0].parameters():
            self.get_parameter("first.bias").data.add_(parameter.grad.mean(), alpha=0.01)
