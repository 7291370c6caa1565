"""Training on an arena, with or without a plan."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..ground.errors import UsageError

if TYPE_CHECKING:
    import torch

    from ..allocation import ArenaOptions, StepArena
    from ..torchtools.cpu_allocator.arena_stats import ArenaStats


def arena_for(model: torch.nn.Module, options: ArenaOptions | None = None) -> StepArena | None:
    """Return an arena for a model's steps. Where there is none, one warning says why.

    Raises:
        UsageError: this process trains on an arena already.
    """
    from ..allocation import ArenaOptions, open_arena
    from ..torchtools.training_state import model_device

    found = open_arena(model_device(model), options or ArenaOptions())
    if isinstance(found, str):
        warnings.warn(f"no arena ({found}): training goes on without", stacklevel=3)
        return None
    return found


class PlainArena:
    """Plain training on an arena. Made by `arena`; a context manager."""

    def __init__(self, model: torch.nn.Module, options: ArenaOptions | None = None) -> None:
        from ..torchtools.calls import CallRegion, refuse_taken

        refuse_taken(model)
        self._memory = arena_for(model, options)
        self._calls = threading.local()
        self._placed = None if self._memory is None else CallRegion(model, self._call, "arena")

    @property
    def stats(self) -> ArenaStats | None:
        """What is known about the arena; None where there is none."""
        return None if self._memory is None else self._memory.stats

    def wait(self) -> None:
        """Wait until the steps that were recorded are packed, for measurements. Training need not wait."""
        if self._memory is not None:
            self._memory.wait()

    @contextmanager
    def _call(self) -> Iterator[None]:
        import torch

        is_inner = getattr(self._calls, "is_inside", False)
        if self._memory is not None and not is_inner and torch.is_grad_enabled():
            self._memory.begin_step()
        self._calls.is_inside = True
        try:
            yield
        finally:
            self._calls.is_inside = is_inner

    def remove(self) -> None:
        """End it. Tensors that live in the arena stay valid."""
        if self._placed is not None:
            self._placed.remove()
        if self._memory is not None:
            self._memory.close()

    def __repr__(self) -> str:
        return f"PlainArena({'none' if self.stats is None else self.stats.line()})"

    def __enter__(self) -> PlainArena:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def arena(model: torch.nn.Module) -> PlainArena:
    """Train a model plainly, with the memory of its steps from one arena.

    The first steps are recorded and their blocks packed; the steps that follow get the same memory again and again. A
    step begins with each call of the model with gradients enabled, and lasts until the next. Whatever differs from the
    recorded step gets memory as it always did, so results are the same bits in any case. To train under a plan, use
    `pooch.apply(plan, model, arena=True)` instead.

    On a CUDA device, `install_cuda_arena` has to be called first.

    Args:
        model: the model.

    Raises:
        UsageError: the model is compiled, under a plan or on an arena already, or another model of this process is.
    """
    return PlainArena(model)


def install_cuda_arena() -> None:
    """Make Pooch's allocator the one that PyTorch uses on CUDA devices, in this process and for good.

    Call it at the beginning of the program, before anything is on a GPU: PyTorch cannot change its allocator later.
    `pooch.apply(plan, model, arena=True)` and `pooch.arena(model)` then serve steps from an arena. PyTorch has no
    memory counters for other allocators: `torch.cuda.memory_allocated()` raises, and Pooch counts itself.

    Raises:
        UsageError: something is on a GPU already, this PyTorch has no CUDA, or there is no compiler.
    """
    from ..torchtools.cuda_allocator import cuda_arena

    found = cuda_arena()
    if isinstance(found, str):
        raise UsageError(f"the CUDA allocator cannot be built ({found}): install g++, or train without an arena")
    found.install()
