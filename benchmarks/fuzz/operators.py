"""Ordinary pieces: operators between layers, in place, on views, over rows and columns."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.fuzz.piece import Piece


class Joined(Piece):
    def build(self) -> None:
        self.linear = nn.Linear(2 * self.width, self.width)

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(torch.cat([rows, rows.flip(0).sin()], 1))


class Gate(Piece):
    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        return {"by": drawing.choice(("glu", "chunk", "view"))}

    def build(self, by: str) -> None:
        self.linear, self.by = nn.Linear(self.width, 2 * self.width), by

    def forward(self, rows: Tensor) -> Tensor:
        both = self.linear(rows)
        if self.by == "glu":
            return functional.glu(both)
        one, other = both.chunk(2, 1) if self.by == "chunk" else both.view(-1, 2, self.width).unbind(1)
        return one * functional.silu(other)


class InPlace(Piece):
    """In-place operators on views of a fresh tensor."""

    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        kinds = ("mul", "slice", "clamp", "copy", "index", "masked", "transposed", "addcmul", "fill")
        return {"acts": drawing.choices(kinds, k=drawing.randint(1, 4))}

    def build(self, acts: list[str]) -> None:
        self.acts = acts

    def forward(self, rows: Tensor) -> Tensor:
        result = rows * 1.1
        half = self.width // 2
        for act in self.acts:
            match act:
                case "mul":
                    result.mul_(0.9)
                case "slice":
                    result[:, :half] += rows[:, half:]
                case "clamp":
                    result.clamp_(-3, 3)
                case "copy":
                    result[2:4].copy_(rows[4:6])
                case "index":
                    result.index_add_(0, torch.tensor([1, 3, 1]), rows[:3])
                case "masked":
                    result.masked_fill_(rows.detach() > 1, 0.5)
                case "transposed":
                    result.t()[1:3].sub_(0.25)
                case "addcmul":
                    result.addcmul_(rows, rows, value=0.1)
                case _:
                    result[0].fill_(0.5)
        return result


class Moved(Piece):
    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        return {
            "how": drawing.choice(("roll", "flip", "gather", "select", "transpose", "permutation", "expand", "pad"))
        }

    def build(self, how: str) -> None:
        self.how = how

    def forward(self, rows: Tensor) -> Tensor:
        count = len(rows)
        match self.how:
            case "roll":
                return rows.roll(3, 0).sin()
            case "flip":
                return rows.flip(1).tanh()
            case "gather":
                return rows.gather(1, rows.detach().argsort(dim=1, stable=True))
            case "select":
                return rows.index_select(0, torch.arange(count).flip(0)) * 1.1
            case "transpose":
                return rows.t().contiguous().cos().t()
            case "permutation":
                return rows[torch.randperm(count)].sin()
            case "expand":
                return rows * rows[:1].expand(count, -1).sigmoid()
        return functional.pad(rows, (1, 1))[:, 1:-1].exp().log1p()


class Reduced(Piece):
    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        kinds = (
            "softmax",
            "cumsum",
            "max",
            "norm",
            "logsumexp",
            "sort",
            "topk",
            "pool",
            "fourier",
            "distances",
            "item",
        )
        return {"by": drawing.choice(kinds)}

    def build(self, by: str) -> None:
        self.by = by

    def forward(self, rows: Tensor) -> Tensor:
        match self.by:
            case "softmax":
                return rows + rows.softmax(1) * self.width
            case "cumsum":
                return rows + rows.cumsum(1).tanh()
            case "max":
                return rows - rows.max(1, keepdim=True).values.sigmoid()
            case "norm":
                return functional.normalize(rows, dim=1) * 3
            case "logsumexp":
                return rows - rows.logsumexp(1, keepdim=True) / 8
            case "sort":
                return rows.sort(dim=1, stable=True).values + rows
            case "topk":
                return rows + rows.topk(3, 1).values.sum(1, keepdim=True).tanh()
            case "pool":
                return rows + functional.max_pool1d(rows[:, None], 3, 1, 1)[:, 0]
            case "fourier":
                whole = rows.float() if rows.dtype is torch.bfloat16 else rows
                return torch.fft.irfft(torch.fft.rfft(whole) * 0.7, n=self.width).to(rows.dtype)
            case "distances":
                whole = rows.float() if rows.dtype is torch.bfloat16 else rows
                return rows + torch.cdist(whole, whole[:2]).sum(1, keepdim=True).tanh().to(rows.dtype)
        return rows * (0.9 if float(rows.detach().float().mean()) > 0 else 1.1)


class Products(Piece):
    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        return {"by": drawing.choice(("einsum", "bmm", "outer", "baddbmm"))}

    def build(self, by: str) -> None:
        self.weight, self.by = nn.Parameter(torch.randn(self.width, self.width) / self.width**0.5), by

    def forward(self, rows: Tensor) -> Tensor:
        batch = rows.view(8, -1, self.width)
        weight = self.weight.to(rows.dtype)
        match self.by:
            case "einsum":
                return torch.einsum("btw,wv->btv", batch, weight).reshape(rows.shape)
            case "bmm":
                return torch.bmm(batch, weight.expand(8, -1, -1)).reshape(rows.shape)
            case "outer":
                return rows + (rows.mean(1)[:, None] * weight[0])
        return torch.baddbmm(batch, batch, weight.expand(8, -1, -1), beta=0.5).reshape(rows.shape)


class Cast(Piece):
    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        return {"to": drawing.choice(("bfloat16", "float16", "float64"))}

    def build(self, to: str) -> None:
        self.to_dtype = getattr(torch, to)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.tanh(rows.to(self.to_dtype) * 1.5).to(rows.dtype)


class Frozen(Piece):
    """A part without gradients: of its parameters, or of all that it does."""

    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        return {"kind": drawing.choice(("parameters", "no_grad", "detach", "inference"))}

    def build(self, kind: str) -> None:
        self.linear, self.kind = nn.Linear(self.width, self.width).requires_grad_(kind != "parameters"), kind

    def forward(self, rows: Tensor) -> Tensor:
        if self.kind == "parameters":
            return functional.gelu(self.linear(rows))
        if self.kind == "detach":
            return rows + self.linear(rows.detach()).sin()
        with torch.no_grad() if self.kind == "no_grad" else torch.inference_mode():
            taught = functional.gelu(self.linear(rows))
        return rows + taught.clone()
