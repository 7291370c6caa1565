from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.executor.conftest import decide_on_everything, one_thread

__all__ = ["decide_on_everything", "one_thread"]


def state_of_the_process() -> tuple[object, ...]:
    """What a budget puts in place, wherever it may be seen."""
    engine_calls = (torch.autograd.graph._engine_run_backward, torch.autograd._engine_run_backward)
    return (
        *(function.__qualname__ for function in engine_calls),
        torch.autograd.profiler._prepare_profiler.__qualname__,
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
        torch._C._autograd._profiler_enabled(),
        torch.autograd.profiler._is_profiler_enabled,
        torch.utils._python_dispatch._is_in_torch_dispatch_mode,
        gc.isenabled(),
        len(torch.nn.modules.module._global_forward_pre_hooks),
        len(torch.nn.modules.module._global_forward_hooks),
    )


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """After each test the process is as before it."""
    before = state_of_the_process()
    yield
    assert state_of_the_process() == before
