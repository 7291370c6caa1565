"""Networks of many small ops, small enough that a plain step takes 50 to 800 ms on two cores.

Weights and data are random. What is drawn depends on the number of the step alone, so two trainings of one network see
the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pooch.workloads import Workload, load_workload

LARGEST = -1  # the number of the step that takes the most memory


@dataclass(frozen=True, slots=True)
class Trainee:
    """A network with its data.

    Attributes:
        workload: its step, on the largest batch until another one is drawn.
        draw: makes the batch of a step, by its number, the one that the workload trains on. None: there is one batch.
    """

    workload: Workload
    draw: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class Net:
    """A row of the tables.

    Attributes:
        name: in tables and on the command line.
        shows: what its small ops come from.
        build: builds it, always from the same random numbers. Another process can be told to call it.
        needs: the package that it needs besides torch, "" for none.
    """

    name: str
    shows: str
    build: Callable[[], Trainee]
    needs: str = ""


def _loaded(name: str, settings: Mapping[str, int]) -> Trainee:
    return Trainee(load_workload(name, settings=settings))


def _built_in(name: str, **settings: int) -> Callable[[], Trainee]:
    return partial(_loaded, name, settings)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _on_tokens(model: nn.Module, words: int, batch_size: int, length: int) -> Trainee:
    """A language model of transformers on random tokens, with its own loss."""
    tokens = torch.randint(words, (batch_size, length))

    def forward() -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    return Trainee(Workload(model, forward, _optimizer(model), batch_size=batch_size))


def patchtst() -> Trainee:
    """A transformer on patches of time series of seven channels."""
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    torch.manual_seed(0)
    config = PatchTSTConfig(
        num_input_channels=7, context_length=336, prediction_length=96, patch_length=16, patch_stride=8,
        num_hidden_layers=3, d_model=64, num_attention_heads=4, ffn_dim=128,
    )  # fmt: skip
    model = PatchTSTForPrediction(config).train()
    past, future = torch.randn(16, 336, 7), torch.randn(16, 96, 7)

    def forward() -> Tensor:
        loss: Tensor = model(past_values=past, future_values=future).loss
        return loss

    return Trainee(Workload(model, forward, _optimizer(model), batch_size=16))


def rwkv() -> Trainee:
    """RWKV, whose attention is a loop over the tokens in Python."""
    from transformers import AutoModelForCausalLM, RwkvConfig

    torch.manual_seed(0)
    config = RwkvConfig(vocab_size=500, context_length=64, hidden_size=128, num_hidden_layers=4)
    return _on_tokens(AutoModelForCausalLM.from_config(config).train(), 500, 16, 64)


def gemma2() -> Trainee:
    """Gemma 2: norms before and after each part, capped logits."""
    from transformers import AutoModelForCausalLM, Gemma2Config

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=1000, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=48, sliding_window=64, max_position_embeddings=128,
    )  # fmt: skip
    return _on_tokens(AutoModelForCausalLM.from_config(config).train(), 1000, 6, 128)


class _MbConv(nn.Module):
    """A depthwise convolution between two of one pixel, with squeeze and excitation."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        wide = 4 * channels_in
        self.spread = nn.Sequential(
            nn.BatchNorm2d(channels_in), nn.Conv2d(channels_in, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.GELU(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.GELU(),
        )  # fmt: skip
        self.excite = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, wide // 16, 1), nn.SiLU(), nn.Conv2d(wide // 16, wide, 1),
            nn.Sigmoid(),
        )  # fmt: skip
        self.narrow = nn.Conv2d(wide, channels_out, 1)
        self.shortcut = nn.Sequential(nn.AvgPool2d(stride), nn.Conv2d(channels_in, channels_out, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.spread(x)
        result: Tensor = self.shortcut(x) + self.narrow(hidden * self.excite(hidden))
        return result


class _TileAttention(nn.Module):
    """Attention within windows of neighbours, or within grids of pixels that are far apart, and an MLP."""

    def __init__(self, width: int, heads: int, side: int, is_grid: bool) -> None:
        super().__init__()
        self.heads, self.side, self.is_grid = heads, side, is_grid
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(heads, side * side, side * side))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        tiles, side = height // self.side, self.side
        if self.is_grid:
            split, order = (batch, channels, side, tiles, side, tiles), (0, 3, 5, 2, 4, 1)
        else:
            split, order = (batch, channels, tiles, side, tiles, side), (0, 2, 4, 3, 5, 1)
        back = [order.index(place) for place in range(len(order))]
        tiled = x.view(split).permute(order)
        flat = tiled.reshape(-1, side * side, channels)
        flat = flat + self._attended(self.before(flat))
        flat = flat + self.mlp(self.between(flat))
        return flat.view(tiled.shape).permute(back).reshape(batch, channels, height, width)

    def _attended(self, x: Tensor) -> Tensor:
        groups, length, channels = x.shape
        heads = self.mixed(x).view(groups, length, 3, self.heads, channels // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) * (channels // self.heads) ** -0.5 + self.bias
        joined: Tensor = self.joined((scores.softmax(-1) @ value).transpose(1, 2).reshape(groups, length, channels))
        return joined


def maxvit() -> Trainee:
    """Blocks as in MaxViT: MBConv, attention in windows, attention in grids; pictures of 64 pixels."""
    torch.manual_seed(0)
    widths, side = (32, 64, 96), 4
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 2, 1), nn.BatchNorm2d(widths[0]), nn.GELU()]
    channels = widths[0]
    for width in widths:
        for stride in (2, 1):
            layers += [
                _MbConv(channels, width, stride), _TileAttention(width, 4, side, False),
                _TileAttention(width, 4, side, True),
            ]  # fmt: skip
            channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    pictures, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    return Trainee(Workload(model, lambda: cross_entropy(model(pictures), labels), _optimizer(model), batch_size=8))


class _Cells(nn.Module):
    """LSTM cells on top of one another, called in a loop over time."""

    def __init__(self, width: int, cells: int) -> None:
        super().__init__()
        self.width = width
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(cells))
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        states = [(inputs.new_zeros(len(inputs), self.width),) * 2 for _ in self.cells]
        outputs = []
        for item in inputs.unbind(1):
            hidden = item
            for number, cell in enumerate(self.cells):
                states[number] = cell(hidden, states[number])
                hidden = states[number][0]
            outputs.append(self.head(hidden))
        return torch.stack(outputs, 1)


