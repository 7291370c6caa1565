"""Networks whose classes and arguments are written down, one for each name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures.network import Network, mean_square

Build = Callable[[], Network]


def randn(*shape: int) -> Callable[[int], tuple[Tensor]]:
    """A batch of one tensor of normal numbers; the first axis counts samples."""
    return lambda size: (torch.randn(size, *shape),)


def tokens(count: int, words: int) -> Callable[[int], tuple[Tensor]]:
    """A batch of texts."""
    return lambda size: (torch.randint(words, (size, count)),)


def several(*batches: Callable[[int], tuple[Tensor]]) -> Callable[[int], tuple[Tensor, ...]]:
    """A batch with the tensors of several."""
    return lambda size: tuple(tensor for batch in batches for tensor in batch(size))


class Table:
    """Networks of a package by name."""

    def __init__(self) -> None:
        self._builds: dict[str, Build] = {}

    def add(
        self,
        path: str,
        batch: Callable[[int], Any],
        *,
        name: str | None = None,
        loss: Callable[[Any], Tensor] = mean_square,
        **options: Any,
    ) -> None:
        """A class of a module, called with options.

        Args:
            path: such as "monai.networks.nets.UNet".
            batch: arguments of the model's calls.
            name: of the network. None: that of the class.
            loss: of what a call returns.
            options: of the class.
        """
        module, _, class_name = path.rpartition(".")

        def build() -> Network:
            made: nn.Module = getattr(importlib.import_module(module), class_name)(**options)
            return Network(made.train(), batch, loss)

        self._builds[name or class_name] = build

    def build(self, build: Build) -> Build:
        """A function that makes the network of its name."""
        self._builds[build.__name__.replace("_", "-")] = build
        return build

    def names(self) -> list[str]:
        return list(self._builds)

    def network(self, name: str) -> Network:
        return self._builds[name]()

    def update(self, others: Mapping[str, Build]) -> None:
        self._builds.update(others)


class OptionalTable(Table):
    """Networks of several packages, each of which may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self._needs: dict[str, str] = {}

    def needs(self, package: str, name: str) -> Callable[[Build], Build]:
        """A function that makes a network of a package."""

        def registered(build: Build) -> Build:
            self.update({f"{package}-{name}": build})
            self._needs[f"{package}-{name}"] = package
            return build

        return registered

    def names(self) -> list[str]:
        """Those whose package is installed."""
        return [name for name in super().names() if importlib.util.find_spec(self._needs[name]) is not None]
