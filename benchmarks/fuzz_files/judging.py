"""What reading a changed file comes to, within limits of time and memory, and with an eye on what it does besides."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any
from unittest import mock

import psutil

from pooch.cli import main
from pooch.errors import PoochError

MOST_SECONDS = 20  # for one case: a net for what hangs, and no measure of speed
MOST_BYTES = 2 * 2**30  # of addresses beyond those that the process has
REFUSED, ANSWERED = "refused", "answered"
CANARY = b"\x5a\x5a\x5a\x5a" * 1024
_STARTS_SOMETHING = (
    "subprocess.",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.startfile",
    "pty.",
    "socket.",
)
_CHANGES_FILES = (
    "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate",
)  # fmt: skip
_LOADS_CODE = ("pickle.find_class", "marshal.load", "ctypes.dlopen", "code.__new__")


class Defect(Exception):
    """A changed file did what no file may do. The text says what."""


class _TooLong(BaseException):
    """A case took too long. It is no Exception, so that nothing takes it for one of its own."""


@dataclass
class _Watch:
    """What the audit hook of the process looks at, since such a hook stays for good.

    It does not only note what a case does to files that are not its own, it prevents it: a case that follows a planted
    link would otherwise write over the files of whoever runs it.
    """

    folder: str | None = None
    seen: list[str] | None = None

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.seen is None:
            return
        if event == "ctypes.dlopen" and _is_installed(arguments[0]):
            return
        if event.startswith(_STARTS_SOMETHING) or event in _LOADS_CODE:
            self.seen.append(event)
        elif event == "open":
            self._opened(*arguments[:3])
        elif event in _CHANGES_FILES:
            for path in arguments[:2]:
                if isinstance(path, str | bytes | os.PathLike) and not self._is_ours(path):
                    self._prevent(f"{event} {os.fsdecode(path)}")

    def _is_ours(self, path: str | bytes | os.PathLike[str]) -> bool:
        """Whether a path is in the folder. A link in its own place is not followed, and those on the way are."""
        return self._is_inside(Path(os.fsdecode(path)).parent)

    def _is_inside(self, path: Path) -> bool:
        return os.path.realpath(path).startswith(os.path.realpath(self.folder or ""))

    def _opened(self, path: object, mode: str | None, flags: int) -> None:
        if not isinstance(path, str | bytes) or os.fsdecode(path) == os.devnull:
            return
        given = Path(os.fsdecode(path))
        real = given.parent.resolve() / given.name if flags & os.O_NOFOLLOW else Path(os.path.realpath(given))
        writes = bool(flags & os.O_ACCMODE) or bool(flags & os.O_CREAT)
        has_no_name = flags & os.O_TMPFILE == os.O_TMPFILE  # the swap tier, while profiling
        if real.name in ("canary", "passwd") or (writes and not has_no_name and not self._is_inside(real)):
            self._prevent(f"open {real} {mode or flags}")

    def _prevent(self, what: str) -> None:
        assert self.seen is not None
        self.seen.append(what)
        raise PermissionError(f"a case may not {what}")


def _is_installed(library: str | None) -> bool:
    """Whether a library is one that a package brings, or the system; packages load some late."""
    return library is None or "/" not in library or library.startswith(sys.prefix)


_WATCH = _Watch()
_HOOKED = False


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Raise a defect if anything in the block starts a process, loads code, or writes outside of a folder.

    Args:
        folder: Where files may be written.
    """
    global _HOOKED
    if not _HOOKED:
        sys.addaudithook(lambda event, arguments: _WATCH(event, arguments))
        _HOOKED = True
    _WATCH.folder, _WATCH.seen = str(folder), []
    try:
        yield
        if _WATCH.seen:
            raise Defect(f"it did {', '.join(sorted(set(_WATCH.seen)))[:300]}")
    finally:
        _WATCH.seen = None


@contextmanager
def limited(seconds: float, extra_bytes: int) -> Iterator[None]:
    """Raise a defect in a block that takes too long, and deny it memory beyond a limit.

    Args:
        seconds: What it may take.
        extra_bytes: Addresses that the process may take beyond those that it has.
    """

    def too_long(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + extra_bytes, hard))
    try:
        with mock.patch("pooch.api.planning.is_limited", return_value=False):  # else it plans in a process of its own
            yield
    except _TooLong:
        raise Defect(f"it takes more than {seconds} s") from None
    except MemoryError:
        raise Defect(f"it takes more than {extra_bytes} bytes") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def refusal(error: PoochError, *names: object) -> str:
    """Return the text of an error after a look at its form.

    Args:
        error: What was raised.
        names: One of these has to be in it.

    Raises:
        Defect: It is not one line, is longer than anyone reads, or names none.
    """
    text = str(error)
    if not text or len(text.splitlines()) != 1:
        raise Defect(f"a message of {len(text.splitlines())} lines: {text[:300]!r}")
    if len(text) > 1500:
        raise Defect(f"a message of {len(text)} characters: {text[:300]!r}")
    if names and not any(str(name) in text for name in names):
        raise Defect(f"a message that does not name the file: {text[:300]!r}")
    return text


def command(*arguments: object) -> str:
    """Run a command in this process, and return whether it answered or was refused.

    Args:
        arguments: What is written after `pooch`.

    Raises:
        Defect: It ended in neither.
    """
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main([str(argument) for argument in arguments])
    told = [line for line in error.getvalue().splitlines() if not line.startswith("  ")]
    shown = f"`{' '.join(map(str, arguments))}`"
    if code == 0:
        return ANSWERED
    if code not in (1, 2, 3) or len(told) != 1 or not told[0].startswith("pooch: ") or "unexpected" in told[0]:
        raise Defect(f"{shown} ended with code {code} and {' '.join(told)[:400]!r}")
    if "out of memory" in told[0]:
        raise Defect(f"{shown} took too much memory: {told[0][:300]!r}")
    return REFUSED


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        name: For the command.
        write: Writes a changed file into a folder.
        judge: Reads it, and works with what is accepted; returns a word for what became of it.
        untouched: Writes a file that nobody has changed, so that what is loaded late and built once is there.
    """

    name: str
    write: Callable[[Random, Path], None]
    judge: Callable[[Random, Path], str]
    untouched: Callable[[Path], None]


def warm_up(kind: Kind) -> None:
    """Judge files that nobody has changed.

    Args:
        kind: Of the files.

    Raises:
        Defect: They are refused.
    """
    for seed in range(12):
        with tempfile.TemporaryDirectory(prefix="pooch-fuzz-") as folder:
            kind.untouched(Path(folder))
            outcome = kind.judge(Random(seed), Path(folder))
            if not outcome.startswith("accepted"):
                raise Defect(f"an untouched {kind.name} file is {outcome}")


def outcome_of(kind: Kind, seed: int) -> str:
    """Return what became of a case.

    Args:
        kind: Of the file.
        seed: Of the changes.

    Raises:
        Defect: It did what no file may do.
    """
    random, parent = Random(f"{kind.name} {seed}"), Path(tempfile.mkdtemp(prefix="pooch-fuzz-"))
    try:
        (parent / "canary").write_bytes(CANARY)  # beside the folder: nothing in it may be read
        folder = parent / "files"
        folder.mkdir()
        kind.write(random, folder)
        with limited(MOST_SECONDS, MOST_BYTES), watched(parent):
            return kind.judge(random, folder)
    except Defect:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        raise Defect(f"{type(error).__name__} in {place}: {' '.join(str(error).split())[:300]}") from error
    finally:
        shutil.rmtree(parent, ignore_errors=True)
