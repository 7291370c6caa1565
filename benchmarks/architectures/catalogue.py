"""All networks of the sweep, by package. A package that is missing has none."""

from __future__ import annotations

import importlib
import importlib.util

from benchmarks.architectures.network import Network

PACKAGES = (
    "transformers", "monai", "diffusers", "timm", "vit_pytorch", "x_transformers", "torch_geometric", "others",
    "own_backward",
)  # fmt: skip


def is_there(package: str) -> bool:
    """Whether a package is installed; of smaller ones, each is looked for by itself."""
    return package in ("others", "own_backward") or importlib.util.find_spec(package) is not None


def names_of(package: str) -> list[str]:
    """The networks of a package, such as "monai/UNet", those that are to be tried first in front."""
    return [f"{package}/{name}" for name in _module(package).names()]


def network_of(name: str) -> Network:
    """Make a network with random weights."""
    package, _, own_name = name.partition("/")
    network: Network = _module(package).network(own_name)
    return network


def _module(package: str) -> object:
    return importlib.import_module(f"benchmarks.architectures.with_{package}")
