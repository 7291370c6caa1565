"""Reading files that somebody else may have made: regular ones of a limited size, and nothing that never ends.

What is trusted because this user has written it has to be this user's alone: see `is_ours`. The tables that come with
the package are read here, too; nothing of them is executed.
"""

from __future__ import annotations

import errno
import os
import stat
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from .errors import FileFormatError

MOST_BYTES = 256 * 2**20  # a profile of 100,000 ops takes less than half of it
_CHUNK_BYTES = 2**20


def file_bytes(path: str | Path, most_bytes: int = MOST_BYTES, *, follow_links: bool = True) -> bytes:
    """Returns what a file holds.

    Args:
        path: the file.
        most_bytes: what it may hold at most.
        follow_links: whether the path may be a link.

    Raises:
        OSError: it cannot be read, is too large, or is no regular file but a pipe or device, which may never end.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe would wait for its writer
    descriptor = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        content = b""
        if found.st_size <= most_bytes:
            content = file.read(found.st_size + 1)  # memory for as much is taken at once
            while len(content) <= most_bytes and (more := file.read(_CHUNK_BYTES)):  # it has grown, or had no size
                content += more
    if max(found.st_size, len(content)) > most_bytes:
        raise OSError(errno.EFBIG, "it is larger than any such file", str(path))
    return content


def is_ours(path: Path) -> bool:
    """Returns whether a file or directory can only have been written by this user or root.

    Args:
        path: the file or directory. A link could be anybody's, and is not followed.
    """
    try:
        found = path.lstat()
    except (OSError, ValueError):
        return False
    is_kept_here = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    return is_kept_here and found.st_uid in (os.geteuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def packaged_tables(package: str, name: str) -> dict[str, Any]:
    """Returns the tables of a TOML file beside the modules of a package.

    Raises:
        FileFormatError: there is no such file, or it is not TOML.
    """
    try:
        return tomllib.loads((files(package) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{name} of {package} cannot be read ({error}): install Pooch again") from error
