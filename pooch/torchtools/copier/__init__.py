"""A thread of C++ that copies storages to and from files. It never takes the interpreter's lock.

A thread of Python needs that lock for every copy, while the thread that trains holds it: each of them then waits for
the other at each of many small copies. Where this cannot be built, a thread of Python does the same work.
"""

from __future__ import annotations

import errno
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

from ...ground import native
from ...ground.errors import TierError
from ..spill_directory import CHANGED
from ..tensors import memory_address

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "copier.cpp"
HEADERS = (FOLDER / "bits.h", FOLDER / "checksum.h", FOLDER / "thread.h")
VARIABLE = "POOCH_NATIVE_COPIES"  # "0": a thread of Python copies
LEAST_PACKED_BYTES = 4096  # less than that is a page of the file anyway
_WORTH_PACKING = 4  # times fewer bytes, of what is told to pack
PACKING = "POOCH_PACKED_COPIES"  # "0": copies move masks and constants byte by byte

TOOK_NOTHING = (errno.EIO, "the spill file took no bytes")
ENDED_EARLY = (errno.EIO, "the spill file ended early")
OTHER_BYTES = (CHANGED, "the spill file gave back other bytes than were written to it")


def _wanted() -> ModuleType | None:
    return None if os.environ.get(VARIABLE) == "0" else loaded(built_library())


# What watches steps is built from the same compiler, and says so in one line where there is none.
LIBRARY = native.Extension(_wanted)


def is_packed(storage: torch.UntypedStorage) -> bool:
    """Whether copies move a small part of the bytes that a storage on the CPU has now: a mask, or all the same."""
    module = LIBRARY.get()
    if module is None or not packs_copies():
        return False
    packed_bytes: int = module.packed_bytes(memory_address(storage), storage.nbytes())
    return packed_bytes <= storage.nbytes() // _WORTH_PACKING


def packs_copies() -> bool:
    """Whether the thread of C++ packs masks and constants."""
    return os.environ.get(PACKING) != "0"


def built_library(source: Path = SOURCE) -> Path:
    """Return the compiled library, building it if this version of it was never built for this Python.

    Args:
        source: The C++ file.

    Raises:
        BuildError: If there is no compiler, or it fails.
    """
    include = sysconfig.get_paths()["include"]
    return native.built_library(
        f"copier-{sys.implementation.cache_tag}",
        source,
        headers=(SOURCE, *HEADERS),
        compile_flags=["-fvisibility=hidden", "-pthread", f"-I{include}", f"-I{FOLDER}"],
    )


def loaded(library: Path) -> ModuleType:
    """Load the module from a compiled library."""
    module = native.loaded_module("copier", library)
    module.use(_failed, memory_address)
    return module


def no_buffer(size_bytes: int, error: OSError) -> TierError:
    """Return what is told where there is no memory for a copy buffer."""
    return TierError(f"no {size_bytes} bytes of host memory for a copy buffer ({error.strerror}): free some memory")


def has_died() -> TierError:
    """Return what is told of a copy whose thread is gone."""
    return TierError("the thread that copies has died: repeat the step", "thread")


def _failed(failure: int, code: int) -> Exception:
    """Return the error of a copy. The numbers are those of `Failure` in `thread.h`."""
    match failure:
        case 2:
            return OSError(*TOOK_NOTHING)
        case 3:
            return OSError(*ENDED_EARLY)
        case 4:
            return OSError(*OTHER_BYTES)
        case 5:
            return has_died()
        case 6:
            return no_buffer(code, OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    return OSError(code, os.strerror(code))