def lstm_cells() -> Trainee:
    """Two LSTM cells over 150 steps."""
    torch.manual_seed(0)
    model = _Cells(256, 2)
    inputs, targets = torch.randn(32, 150, 256), torch.randn(32, 150, 1)
    return Trainee(Workload(model, lambda: (model(inputs) - targets).square().mean(), _optimizer(model), batch_size=32))


def _lengths(number: int, shortest: int, longest: int, count: int) -> Tensor:
    """Lengths of sequences in a step; one of them is the longest possible in the largest step."""
    drawn = torch.randint(shortest, longest, (count,), generator=torch.Generator().manual_seed(1 + number))
    if number == LARGEST:
        drawn[0] = longest
    return drawn


def ragged_lstm() -> Trainee:
    """The tagger of `benchmarks.setups`: packed sequences, other lengths in every step."""
    from benchmarks.setups.several import Tagger

    torch.manual_seed(0)
    model = Tagger()
    batch: list[Tensor] = []

    def draw(number: int) -> None:
        lengths = _lengths(number, 24, 64, 32)
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(500, (32, int(lengths.max())), generator=generator)
        batch[:] = tokens, lengths, torch.randint(20, (tokens.numel(),), generator=generator)

    def forward() -> Tensor:
        tokens, lengths, labels = batch
        return cross_entropy(model(tokens, lengths).flatten(0, 1), labels)

    draw(LARGEST)
    return Trainee(Workload(model, forward, _optimizer(model), batch_size=32), draw)


def random_lengths() -> Trainee:
    """A language model on sequences of another length in every step."""
    from benchmarks.setups.nets import LanguageModel

    torch.manual_seed(0)
    model = LanguageModel(words=500, width=192, depth=4)
    batch: list[Tensor] = []

    def draw(number: int) -> None:
        length = int(_lengths(number, 64, 256, 1))
        batch[:] = [torch.randint(500, (8, length + 1), generator=torch.Generator().manual_seed(number))]

    def forward() -> Tensor:
        (tokens,) = batch
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    draw(LARGEST)
    return Trainee(Workload(model, forward, _optimizer(model), batch_size=8), draw)


def _all() -> Iterator[Net]:
    yield Net("patchtst", "patches of time series", patchtst, "transformers")
    yield Net("rwkv", "a loop over tokens in Python", rwkv, "transformers")
    yield Net("gemma2", "norms before and after each part", gemma2, "transformers")
    yield Net("maxvit", "windows, grids and MBConv", maxvit)
    yield Net("lstm-cells", "two `nn.LSTMCell` in a loop", lstm_cells)
    char_rnn = _built_in("char_rnn", batch_size=32, sequence_length=64, width=192, layers=2)
    yield Net("char-rnn", "an unrolled LSTM, op by op", char_rnn)
    yield Net("ragged-lstm", "packed sequences, other lengths in every step", ragged_lstm)
    yield Net("random-lengths", "another length in every step", random_lengths)
    gpt2 = _built_in("gpt2", batch_size=8, sequence_length=128, layers=4, width=256, heads=4, vocabulary=2000)
    yield Net("gpt2", "the workload, smaller", gpt2, "transformers")
    yield Net(
        "resnet50", "the workload, smaller", _built_in("resnet50", batch_size=16, image_size=96, classes=100, width=32)
    )
    yield Net(
        "unet3d", "the workload, smaller", _built_in("unet3d", batch_size=2, volume_size=64, first_channels=8), "monai"
    )


NETS = {net.name: net for net in _all()}
