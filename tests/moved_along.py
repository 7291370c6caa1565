"""A model whose forward pass moves a teacher along."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MovedAlong(nn.Module):
    """A teacher that each forward pass moves towards its student, and a centre that it moves as well."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.student, self.teacher, self.how = nn.Linear(width, width), nn.Linear(width, width), how
        self.teacher.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(width))

    @torch.no_grad()
    def move(self) -> None:
        for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if self.how == "in place":
                mine.mul_(0.9).add_(theirs, alpha=0.1)
            else:
                mine.data = mine.data * 0.9 + theirs.data * 0.1
        assert isinstance(self.centre, Tensor)
        self.centre.data = self.centre.data + 1

    def forward(self, rows: Tensor) -> Tensor:
        self.move()
        return (self.student(rows) - self.teacher(rows) - self.centre).square().mean()
