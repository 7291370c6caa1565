"""Workspaces of cuBLAS, which fake tensors do not show: each thread that calls cuBLAS allocates one and keeps it.

Up to PyTorch 2.11, cuBLASLt, which adds a bias to a product, has one of its own beside it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch

from ...ground.units import format_bytes
from ..slots import StepAssembly

_PRODUCTS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr", "_scaled_mm", "_addmm_activation")
)
_WITH_BIAS = frozenset(("addmm", "_addmm_activation", "_scaled_mm"))
_ENTRY = re.compile(r":([0-9]+):([0-9]+)")


def configured_bytes(otherwise: int) -> int:
    """Returns the size of one workspace, as PyTorch reads `CUBLAS_WORKSPACE_CONFIG` (":KiB:count", one or more).

    It is `otherwise` if the variable is not set or contains no entry.
    """
    entries = _ENTRY.findall(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(kib) * 1024 * int(count) for kib, count in entries) if entries else otherwise


def separate_bytes() -> int:
    """Returns the size of cuBLASLt's own workspace, as PyTorch reads its environment; 0 if it uses that of cuBLAS."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    shares = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0" if (major, minor) < (2, 12) else "1")
    size_kib = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return 0 if shares == "1" else 1024 * int(size_kib if size_kib.isdecimal() else 1024)


@dataclass(frozen=True, slots=True)
class Workspaces:
    """Which workspaces a step has, and their sizes.

    Attributes:
        count: How many of cuBLAS: one for the forward pass and one for autograd's own thread, if the pass multiplies
            matrices.
        each_bytes: Size of one.
        separate_count: How many of cuBLASLt.
        separate_bytes: Size of one.
    """

    count: int
    each_bytes: int
    separate_count: int
    separate_bytes: int

    @property
    def total_bytes(self) -> int:
        """Size of all."""
        return self.count * self.each_bytes + self.separate_count * self.separate_bytes

    def notes(self) -> tuple[str, ...]:
        """Returns notes for the reader of the profile on those that there are."""
        kinds = (("cuBLAS", self.count, self.each_bytes), ("cuBLASLt", self.separate_count, self.separate_bytes))
        return tuple(_note(*kind) for kind in kinds if kind[1] * kind[2])


def workspaces(assembly: StepAssembly, each_bytes: int, lt_bytes: int) -> Workspaces:
    """Returns the workspaces of a step."""
    spans = assembly.spans[assembly.forward_ops : -1]
    passes = ([op.name for op in assembly.recorder.ops], [span.name for span in spans])
    counts = [sum(any(_base(name) in kind for name in names) for names in passes) for kind in (_PRODUCTS, _WITH_BIAS)]
    return Workspaces(counts[0], each_bytes, counts[1], lt_bytes)


def _base(name: str) -> str:
    """Returns the base name of an operator, such as "aten.mm.default" or "aten::mm"."""
    return name.replace("::", ".").split(".")[1]


def _note(library: str, count: int, each_bytes: int) -> str:
    threads = "the program's thread and autograd's" if count == 2 else "one thread"
    kind = f"{library} workspaces of {format_bytes(each_bytes)}"
    return f"modelled: {count} {kind} ({threads}) counted as persistent bytes"
