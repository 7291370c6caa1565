"""The methods, each as a context in which a step of a workload runs under it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from benchmarks.offloading import saved_tensors_offloaded
from benchmarks.peers.workloads import PeerWorkload

Way = Callable[[], AbstractContextManager[Any]]
_ATEN = torch.ops.aten
_MATMULS = [_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default]
_CONVOLUTIONS = [_ATEN.convolution.default]
_SEGMENTS = 4


def _wrapped(modules: Sequence[nn.Module], context: Callable[[], Any] | None = None) -> Way:
    options: dict[str, Any] = {} if context is None else {"context_fn": context}

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    @contextmanager
    def way() -> Iterator[None]:
        for module in modules:
            module.forward = functools.partial(run, module.forward)
        try:
            yield
        finally:
            for module in modules:
                del module.forward

    return way


def _sequential(sequence: nn.Sequential) -> Way:
    forward = sequence.forward

    @contextmanager
    def way() -> Iterator[None]:
        def in_segments(x: torch.Tensor) -> Any:
            parts = [functools.partial(type(part).__call__, part) for part in sequence]
            return checkpoint_sequential(parts, _SEGMENTS, x, use_reentrant=False)  # type: ignore[arg-type]

        sequence.forward = in_segments  # type: ignore[method-assign]
        try:
            yield
        finally:
            sequence.forward = forward  # type: ignore[method-assign]

    return way


def _selective(operators: Sequence[Any]) -> Callable[[], Any]:
    return functools.partial(create_selective_checkpoint_contexts, list(operators))


def _switched(switch: Callable[[bool], None]) -> Way:
    @contextmanager
    def way() -> Iterator[None]:
        switch(True)
        try:
            yield
        finally:
            switch(False)

    return way


def ways(workload: PeerWorkload) -> dict[str, Way]:
    """Return the methods that apply to a workload, by name."""
    blocks = workload.blocks
    found: dict[str, Way] = {
        "plain": nullcontext,
        "checkpoint": _wrapped(blocks),
        "checkpoint-second": _wrapped(blocks[::2]),
    }
    if workload.stages:
        found["checkpoint-stage"] = _wrapped(workload.stages)
    if workload.sequence is not None:
        found["checkpoint-sequential"] = _sequential(workload.sequence)
    found["selective-matmul"] = _wrapped(blocks, _selective(_MATMULS))
    found["selective-matmul-convolution"] = _wrapped(blocks, _selective([*_MATMULS, *_CONVOLUTIONS]))
    if workload.switch is not None:
        found["switch"] = _switched(workload.switch)
    found["offload"] = lambda: saved_tensors_offloaded(workload.model)
    return found


MEANING = {
    "plain": "no method",
    "checkpoint": "`torch.utils.checkpoint` around each block",
    "checkpoint-second": "around every second block",
    "checkpoint-stage": "around each stage",
    "checkpoint-sequential": f"`checkpoint_sequential` with {_SEGMENTS} segments",
    "selective-matmul": "selective checkpointing of each block, matrix products kept",
    "selective-matmul-convolution": "the same, matrix products and convolutions kept",
    "switch": "the library's own checkpointing",
    "offload": "every saved tensor copied out and back, as TRL's `activation_offloading` does (here to a file)",
    "compile": "`torch.compile` with `activation_memory_budget`",
}
