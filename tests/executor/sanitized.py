"""Run tests with the package's C++ built under sanitizers, which end the process at the first wrong access.

python -m tests.executor.sanitized [PYTEST ARGUMENT ...]
python -m tests.executor.sanitized --module tests.executor.fuzz_native_watch [ARGUMENT ...]
python -m tests.executor.sanitized --threads

AddressSanitizer, UndefinedBehaviorSanitizer and the assertions of the C++ library look at all that the package builds
itself, in the processes that tests start as well. Python and PyTorch are as they were, but what they take and free is
known, each object of Python's by itself. `--threads` has ThreadSanitizer look at the thread that copies and at threads
that wait for it. These are threads of C++ alone: of most of what Python and PyTorch do, it would not know the order.

It needs g++ with libasan, libubsan and libtsan. What is built is kept in `build/sanitized`. Left out is what measures
the memory of a process: AddressSanitizer keeps for a while what was freed. All of it takes a quarter of an hour.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.children import ROOT

COMPILER = (
    "g++", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
    "-D_GLIBCXX_ASSERTIONS",
)  # fmt: skip
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so")  # loaded before all else
OPTIONS = {
    # Python and PyTorch let go of little at their end. That memory runs out is tried, and is no error.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "PYTHONMALLOC": "malloc",  # and not parts of large blocks, of which no sanitizer knows
    "OMP_NUM_THREADS": "1",
}
TESTS = tuple(
    f"tests/{name}.py"
    for name in (
        "executor/test_homes",
        "executor/test_native_calls",
        "executor/test_native_moves",
        "executor/test_native_replays",
        "executor/test_native_watch",
        "executor/test_native_watch_parts",
        "executor/test_packed_copies",
        "executor/test_two_threads",
        "packing/test_packing",
        "torchtools/test_copier",
        "torchtools/test_cpu_allocator",
        "torchtools/test_cpu_arena",
        "torchtools/test_cuda_arena",
    )
)
LEFT_OUT: tuple[str, ...] = ("takes_no_memory",)
COPIER = ROOT / "pooch/torchtools/copier"
THREADS = Path(__file__).with_name("copier_threads.cpp")


def _library(name: str) -> str:
    return subprocess.run(
        [COMPILER[0], f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def _environment() -> dict[str, str]:
    command = " ".join(COMPILER)
    folder = ROOT / "build/sanitized" / hashlib.sha256(command.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    preloaded = " ".join(map(_library, LIBRARIES))
    return {**os.environ, **OPTIONS, "CXX": command, "POOCH_CACHE_DIRECTORY": str(folder), "LD_PRELOAD": preloaded}


def copy_under_thread_sanitizer() -> int:
    """Build the threads that have copies made, run them, and return 0 if nothing was found."""
    with tempfile.TemporaryDirectory(prefix="pooch-sanitized-") as folder:
        made = Path(folder) / "copier_threads"
        flags = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{COPIER}"]
        subprocess.run([COMPILER[0], *flags, str(THREADS), "-o", str(made)], check=True)
        # Up to GCC 13, it cannot do with addresses that are as random as those of newer systems.
        return subprocess.run(["setarch", "-R", str(made)], check=False).returncode


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for, and return its exit code."""
    if list(arguments) == ["--threads"]:
        return copy_under_thread_sanitizer()
    if arguments[:1] == ["--module"]:
        command = ["-m", *arguments[1:]]
    else:
        chosen = arguments or ["-q", *TESTS, "-k", " and ".join(f"not {each}" for each in LEFT_OUT)]
        command = ["-m", "pytest", "-p", "no:cacheprovider", "--capture=sys", *chosen]  # what a sanitizer says is seen
    return subprocess.run([sys.executable, *command], env=_environment(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
