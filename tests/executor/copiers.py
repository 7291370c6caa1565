"""What copies to spill files: a thread of C++ or one of Python. Both have to do the same, also under faults."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from pooch.torchtools import copier

THROUGH_PYTHON = Path(__file__).with_name("copier_through_python.cpp")


@cache
def through_python() -> ModuleType:
    """The thread of C++, built so that it calls `os.pwrite` and `os.preadv`, in whose places tests put others."""
    return copier.loaded(copier.built_library(THROUGH_PYTHON))


def copy_through_python() -> None:
    """Use it from now on in this process, unless its environment asks for a thread of Python."""
    if copier.LIBRARY.get() is not None:
        copier.LIBRARY.loaded = through_python()


def copy_threads() -> int:
    """How many threads copy, of either kind."""
    native = sum(each.read_text() == "pooch-copy\n" for each in Path("/proc/self/task").glob("*/comm"))
    return native + sum(thread.name == "pooch-copy" for thread in threading.enumerate())


def use_copier(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines that are made from now on copy by a thread of one kind, and child processes as well.

    Args:
        which: "native", "through Python" or "Python".
        monkeypatch: Undoes that.
    """
    found = copier.LIBRARY.get()  # first: what is put in its place ends with "nothing was loaded" otherwise, for good
    if which != "Python" and found is None:
        pytest.skip(f"no native thread that copies: {copier.LIBRARY.why_not}")
    monkeypatch.setenv(copier.VARIABLE, "0" if which == "Python" else "1")
    if which != "native":
        monkeypatch.setattr(copier.LIBRARY, "loaded", through_python() if which == "through Python" else None)
