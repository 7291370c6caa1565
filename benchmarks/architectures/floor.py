"""The smallest budget that any way of training within a budget could hold: what the largest single operator needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.architectures.network import Arguments, Network
from benchmarks.setups.counting import LiveBytes


class Needs(TorchDispatchMode):
    """Notes what each operator needs at once: the storages that it reads, and what it adds while it runs.

    Args:
        counter: of live bytes.
        staying: the sizes of storages that the script holds, by address: they are there whatever runs.
        ignored: a part of the names of operators that are left out; "" for none.
    """

    def __init__(self, counter: LiveBytes, staying: dict[int, int], ignored: str = "") -> None:
        super().__init__()
        self._counter, self._staying, self._ignored = counter, staying, ignored
        self.most_bytes, self.operator = 0, ""

    def begin(self) -> None:
        """Forget what came before: data that were made, for one."""
        self.most_bytes, self.operator = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = self._staying | dict(_storages(tree_leaves((args, kwargs))))
        self._counter.begin_peak()
        live_bytes = self._counter.live_bytes
        result = func(*args, **(kwargs or {}))
        needed_bytes = sum(there.values()) + self._counter.peak_bytes - live_bytes
        is_ignored = bool(self._ignored) and self._ignored in str(func)
        if needed_bytes > self.most_bytes and not is_ignored:
            self.most_bytes, self.operator = needed_bytes, str(func)
        return result


def _storages(values: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Address and size of the storage of each tensor."""
    for value in values:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()


def largest_need(network: Network, arguments: Arguments, counter: LiveBytes) -> tuple[int, str]:
    """Bytes that the operator of a step needs which needs most, beside the arguments of the call, and its name."""
    staying = dict(_storages(tree_leaves(arguments)))
    with Needs(counter, staying) as needs:
        network.step_loss(arguments).backward()
    return needs.most_bytes, needs.operator
