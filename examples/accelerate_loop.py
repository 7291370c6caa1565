"""Accelerate within a budget: `pooch.auto` on what `prepare` returned, and nothing else changes."""

from __future__ import annotations

import pooch_planner as pooch
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train in bf16 with accumulation; the last batch is smaller."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(10)])
    optimizer = torch.optim.AdamW(model.parameters())
    data = DataLoader(TensorDataset(torch.randn(9000, 512)), batch_size=2048)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    auto = pooch.auto(model, "96MiB", optimizer)
    for _ in range(3):
        for (inputs,) in data:
            with accelerator.accumulate(model):
                loss = model(inputs).float().square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    print(auto.summary())
    auto.remove()


if __name__ == "__main__":
    main()
