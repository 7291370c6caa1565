"""Builds the counting allocator at its first use, and keeps it for the next process."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("counting.cpp")
FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared")
BUILD_LIMIT_S = 120


class BuildError(Exception):
    """The allocator cannot be built here. The message says why, in one line."""


def built_library() -> Path:
    """Return the compiled allocator, building it if this version of it was never built for this PyTorch.

    It is kept in the directory POOCH_CACHE_DIRECTORY, or in the user's cache directory. Two processes that build it at
    the same time do not disturb one another.

    Raises:
        BuildError: If there is no compiler, or it fails.
    """
    text = SOURCE.read_bytes()
    abi = str(torch._C._GLIBCXX_USE_CXX11_ABI)
    digest = hashlib.sha256(b"\0".join([text, torch.__version__.encode(), abi.encode(), *map(str.encode, FLAGS)]))
    library = _cache_directory() / f"cpu_allocator-{torch.__version__}-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        _build(library, abi)
    return library


def _cache_directory() -> Path:
    asked = os.environ.get("POOCH_CACHE_DIRECTORY")
    if asked:
        return Path(asked)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pooch-planner"


def _build(library: Path, abi: str) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("there is no C++ compiler (g++ or clang++)")
    torch_directory = Path(torch.__file__).parent
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            subprocess.run(
                [
                    compiler, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(abi == 'True')}",
                    f"-I{torch_directory / 'include'}", str(SOURCE), "-o", str(made),
                    f"-L{torch_directory / 'lib'}", "-lc10",
                ],
                check=True, capture_output=True, text=True, timeout=BUILD_LIMIT_S,
            )  # fmt: skip
            made.replace(library)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        raise BuildError(f"{compiler} failed: {(lines or error.stderr.splitlines() or ['no message'])[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"it could not be built in {library.parent}: {error}") from error
