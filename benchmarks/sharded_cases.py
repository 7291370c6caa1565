"""Models sharded by FSDP2 in the ways that matter to replays: when parameters are gathered, by whom, and in what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

BATCH = 4


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, rows: Tensor) -> Tensor:
        split = self.qkv(rows).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = split.chunk(3, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Feedforward(nn.Module):
    """Two layers, the inner one four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(rows)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block of a transformer, with norms before its parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.second_norm, self.feedforward = nn.LayerNorm(width), Feedforward(width)

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows + self.attention(self.norm(rows))
        return rows + self.feedforward(self.second_norm(rows))  # type: ignore[no-any-return]


class Language(nn.Module):
    """A small language model.

    Args:
        width: of a token's row.
        blocks: number of blocks.
        length: tokens of a text.
        words: in the vocabulary.
        tied: whether the output layer shares the table of the embedding.
        rounds: how often the blocks run, one after the other.
    """

    def __init__(
        self, width: int, blocks: int, length: int, words: int = 64, *, tied: bool = False, rounds: int = 1
    ) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.rounds = rounds

    def forward(self, words: Tensor) -> Tensor:
        rows = self.embedding(words) + self.position
        for _ in range(self.rounds):
            for block in self.blocks:
                rows = block(rows)
        logits = self.head(self.norm(rows)).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


@dataclass(frozen=True)
class Case:
    """A way to shard.

    Attributes:
        name: for the reader.
        shard: shards a model.
        tied: as in `Language`.
        rounds: as in `Language`.
    """

    name: str
    shard: Callable[[Language], None]
    tied: bool = False
    rounds: int = 1

    def model(self, width: int, blocks: int, length: int) -> Language:
        """Returns the sharded model, after two steps that are not like the others: they set up the shards."""
        torch.manual_seed(0)
        model = Language(width, blocks, length, tied=self.tied, rounds=self.rounds)
        self.shard(model)
        for _ in range(2):
            model(texts(0, length)).backward()
        model.zero_grad()
        return model


def texts(seed: int, length: int) -> Tensor:
    """Returns a batch of random texts."""
    return torch.randint(64, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def shard_blocks(model: Language, reshard: bool | int = True, **options: object) -> None:
    """Makes each block a unit, and the rest of the model the root's."""
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)  # type: ignore[call-overload]
    fully_shard(model, **options)  # type: ignore[call-overload]


def _prefetching(model: Language) -> None:
    shard_blocks(model)
    for first, second in pairwise(model.blocks):
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])


def _nested(model: Language) -> None:
    for block in model.blocks:
        fully_shard(block.feedforward)
    shard_blocks(model)


def _mixed(model: Language) -> None:
    shard_blocks(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


CASES = {
    case.name: case
    for case in (
        Case("blocks", shard_blocks),
        Case("no reshard after forward", lambda model: shard_blocks(model, reshard=False)),
        Case("explicit prefetching", _prefetching),
        Case("nested units", _nested),
        Case("bf16 parameters", _mixed),
        Case("tied embedding", shard_blocks, tied=True),
        Case("each block twice", shard_blocks, rounds=2),
    )
}


@contextmanager
def collectives(found: Counter[str]) -> Iterator[None]:
    """Counts what gloo runs in a block, the backward pass included. It reduces and scatters by reducing everywhere.

    `c10d::` events would be counted twice under a dispatch mode, which calls the op a second time.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        yield
    names = (event.name for event in profiled.events())
    found.update(name.removeprefix("gloo:") for name in names if name.startswith("gloo:"))
