"""The package's C++ sources as shared libraries: ready-made, or built at their first use and kept for the next process.

A wheel may bring libraries along that were built against released versions of PyTorch. One is taken if it was made of
these sources for this PyTorch and the system can load it. Otherwise the sources are built here.

What is loaded runs with all rights of the user, so a library is taken from the cache only if nobody else can have
written it: it and its directory belong to the user or to root, nobody else may write there, and its checksum is the one
that was noted when it was built. Otherwise it is built again. Ready-made ones lie among the package's own files.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from .folders import TemporaryFolder, cache_directory
from .messages import tell, warn
from .reading import is_ours

FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared")
BUILD_LIMIT_S = 600  # half a minute where nothing else runs
READY_MADE = Path(__file__).parents[1] / "ready_made"  # of wheels alone

Signatures = Mapping[str, tuple[list[Any], Any]]


class BuildError(Exception):
    """A library cannot be built here. The message says why, in one line."""


def built_library(
    name: str,
    source: Path,
    *,
    headers: Sequence[Path] = (),
    compile_flags: Sequence[str] = (),
    link_flags: Sequence[str] = (),
    again: bool = False,
    telling: str = "",
) -> Path:
    """Return the library of a source file, building it if this text of it was never built with these flags.

    A ready-made one is taken where there is one. What is built is kept in the directory POOCH_CACHE_DIRECTORY, or in
    the user's cache directory. Where those cannot be written, each process builds its own. Two processes that build it
    at the same time do not disturb one another.

    Args:
        name: What the library's file name begins with, such as that of what it links against and its version.
        source: The C++ file.
        headers: The package's own headers that it includes.
        compile_flags: What the compiler needs before the source, besides `FLAGS`.
        link_flags: What it needs after the source.
        again: Whether to build it even if it is there.
        telling: What to tell the user before it is built, if that takes long.

    Returns:
        The file, whose name holds the name, what is built, and where what it is built against lies.

    Raises:
        BuildError: If there is no compiler, or it fails.
    """
    flags = [*FLAGS, *compile_flags, *link_flags]
    places = [flag for flag in flags if flag.startswith(("-I", "-L"))]
    contents = [path.read_bytes() for path in (source, *headers)]
    what = _digest([*contents, *(flag.encode() for flag in flags if flag not in places)])
    file_name = f"{name}-{what[:16]}-{_digest(map(str.encode, places))[:8]}.so"
    ready = READY_MADE / ready_name(file_name)
    if not again and ready.exists() and _can_be_loaded(ready):
        return ready
    library = cache_directory() / "native" / file_name
    if not again and is_ours(library.parent) and _is_whole(library):
        return library
    inputs = [*FLAGS, *compile_flags, str(source)]
    try:
        library.parent.parent.mkdir(parents=True, exist_ok=True)
        library.parent.mkdir(mode=0o700, exist_ok=True)
        if not is_ours(library.parent):
            raise PermissionError(f"{library.parent} may be written by others")
        _build(library, inputs, link_flags, telling)
        _checksum_file(library).write_text(_checksum(library))
    except OSError:
        library = _own_directory() / file_name
        _build(library, inputs, link_flags, telling)
    return library


def ready_name(file_name: str) -> str:
    """Return what a library that was built is called in a wheel.

    There it does not matter where PyTorch lies, nor for which device it was built: PyTorch's own builds of one version
    have the same C++ headers. Those that others have built name no device, or another one, and find nothing here.
    """
    return re.sub(r"\+(cpu|cu\d+)(?=-)", "+official", file_name).rpartition("-")[0] + ".so"


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _can_be_loaded(library: Path) -> bool:
    """Whether the system has all that a library needs: it may have been built where the C library is newer."""
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def _is_whole(library: Path) -> bool:
    """Whether a library is there as it was built. A full disk or a crash may have left a part."""
    try:
        return is_ours(library) and _checksum_file(library).read_text() == _checksum(library)
    except (OSError, UnicodeDecodeError):
        return False


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _checksum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


@cache
def _own_directory() -> Path:
    """A directory that goes with the process."""
    folder = TemporaryFolder()
    atexit.register(folder.close)
    return folder.path


def compiler() -> list[str]:
    """Return the command of the compiler: its path, and arguments that come before all others.

    Raises:
        BuildError: If there is none.
    """
    wanted = os.environ.get("CXX", "")
    try:
        asked = shlex.split(wanted)  # it may have arguments, as in "ccache g++"
    except ValueError as error:
        raise BuildError(f"CXX={wanted!r} is not a command: {error}") from None
    found = next(filter(None, map(shutil.which, asked[:1] or ("g++", "clang++"))), None)
    if found is None:
        raise BuildError(f"there is no {asked[0]}, the compiler in CXX" if asked else "there is no g++ and no clang++")
    return [found, *asked[1:]]


def _build(library: Path, inputs: Sequence[str], link_flags: Sequence[str], telling: str) -> None:
    command = compiler()
    if telling:
        tell(telling)
    try:
        with TemporaryFolder(beside=library) as folder:
            made = folder / library.name
            subprocess.run(
                [*command, *inputs, "-o", str(made), *link_flags],
                check=True, capture_output=True, text=True, timeout=BUILD_LIMIT_S,
            )  # fmt: skip
            made.chmod(0o700)
            made.replace(library)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise BuildError(f"{command[0]} failed: {first}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {BUILD_LIMIT_S} s") from error


class Extension:
    """A module of C++, once somebody has asked for it: None where it cannot be had, for the reason in `why_not`.

    Args:
        load: Returns the module, or None if it is not wanted.
        otherwise: What is told, with the reason, where it cannot be had. "": nothing is.

    Attributes:
        loaded: The module without asking, for what is done for each saved tensor.
    """

    def __init__(self, load: Callable[[], ModuleType | None], otherwise: str = "") -> None:
        self._load, self._otherwise = load, otherwise
        self._lock = threading.Lock()
        self._is_known = False
        self.why_not = ""
        self.loaded: ModuleType | None = None

    def get(self) -> ModuleType | None:
        """Return the module, loaded or built if it was not yet."""
        with self._lock:
            if not self._is_known:
                try:
                    self.loaded = self._load()
                except (BuildError, ImportError, OSError) as error:
                    self.why_not = str(error)
                    if self._otherwise:
                        warn(f"{self._otherwise}: {self.why_not}")
                self._is_known = True
            return self.loaded


def loaded_module(name: str, library: Path) -> ModuleType:
    """Load a module of Python from a compiled library."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def bound_functions(library: ctypes.CDLL, prefix: str, signatures: Signatures) -> dict[str, Any]:
    """Return the functions `PREFIX_NAME` of a library, ready to be called, by name.

    Args:
        library: The loaded library.
        prefix: What their names begin with.
        signatures: Types of the arguments and of the result, by name.

    Raises:
        AttributeError: If the library lacks one.
    """
    found = {name: getattr(library, f"{prefix}_{name}") for name in signatures}
    for name, (arguments, result) in signatures.items():
        found[name].argtypes, found[name].restype = arguments, result
    return found
