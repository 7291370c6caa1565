"""Workspaces of cuBLAS, which no fake tensor shows: each thread that calls it takes one, and keeps it."""

from __future__ import annotations

import os
import re

from pooch.profiler.assembly import StepAssembly
from pooch.units import format_bytes

_PRODUCTS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr", "_scaled_mm", "_addmm_activation")
)
_ENTRY = re.compile(r":([0-9]+):([0-9]+)")


def configured_bytes(otherwise: int) -> int:
    """Size of one workspace, as PyTorch reads `CUBLAS_WORKSPACE_CONFIG` (":KiB:count", any number of them).

    Args:
        otherwise: where it is not set, or says nothing.
    """
    entries = _ENTRY.findall(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(kib) * 1024 * int(count) for kib, count in entries) if entries else otherwise


def blas_workspaces(assembly: StepAssembly) -> int:
    """How many a step has: one for the forward pass and one for autograd's own thread, each where it multiplies
    matrices.
    """
    spans = assembly.spans[assembly.forward_ops : -1]
    names = ([op.name for op in assembly.recorder.ops], [span.name for span in spans])
    return sum(any(_is_product(name) for name in of_pass) for of_pass in names)


def _is_product(name: str) -> bool:
    """Whether an operator, as "aten.mm.default" or "aten::mm", is one of cuBLAS's."""
    return name.replace("::", ".").split(".")[1] in _PRODUCTS


def told(count: int, each_bytes: int) -> tuple[str, ...]:
    """A note for the profile's reader, where there are any."""
    if count * each_bytes == 0:
        return ()
    threads = "the program's thread and autograd's" if count == 2 else "one thread"
    text = f"{count} cuBLAS workspaces of {format_bytes(each_bytes)} ({threads})"
    return (f"modelled: {text} counted as persistent bytes",)
