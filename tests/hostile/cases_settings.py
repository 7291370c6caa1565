"""Settings of the process that hold in the forward pass alone, or change between the passes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.hostile.case import ROWS, WIDTH, Hostile, hostile


@hostile("the default dtype is float64 in the forward pass alone")
class DefaultDtype(Hostile):
    def forward(self, rows: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        for _ in range(3):
            scale = (1 / torch.arange(3, 3 + ROWS * WIDTH)).view(ROWS, WIDTH).sin().float()
            rows = self.layer(rows) * scale
        torch.set_default_dtype(torch.float32)
        return rows.square().mean()


@hostile("the default dtype changes between the passes")
class DefaultDtypeBetween(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return super().layer(rows * (torch.arange(WIDTH) / 7).sin().float())

    def before_step(self) -> None:
        torch.set_default_dtype(torch.float32)

    def between(self) -> None:
        torch.set_default_dtype(torch.float64)


@hostile("denormal numbers are flushed in the forward pass alone")
class DenormalsFlushed(Hostile):
    def forward(self, rows: Tensor) -> Tensor:
        torch.set_flush_denormal(True)
        for _ in range(2):
            tiny = (self.first(rows) * 1e-39) * 1.5
            rows = torch.tanh(self.second(functional.gelu(tiny * 1e38 * 10)))
        torch.set_flush_denormal(False)
        return rows.square().mean()


@hostile("denormal numbers are flushed in the backward pass alone, where replays run")
class DenormalsFlushedBetween(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu((self.first(rows) * 1e-39) * 1.5 * 1e38 * 10)))

    def before_step(self) -> None:
        torch.set_flush_denormal(False)

    def between(self) -> None:
        torch.set_flush_denormal(True)


@hostile("the forward pass has another number of threads")
class ThreadsInForward(Hostile):
    def forward(self, rows: Tensor) -> Tensor:
        torch.set_num_threads(2)
        for _ in range(2):
            total = rows.repeat(40, 1).exp().sum()  # long enough for several threads, which sum in another order
            rows = self.layer(rows * (total * 1e3).sin())
        torch.set_num_threads(1)
        return rows.square().mean()


@hostile("the precision of matrix products is lower in the forward pass alone")
class MatmulPrecision(Hostile):
    def forward(self, rows: Tensor) -> Tensor:
        torch.set_float32_matmul_precision("medium")
        loss = super().forward(rows)
        torch.set_float32_matmul_precision("highest")
        return loss


@hostile("the precision of matrix products changes between the passes")
class MatmulPrecisionBetween(Hostile):
    def before_step(self) -> None:
        torch.set_float32_matmul_precision("highest")

    def between(self) -> None:
        torch.set_float32_matmul_precision("medium")


@hostile("oneDNN is off in the forward pass alone")
class OneDnnOff(Hostile):
    def add_parts(self) -> None:
        self.convolution = nn.Conv2d(8, 8, 3, padding=1).bfloat16()

    def layer(self, rows: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            pictures = rows.repeat(1, 32).view(8, 8, 32, 32).bfloat16()  # large enough for oneDNN to be chosen
            pictures = functional.gelu(self.convolution(pictures))
        return super().layer(pictures.float().view(ROWS, 32, WIDTH).mean(1))


@hostile("oneDNN's products of bfloat16 are off in the forward pass alone")
class OneDnnOffForProducts(Hostile):
    def forward(self, rows: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
            return super().forward(rows)


@hostile("oneDNN is deterministic in the forward pass alone")
class OneDnnDeterministic(Hostile):
    def add_parts(self) -> None:
        self.convolution = nn.Conv2d(2, 2, 3, padding=1)

    def layer(self, rows: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=True, deterministic=True):
            return super().layer(functional.gelu(self.convolution(rows.view(-1, 2, 32, 32))).reshape(ROWS, WIDTH))


@hostile("deterministic algorithms fill what torch.empty gives, in the forward pass alone")
class EmptyFilled(Hostile):
    def forward(self, rows: Tensor) -> Tensor:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        for _ in range(3):
            rows = self.layer(rows * torch.nan_to_num(torch.empty(WIDTH), nan=0.5).exp())
        torch.use_deterministic_algorithms(False)
        return rows.square().mean()


@hostile("deterministic algorithms are used in the forward pass alone")
class DeterministicAlgorithms(Hostile):
    def forward(self, rows: Tensor) -> Tensor:
        torch.use_deterministic_algorithms(True)
        places = torch.arange(ROWS).flip(0) // 2
        for _ in range(3):
            rows = self.layer(torch.zeros_like(rows).index_add(0, places, rows))
        torch.use_deterministic_algorithms(False)
        return rows.square().mean()


@hostile("autocast inside of the forward pass, and off again in a part of it")
class AutocastNested(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = functional.gelu(self.first(rows))
            with torch.autocast("cpu", enabled=False):
                hidden = torch.sigmoid(self.second(hidden.float()))
            return torch.tanh(self.second(hidden)).float()


@hostile("autocast without its cache, so that weights are cast anew each time")
class AutocastUncached(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return super().layer(super().layer(rows)).float()


@hostile("autocast's cached weight is used after the weight was written through .data")
class AutocastStaleCache(Hostile):
    def forward(self, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            rows = self.layer(rows)
            self.first.weight.data.mul_(0.9)
            return self.layer(rows).float().square().mean()


@hostile("autocast is entered around forward and backward pass")
class AutocastInBackward(Hostile):
    def before_step(self) -> None:
        torch.set_autocast_enabled("cpu", False)

    def between(self) -> None:
        torch.set_autocast_enabled("cpu", True)


@hostile("a hook of a gradient changes settings within the backward pass")
class HookChangesSettings(Hostile):
    def forward(self, rows: Tensor) -> Tensor:
        torch.set_flush_denormal(False)
        return super().forward(rows)

    def layer(self, rows: Tensor) -> Tensor:
        result = torch.tanh(self.second(functional.gelu(self.first(rows) * 1e-39 * 1.5 * 1e38 * 10)))
        result.register_hook(self._changing)
        return result

    @staticmethod
    def _changing(gradient: Tensor) -> None:
        torch.set_flush_denormal(True)


@hostile("the backend of attention is chosen in the forward pass alone")
class AttentionBackend(Hostile):
    def layer(self, rows: Tensor) -> Tensor:
        heads = self.first(rows).view(2, 4, 4, WIDTH)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            mixed = functional.scaled_dot_product_attention(heads, heads, heads)
        return torch.tanh(self.second(mixed.reshape(ROWS, WIDTH)))


@hostile("the default dtype is float64 from the fourth step on", may_stop=True)
class DefaultDtypeLate(Hostile):
    steps = 7

    def forward(self, rows: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64 if self.number >= 4 else torch.float32)
        scale = torch.full((WIDTH,), 1 / 3).sin().to(rows.dtype)
        for _ in range(3):
            rows = self.layer(rows * scale.exp())
        torch.set_default_dtype(torch.float32)
        return rows.square().mean()
