"""A 3D network of MONAI within a budget, validated window by window in between: one line."""

from __future__ import annotations

import pooch_planner as pooch
import torch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.networks.nets import UNet


def main() -> None:
    """Train on random volumes."""
    torch.manual_seed(0)
    model = UNet(3, 1, 2, channels=(16, 32, 64), strides=(2, 2), num_res_units=2)
    optimizer, criterion = torch.optim.AdamW(model.parameters()), DiceCELoss(to_onehot_y=True, softmax=True)

    auto = pooch.auto(model, "70MiB", optimizer)
    for step in range(6):
        volumes = torch.randn(1, 1, 40, 40, 40)
        loss = criterion(model(volumes), (volumes > 0).float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                found = sliding_window_inference(torch.randn(1, 1, 40, 40, 64), (40, 40, 40), 1, model)
            print(f"loss {loss.item():.4f}, validated {tuple(found.shape)}")
            model.train()
    print(auto.summary())
    auto.remove()


if __name__ == "__main__":
    main()
