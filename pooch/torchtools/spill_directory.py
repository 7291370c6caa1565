"""The directory that takes what leaves memory on a machine without a GPU, and what may be wrong with it."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..ground.errors import TierError
from ..ground.units import format_bytes
from ..ground.visible import visible

VARIABLE = "POOCH_SPILL_DIRECTORY"
CHANGED = errno.EBADMSG  # marks an error that this package raises itself: what was read is not what was written


@dataclass(frozen=True, slots=True)
class SpillDirectory:
    """A directory for spill files.

    Attributes:
        path: The directory.
        is_argument: Whether the program named it, rather than the environment or nobody.
    """

    path: Path
    is_argument: bool

    @classmethod
    def of(cls, given: str | Path | None = None) -> SpillDirectory:
        """Return the directory that is in use.

        Args:
            given: The directory that the program named. None uses POOCH_SPILL_DIRECTORY, or the system's temporary
                directory.
        """
        if given:
            return cls(Path(given), True)
        return cls(Path(os.environ.get(VARIABLE) or _temporary()), False)

    @property
    def name(self) -> str:
        """The directory as messages name it, in one line."""
        return f"the spill directory {visible(str(self.path))}".replace("\n", "\\n").replace("\t", "\\t")

    @property
    def another(self) -> str:
        """How to choose another one."""
        return f"choose another with {'spill_directory=' if self.is_argument else VARIABLE}"

    def open_unnamed(self) -> int:
        """Open a file without a name. Where the system does not support this, the name is removed at once.

        Raises:
            TierError: If that is impossible. It says what is wrong with the directory.
        """
        try:
            try:
                return os.open(self.path, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
            except (AttributeError, OSError):  # unsupported here; the fallback reports any other problem
                descriptor, name = tempfile.mkstemp(prefix="pooch-", dir=self.path)
                Path(name).unlink()
                return descriptor
        except OSError as error:
            raise self.trouble(error) from error

    def trouble(self, error: OSError, needed_bytes: int = 0) -> TierError:
        """Return what is wrong with the directory and what to do about it, in one line.

        Args:
            error: What a system call said.
            needed_bytes: How much room was asked for, if that is known.
        """
        kind, what, remedy = _known(error, self.path, needed_bytes)
        why = "" if kind in ("missing", "not a directory", "changed") else f" ({error.strerror or error})"
        return TierError(f"{self.name} {what}{why}: {remedy + ', or ' if remedy else ''}{self.another}", kind)


def _temporary() -> str:
    """Return the system's temporary directory, or the usual one if none can be written: opening a file there tells."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return os.environ.get("TMPDIR") or "/tmp"


def _known(error: OSError, path: Path, needed_bytes: int) -> tuple[str, str, str]:
    """Return the kind of an error, what it says of the directory, and a remedy other than another directory."""
    match error.errno:
        case errno.ENOENT:
            return "missing", "is missing", "create it"
        case errno.ENOTDIR:
            return "not a directory", "is not a directory", ""
        case errno.ENOSPC:
            return "full", f"is full{_figures(path, needed_bytes)}", "free some room there"
        case errno.EDQUOT:
            return "quota", "takes no more than its quota, which is used up", "free some room there"
        case errno.EFBIG:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            what = "takes no file as large as needed"
            if limit == resource.RLIM_INFINITY:
                return "file size", what, ""
            return "file size", f"{what}, as files are limited to {format_bytes(limit)}", "raise that with `ulimit -f`"
        case errno.EROFS:
            return "read-only", "is read-only", "mount it for writing"
        case errno.EACCES | errno.EPERM:
            return "permission", "may not be written by this user", "change its permissions"
        case errno.EMFILE | errno.ENFILE:
            return "descriptors", "takes no further file, as too many are open", "raise that with `ulimit -n`"
        case code if code == CHANGED:
            return "changed", "gave back other bytes than were written to it", "check the disk"
        case errno.EIO:
            return "broken", "has I/O errors", "check the disk"
        case _:
            return f"error {error.errno}", "cannot be used", ""


def _figures(path: Path, needed_bytes: int) -> str:
    try:
        free_bytes = shutil.disk_usage(path).free
    except OSError:
        return ""
    found, needed = format_bytes(free_bytes), format_bytes(needed_bytes)
    return f", with {found} free{f' of the {needed} needed' if needed_bytes and needed != found else ''}"
