"""Parameters of classes that refuse functions which they do not know, and count those that they do."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import pooch
from pooch.torchtools.watch import LIBRARY

pytestmark = pytest.mark.skipif(LIBRARY.get() is None, reason="parameters leave only with what watches natively")
WIDTH = 256
ATTRIBUTES = frozenset({"__get__", "dim", "numel", "stride", "size"})  # which no such class refuses


class Strict(torch.Tensor):
    calls: ClassVar[Counter[str]] = Counter()
    is_strict = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in ATTRIBUTES:
            if cls.is_strict and name not in cls.calls:
                raise TypeError(f"{name} is not implemented for {cls.__name__}")
            cls.calls[name] += 1
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def trained(rows: int, share: str | None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    first = model[0]
    assert isinstance(first, nn.Linear)
    first.weight = nn.Parameter(first.weight.detach().as_subclass(Strict))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    auto = None if share is None else pooch.auto(model, share, optimizer, tell=lambda _: None)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(rows, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if auto is not None:
        auto.remove()
    return losses


@pytest.mark.parametrize("rows", [16, 1024])
def test_they_are_asked_nothing_by_pooch(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(Strict, "calls", Counter())
    expected = trained(rows, None)
    monkeypatch.setattr(Strict, "is_strict", True)
    counted = Counter(Strict.calls)
    assert trained(rows, "40%") == expected
    assert Strict.calls == counted + counted
