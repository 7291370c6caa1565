"""Builds the allocator against the PyTorch that is installed."""

from __future__ import annotations

from pathlib import Path

import torch

from ...ground import native

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "allocator.cpp"
HEADERS = (*(FOLDER / f"{name}.h" for name in ("arena", "blocks", "step_trace")), FOLDER.parent / "placement.h")
OBSERVER = FOLDER / "observer.cpp"


def built_library(*, again: bool = False) -> Path:
    """Return the compiled allocator, building it if this version of it was never built for this PyTorch.

    Args:
        again: Whether to build it even if it is there.

    Raises:
        BuildError: If there is no compiler, or it fails.
    """
    return _built("cpu_allocator", SOURCE, HEADERS, ["-lc10"], again)


def built_observer(*, again: bool = False) -> Path:
    """Return the compiled observer of operators in the same way.

    Args:
        again: Whether to build it even if it is there.

    Raises:
        BuildError: If there is no compiler, or it fails.
    """
    return _built("cpu_observer", OBSERVER, (), ["-ltorch_cpu", "-lc10"], again)


def _built(name: str, source: Path, headers: tuple[Path, ...], libraries: list[str], again: bool) -> Path:
    folder = Path(torch.__file__).parent
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return native.built_library(
        f"{name}-{torch.__version__}",
        source,
        headers=headers,
        compile_flags=[f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{folder / 'include'}"],
        link_flags=[f"-L{folder / 'lib'}", *libraries],
        again=again,
    )
