"""A script that knows nothing of Pooch, with parameters sharded over the ranks by FSDP2.

Run it with `torchrun --nproc-per-node 2 -m pooch exec --budget 60% examples/fully_sharded.py`. Without `torchrun`, it
trains as the only rank.
"""

from __future__ import annotations

import os

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Train on noise of this rank's own."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(rank)
    for step in range(8):
        loss = model(torch.randn(1024, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank}, step {step}: loss {loss.item().hex()}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
