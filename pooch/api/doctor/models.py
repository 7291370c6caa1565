"""Ten small models, each with something that swapping or replaying may get wrong; they need PyTorch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from ...workloads import Workload

Build = Callable[[torch.device], Workload]


class _Residual(nn.Module):
    """A block whose input is used again after it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        """The sum of both ways."""
        hidden = functional.relu(self.norms[0](self.first(images)), inplace=True)
        return functional.relu(images + self.norms[1](self.second(hidden)), inplace=True)


class _Attention(nn.Module):
    """A block of a transformer, with dropout on the attention."""

    def __init__(self, width: int, heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joined, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widened = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, words: Tensor) -> Tensor:
        """Attention, then the wide layers."""
        parts = self.joined(self.before(words)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.is_causal)
        words = words + functional.dropout(self.out(seen.transpose(1, 2).flatten(2)), 0.1, self.training)
        joined: Tensor = words + self.widened(self.after(words))
        return joined


class _Encoder(nn.Module):
    """Words in, scores of words out, with one table for both."""

    def __init__(self, width: int, *, is_causal: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(200, width)
        self.blocks = nn.Sequential(*[_Attention(width, 4, is_causal=is_causal) for _ in range(2)])

    def forward(self, words: Tensor) -> Tensor:
        """Scores."""
        scores: Tensor = self.blocks(self.table(words)) @ self.table.weight.T
        return scores


class _Recurrent(nn.Module):
    """A recurrent network of two layers, with dropout between them where it has any."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], dropout: float) -> None:
        super().__init__()
        self.layers = kind(32, 48, num_layers=2, dropout=dropout, batch_first=True)
        self.out = nn.Linear(48, 16)

    def forward(self, rows: Tensor) -> Tensor:
        """Scores for each row."""
        scores: Tensor = self.out(self.layers(rows)[0])
        return scores


class _Skips(nn.Module):
    """Down and up again, with what was saved on the way down joined on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)])
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Images of the same size."""
        high = functional.silu(self.down[0](images))
        low = functional.silu(self.down[1](high))
        joined: Tensor = self.out(torch.cat([high, functional.leaky_relu(self.up(low))], dim=1))
        return joined


class _Experts(nn.Module):
    """Each row goes through one of two experts, chosen by a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        """Weighted results."""
        weights = self.gate(rows).softmax(dim=-1)
        joined: Tensor = rows
        for number, expert in enumerate(self.experts):
            joined = joined + expert(rows) * weights[:, number : number + 1]
        return joined


def _workload(
    model: nn.Module,
    device: torch.device,
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    dtype: torch.dtype | None = None,
) -> Workload:
    model, inputs = model.to(device), inputs.to(device)

    def forward() -> Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            return loss(model(inputs))

    return Workload(model, forward, torch.optim.AdamW(model.parameters(), lr=1e-3))


def _squares(result: Tensor) -> Tensor:
    return result.float().square().mean()


def _of_classes(classes: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda scores: functional.cross_entropy(scores.flatten(0, -2).float(), classes.flatten())


def _perceptron(device: torch.device) -> Workload:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)]
    return _workload(nn.Sequential(*layers), device, torch.randn(256, 64), _squares)


def _residual(device: torch.device) -> Workload:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), _Residual(16), _Residual(16))
    return _workload(model, device, torch.randn(4, 3, 24, 24), _squares)


def _grouped(device: torch.device) -> Workload:
    layers = [
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.GroupNorm(4, 16), nn.SiLU(), nn.Dropout2d(0.1))
        for _ in range(3)
    ]
    model = nn.Sequential(nn.Conv2d(3, 16, 1), *layers, nn.MaxPool2d(2))
    return _workload(model, device, torch.randn(4, 3, 24, 24), _squares)


def _volumes(device: torch.device) -> Workload:
    model = nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.PReLU(), nn.Conv3d(8, 8, 3, padding=1), nn.Tanh()
    )
    return _workload(model, device, torch.randn(2, 1, 12, 12, 12), _squares)


def _causal(device: torch.device) -> Workload:
    words = torch.randint(200, (4, 32), device=device)
    return _workload(_Encoder(32, is_causal=True), device, words, _of_classes(words.roll(-1, 1)))


def _mixed(device: torch.device) -> Workload:
    words = torch.randint(200, (4, 32), device=device)
    model = _Encoder(32, is_causal=False)
    return _workload(model, device, words, _of_classes(words), dtype=torch.bfloat16)


def _lstm(device: torch.device) -> Workload:
    return _workload(_Recurrent(nn.LSTM, 0.2), device, torch.randn(16, 24, 32), _squares)


def _gru(device: torch.device) -> Workload:
    return _workload(_Recurrent(nn.GRU, 0.0), device, torch.randn(16, 24, 32), _squares)


def _skips(device: torch.device) -> Workload:
    return _workload(_Skips(), device, torch.randn(4, 3, 32, 32), _squares)


def _experts(device: torch.device) -> Workload:
    return _workload(nn.Sequential(_Experts(64), _Experts(64)), device, torch.randn(256, 64), _squares)


MODELS: dict[str, Build] = {
    "perceptron with dropout": _perceptron,
    "residual convolutions": _residual,
    "grouped convolutions": _grouped,
    "convolutions of volumes": _volumes,
    "transformer": _causal,
    "transformer, mixed precision": _mixed,
    "LSTM with dropout": _lstm,
    "GRU": _gru,
    "long skips": _skips,
    "experts behind a gate": _experts,
}
