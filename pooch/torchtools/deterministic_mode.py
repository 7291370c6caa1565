"""PyTorch's deterministic algorithms for a while, and the operators that have none."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_settings: Any = torch.utils.deterministic
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NO_DETERMINISTIC = re.compile(r"^(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic_algorithms() -> Iterator[list[str]]:
    """Inside, every operator takes a deterministic algorithm where it has one; everything is put back at the end.

    The list that is given names the operators that were used and have none, once the block has ended. cuBLAS reads its
    variable when it is first used, so a process that has computed on a GPU before keeps cuBLAS as it was.
    """
    restore = _remembered()
    operators: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            use_deterministic_algorithms()
            yield operators
        finally:
            restore()
    for warning in told:
        found = _NO_DETERMINISTIC.match(str(warning.message))
        if found is None:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        elif found.group(1) not in operators:
            operators.append(found.group(1))


def use_deterministic_algorithms() -> None:
    """Ask PyTorch, cuDNN and cuBLAS for deterministic algorithms; operators without one warn."""
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    _settings.fill_uninitialized_memory = False  # it costs time, and changes no number that is read
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def _remembered() -> Callable[[], None]:
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill = _settings.fill_uninitialized_memory
    cudnn = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    workspace = os.environ.get(_WORKSPACE)

    def restore() -> None:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        _settings.fill_uninitialized_memory = fill
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
        else:
            os.environ[_WORKSPACE] = workspace

    return restore
