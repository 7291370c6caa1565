"""Builds the counting allocator at its first use, and keeps it for the next process."""

from __future__ import annotations

import atexit
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("counting.cpp")
FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared")
BUILD_LIMIT_S = 120


class BuildError(Exception):
    """The allocator cannot be built here. The message says why, in one line."""


def built_library(*, again: bool = False) -> Path:
    """Return the compiled allocator, building it if this version of it was never built for this PyTorch.

    It is kept in the directory POOCH_CACHE_DIRECTORY, or in the user's cache directory. Where those cannot be written,
    each process builds its own. Two processes that build it at the same time do not disturb one another.

    Args:
        again: Whether to build it even if it is there.

    Raises:
        BuildError: If there is no compiler, or it fails.
    """
    text = SOURCE.read_bytes()
    abi = str(torch._C._GLIBCXX_USE_CXX11_ABI)
    digest = hashlib.sha256(b"\0".join([text, torch.__version__.encode(), abi.encode(), *map(str.encode, FLAGS)]))
    name = f"cpu_allocator-{torch.__version__}-{digest.hexdigest()[:16]}.so"
    library = _cache_directory() / name
    if library.exists() and not again:
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        _build(library, abi)
    except OSError:
        library = _own_directory() / name
        _build(library, abi)
    return library


@cache
def _own_directory() -> Path:
    """A directory that goes with the process."""
    folder = tempfile.mkdtemp(prefix="pooch-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _cache_directory() -> Path:
    asked = os.environ.get("POOCH_CACHE_DIRECTORY")
    if asked:
        return Path(asked)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pooch-planner"


def _compiler() -> list[str]:
    asked = shlex.split(os.environ.get("CXX", ""))  # it may have arguments, as in "ccache g++"
    found = next(filter(None, map(shutil.which, asked[:1] or ("g++", "clang++"))), None)
    if found is None:
        raise BuildError(f"there is no {asked[0]}, the compiler in CXX" if asked else "there is no g++ and no clang++")
    return [found, *asked[1:]]


def _build(library: Path, abi: str) -> None:
    compiler = _compiler()
    torch_directory = Path(torch.__file__).parent
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            subprocess.run(
                [
                    *compiler, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(abi == 'True')}",
                    f"-I{torch_directory / 'include'}", str(SOURCE), "-o", str(made),
                    f"-L{torch_directory / 'lib'}", "-lc10",
                ],
                check=True, capture_output=True, text=True, timeout=BUILD_LIMIT_S,
            )  # fmt: skip
            made.replace(library)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise BuildError(f"{compiler[0]} failed: {first}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler[0]} took more than {BUILD_LIMIT_S} s") from error
