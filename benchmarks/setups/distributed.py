"""Two ranks on one machine, gradients averaged by gloo."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.setups.nets import conv_net, pictures
from benchmarks.setups.setup import setup
from benchmarks.setups.way import Way


@setup("DistributedDataParallel on two ranks, other data on each, two batches accumulated under no_sync", ranks=2)
def data_parallel(way: Way) -> None:
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(conv_net())
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(100 + rank)
    way.auto(model, optimizer)
    for _ in range(14):
        with model.no_sync():
            first = cross_entropy(model(pictures(8)), torch.randint(10, (8,)))
            first.backward()
        second = cross_entropy(model(pictures(8)), torch.randint(10, (8,)))
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.record.step(first, second)
    way.record.state("parameters", model)


@setup("DistributedDataParallel, Pooch given the model inside", ranks=2)
def data_parallel_inside(way: Way) -> None:
    rank = torch.distributed.get_rank()
    inside = conv_net()
    model = DistributedDataParallel(inside)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(100 + rank)
    way.auto(inside, optimizer)
    for _ in range(14):
        loss = cross_entropy(model(pictures(12)), torch.randint(10, (12,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.record.step(loss)
    way.record.state("parameters", model)
