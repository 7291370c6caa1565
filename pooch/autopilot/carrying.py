"""Batches of a program that computes on the host, for a model that a budget has moved to a device.

A model that is called with tensors on the host alone gets copies of them on its device, and what it returns is copied
back, so that a loss is computed where its targets are. A program that moves one of its tensors moves all it has to.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Carrier:
    """Copies what a model is called with to its device, and what it returns back, in any nesting."""

    device: torch.device

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function with arguments on the device."""
        if not self._are_on_the_host((args, kwargs)):
            return function(*args, **kwargs)
        args, kwargs = _on(self.device, (args, kwargs))
        return _on(torch.device("cpu"), function(*args, **kwargs))

    def _are_on_the_host(self, arguments: Any) -> bool:
        """Whether there are tensors, and all of them are on the host. PyTorch takes single numbers from anywhere."""
        found = [each for each in pytree.tree_leaves(_opened(arguments)) if isinstance(each, torch.Tensor)]
        devices = {tensor.device.type for tensor in found if tensor.dim()}
        return devices == {"cpu"} and self.device.type != "cpu"


def _opened(tree: Any) -> Any:
    """The same with dictionaries in place of their wrappers, such as the batches of a tokenizer."""
    return pytree.tree_map(lambda each: each.data if isinstance(each, UserDict) else each, tree)


def _on(device: torch.device, tree: Any) -> Any:
    def moved(each: Any) -> Any:
        if isinstance(each, torch.Tensor):
            return each.to(device)
        if isinstance(each, PackedSequence):
            packed: Any = each
            return packed.to(device)
        if isinstance(each, UserDict):
            changed = copy.copy(each)
            changed.data = _on(device, each.data)
            return changed
        return each

    return pytree.tree_map(moved, tree, is_leaf=lambda each: isinstance(each, PackedSequence))
