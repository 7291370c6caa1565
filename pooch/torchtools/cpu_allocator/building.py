"""Builds the allocator against the PyTorch that is installed."""

from __future__ import annotations

from pathlib import Path

import torch

from ... import native

SOURCE = Path(__file__).with_name("allocator.cpp")
HEADERS = (Path(__file__).with_name("arena.h"), Path(__file__).parents[1] / "placement.h")


def built_library(*, again: bool = False) -> Path:
    """Return the compiled allocator, building it if this version of it was never built for this PyTorch.

    Args:
        again: Whether to build it even if it is there.

    Raises:
        BuildError: If there is no compiler, or it fails.
    """
    folder = Path(torch.__file__).parent
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return native.built_library(
        f"cpu_allocator-{torch.__version__}",
        SOURCE,
        headers=HEADERS,
        compile_flags=[f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{folder / 'include'}"],
        link_flags=[f"-L{folder / 'lib'}", "-lc10"],
        again=again,
    )
