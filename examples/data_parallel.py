"""Two ranks of data parallel training under a budget each: `python examples/data_parallel.py`.

On a machine with several GPUs, `torchrun` starts the ranks, and the model moves to the rank's GPU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pooch_planner as pooch
import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def train(rank: int, store: str) -> None:
    """Train on data of this rank's own."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*blocks))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(rank)
    with pooch.auto(model, "60%", host_budget="64MiB") as auto:  # each rank may take half of the 64 MiB of swap tier
        for _ in range(8):
            loss = model(torch.randn(1024, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"rank {rank}: loss {loss.item():.4f}\n{auto.summary()}")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, (f"file://{Path(folder, 'store')}",), nprocs=RANKS)
