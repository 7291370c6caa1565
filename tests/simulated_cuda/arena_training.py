"""Trains a small net whose activations a second stream copies out, and writes what came of it as JSON.

python -m tests.simulated_cuda.arena_training caching|arena
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import numpy as np
import torch

from pooch.allocation import blocks_of, common_step
from pooch.packing import pack
from pooch.torchtools.cuda_allocator import CudaArena, cuda_arena
from tests.simulated_cuda.mistakes import is_simulated, take_mistakes

STEPS, RECORDED = 8, 2


class Training:
    """The net, with the losses and the sums of what was copied out."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
        self.model = torch.nn.Sequential(*blocks).cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.data = torch.randn(256, 64).cuda()
        self.side = torch.cuda.Stream()
        self.found: list[list[float]] = []

    def step(self) -> None:
        hidden = self.model[0](self.data)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            copy = hidden.detach().to("cpu", non_blocking=True)
        hidden.record_stream(self.side)
        del hidden  # its memory is free while the copy may still run
        loss = self.model(self.data).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.side.synchronize()
        self.found.append([loss.item(), float(copy.sum())])


def train_on(arena: CudaArena) -> dict[str, object]:
    """Record steps after the first, and serve the rest."""
    training = Training()
    stream = torch.cuda.current_stream().cuda_stream
    training.step()
    steps = []
    for _ in range(RECORDED):
        arena.record(0, stream)
        training.step()
        steps.append(arena.recorded())
    common = common_step(*steps)
    assert common is not None
    blocks = blocks_of(common, alignment_bytes=512)
    layout = pack(list(blocks.values()), time_limit_s=1)
    offsets, rooms = np.full_like(common.sizes, -1), np.zeros_like(common.sizes)
    offsets[list(blocks)] = layout.offsets
    rooms[list(blocks)] = [block.size_bytes for block in blocks.values()]
    assert arena.serve(0, stream, common.sizes, offsets, rooms, layout.arena_bytes)
    for _ in range(STEPS - 1 - RECORDED):
        assert arena.begin_step(stream)
        training.step()
    return {"found": training.found, "counters": asdict(arena.counters()), "blocks": len(blocks)}


def main() -> None:
    """Train."""
    if sys.argv[1] == "arena":
        arena = cuda_arena()
        assert isinstance(arena, CudaArena), arena
        arena.install()
        result = train_on(arena)
    else:
        training = Training()
        for _ in range(STEPS):
            training.step()
        result = {"found": training.found}
    sys.stdout.write(json.dumps(result | {"mistakes": take_mistakes() if is_simulated() else []}) + "\n")


if __name__ == "__main__":
    main()
