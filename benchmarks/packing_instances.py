"""Instances for packing, made by the project itself: the same for the same seed."""

from __future__ import annotations

import random

from pooch.packing import Block


def training_step(layers: int, *, seed: int = 0, per_layer: int = 3) -> list[Block]:
    """Blocks of a forward and backward pass: activations that live across, workspaces, gradients, some swapped out."""
    draw = random.Random(seed)
    blocks, end = [], 4 * layers
    for layer in range(layers):
        for _ in range(per_layer):
            size = draw.choice((1, 2, 3, 5, 8, 13)) * 512 * draw.randint(1, 64)
            forward, backward = 2 * layer, end - 2 * layer - 1
            if draw.random() < 0.4 and backward - forward > 8:
                blocks.append(Block(forward, forward + draw.randint(2, 4), size))
                blocks.append(Block(backward - draw.randint(1, 4), backward + 1, size))
            else:
                blocks.append(Block(forward, backward + 1, size))
        blocks.append(Block(2 * layer, 2 * layer + 1, 512 * draw.randint(1, 400)))
        blocks.append(Block(end - 2 * layer - 2, end - 2 * layer + draw.randint(0, 3), 512 * draw.randint(1, 200)))
    return blocks


def random_blocks(count: int, *, seed: int = 0, times: int = 60, aligned: bool = False) -> list[Block]:
    """Blocks of any lifetimes."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        lower = draw.randrange(times)
        upper = lower + 1 + int(draw.expovariate(6 / times))
        found.append(Block(lower, upper, draw.randint(1, 100), draw.choice((1, 4, 16)) if aligned else 1))
    return found


def uneven_blocks(count: int, *, seed: int = 0, times: int = 4000) -> list[Block]:
    """Blocks of any lifetimes with log-normal sizes: a few are a hundred times as large as most."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        lower = draw.randrange(times)
        upper = lower + 1 + int(draw.expovariate(6 / times))
        found.append(Block(lower, upper, 512 * max(1, int(draw.lognormvariate(5, 1.5)))))
    return found


def even_blocks(count: int, *, seed: int = 0, times: int = 4000) -> list[Block]:
    """Blocks with sizes and lifetimes that are drawn evenly, up to 1 MB and a third of all times."""
    draw = random.Random(seed)
    begins = [draw.randrange(times) for _ in range(count)]
    return [Block(lower, lower + draw.randint(1, times // 3), draw.randint(1, 10**6)) for lower in begins]


def cut_rectangle(count: int, *, times: int, size_bytes: int, seed: int = 0) -> list[Block]:
    """A full arena, cut in pieces again and again, so that a layout without any gap exists."""
    draw = random.Random(seed)
    pieces = [(0, times, size_bytes)]
    while len(pieces) < count:
        lower, upper, size = pieces.pop(max(range(len(pieces)), key=lambda k: _area(pieces[k]) * draw.random()))
        cuts_time = upper - lower > 1 and (size < 2 or draw.random() < 0.5)
        if cuts_time:
            cut = draw.randrange(lower + 1, upper)
            pieces += [(lower, cut, size), (cut, upper, size)]
        else:
            below = draw.randrange(1, size)
            pieces += [(lower, upper, below), (lower, upper, size - below)]
    draw.shuffle(pieces)
    return [Block(*piece) for piece in pieces]


def _area(piece: tuple[int, int, int]) -> int:
    lower, upper, size = piece
    return (upper - lower) * size
