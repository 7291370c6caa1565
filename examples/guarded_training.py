"""A guard repeats a step that ran out of memory, under a tighter plan, with the same numbers."""

from __future__ import annotations

import pooch_planner as pooch
import torch


def main() -> None:
    """Train; in the third step something else takes the memory, as another process on the card would."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(10)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(2048, 256)
    failures = iter((False, False, True))

    def forward() -> torch.Tensor:
        loss = model(inputs).square().mean()
        if next(failures, False):
            raise torch.OutOfMemoryError("another process took the memory")
        return loss

    profile = pooch.profile(lambda: model(inputs).square().mean(), model, optimizer)
    with pooch.guard(profile, "80%", model, optimizer) as guard:
        for _ in range(5):
            loss = guard.step(forward)
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss {loss.item():.6f}")
    for repair in guard.repairs:
        print(repair)


if __name__ == "__main__":
    main()
