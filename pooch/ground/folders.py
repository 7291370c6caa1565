"""The user's cache directory, and temporary folders.

One that a killed process left is removed when another process makes its first one.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "pooch-held-"
_NAME = re.compile(r"\.?pooch-held-[a-z0-9_]{8}")  # as `tempfile` makes them; nothing else is ever removed
_swept: set[Path] = set()


def cache_directory() -> Path:
    """Return where Pooch keeps what it needs again: POOCH_CACHE_DIRECTORY, or its part of the user's directory."""
    asked = os.environ.get("POOCH_CACHE_DIRECTORY")
    if asked:
        return Path(asked)
    theirs = os.environ.get("XDG_CACHE_HOME")
    if theirs:
        return Path(theirs) / "pooch-planner"
    try:
        return Path.home() / ".cache" / "pooch-planner"
    except RuntimeError:  # the user has none, as with any number for a user in a container
        return Path(tempfile.gettempdir()) / f"pooch-planner-{os.getuid()}"


class TemporaryFolder:
    """A folder that goes when it is closed, or else with the process. Also a context manager, which gives its path.

    The process holds a lock on it, which the system lets go however the process ends, and for no living one.

    Args:
        beside: A file or folder on whose file system it has to be: it lies next to it. None: where temporary files are.

    Attributes:
        path: Where it is.
    """

    def __init__(self, beside: Path | None = None) -> None:
        directory = Path(tempfile.gettempdir()) if beside is None else beside.parent
        if directory not in _swept:
            _swept.add(directory)
            _sweep(directory)
        prefix = _PREFIX if beside is None else f".{_PREFIX}"
        self._lock: int | None
        self.path, self._lock = _made(directory, prefix)
        self._process = os.getpid()

    def close(self) -> None:
        """Remove it, unless this is a forked process: it is that of the parent."""
        if self._lock is None:
            return
        if self._process == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exception: object) -> None:
        self.close()


def _made(directory: Path, prefix: str) -> tuple[Path, int]:
    """Make a folder and lock it. Until then another process may take it for one that was left, and remove it."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            if _is_held(lock) and path.exists():
                return path, lock
            os.close(lock)


def _is_held(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # it is being removed
        return False
    except OSError:  # a file system without locks, where nobody can take it for one that was left
        return True
    return os.fstat(lock).st_nlink > 0


def _sweep(directory: Path) -> None:
    """Remove folders of this user that no process holds."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with suppress(OSError):
                    _remove_if_left(Path(entry.path))


def _remove_if_left(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where a process holds it
            shutil.rmtree(path, ignore_errors=True)  # which follows no links
    finally:
        os.close(descriptor)
