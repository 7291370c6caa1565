"""Workspaces of cuBLAS, which fake tensors do not show: each thread that calls cuBLAS allocates one and keeps it."""

from __future__ import annotations

import os
import re

from ...ground.units import format_bytes
from ..slots import StepAssembly

_PRODUCTS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr", "_scaled_mm", "_addmm_activation")
)
_ENTRY = re.compile(r":([0-9]+):([0-9]+)")


def configured_bytes(otherwise: int) -> int:
    """Returns the size of one workspace, as PyTorch reads `CUBLAS_WORKSPACE_CONFIG` (":KiB:count", one or more).

    It is `otherwise` if the variable is not set or contains no entry.
    """
    entries = _ENTRY.findall(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(kib) * 1024 * int(count) for kib, count in entries) if entries else otherwise


def blas_workspaces(assembly: StepAssembly) -> int:
    """Returns how many workspaces a step has: one for the forward pass and one for autograd's own thread, if the pass
    multiplies matrices.
    """
    spans = assembly.spans[assembly.forward_ops : -1]
    names = ([op.name for op in assembly.recorder.ops], [span.name for span in spans])
    return sum(any(_is_product(name) for name in of_pass) for of_pass in names)


def _is_product(name: str) -> bool:
    """Returns whether an operator, such as "aten.mm.default" or "aten::mm", calls cuBLAS."""
    return name.replace("::", ".").split(".")[1] in _PRODUCTS


def workspace_notes(count: int, each_bytes: int) -> tuple[str, ...]:
    """Returns a note for the reader of the profile if there are any workspaces."""
    if count * each_bytes == 0:
        return ()
    threads = "the program's thread and autograd's" if count == 2 else "one thread"
    note = f"modelled: {count} cuBLAS workspaces of {format_bytes(each_bytes)} ({threads}) counted as persistent bytes"
    return (note,)
