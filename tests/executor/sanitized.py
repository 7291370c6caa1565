"""Run the tests of homes with the native watch built under AddressSanitizer, which ends at the first wrong access.

python -m tests.executor.sanitized [PYTEST ARGUMENT ...]

It needs g++ and its libasan. What starts processes of its own or compiles is left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import pytest

from pooch.ground import native

_FLAGS = ("-O1", "-g", "-fsanitize=address", "-fno-omit-frame-pointer")
_INSIDE = "POOCH_TESTS_SANITIZED"
_DEFAULTS = ("-q", "-x", "tests/executor/test_homes.py", "-k", "not compile and not queue")


def _library(name: str) -> str:
    return subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def main(arguments: Sequence[str]) -> int:
    """Run the tests in a process that has loaded the sanitizer before all else."""
    if _INSIDE in os.environ:
        native.FLAGS = (*(flag for flag in native.FLAGS if flag != "-O2"), *_FLAGS)
        return int(pytest.main([*(arguments or _DEFAULTS), "-p", "no:cacheprovider"]))
    with tempfile.TemporaryDirectory(prefix="pooch-sanitized-") as folder:
        environment = {
            **os.environ,
            _INSIDE: "1",
            "POOCH_CACHE_DIRECTORY": folder,
            "LD_PRELOAD": f"{_library('libasan.so')} {_library('libstdc++.so')}",
            "ASAN_OPTIONS": "detect_leaks=0",
        }
        command = [sys.executable, "-m", "tests.executor.sanitized", *arguments]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
