"""Child processes that do a part of the work, as their parent sees them. What runs in them is `child_main`.

They speak over pipes only, one line of JSON for each request and each event. A child ends with its parent, however that
ends, and shows nothing to the user by itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, Self

from ..ground import errors
from ..ground.errors import ProcessEnded
from ..ground.progress import silent
from ..ground.visible import visible
from .wire import WIRE

_LISTEN_S = 5.0  # for the last words of a child that has ended; processes that it started may hold its pipe open
_LONGEST_BYTES = 2**16  # of a line that is passed on


# `python -m` would import whatever `json.py` lies in the current directory. So the child takes this package from where
# it is, whatever else has its name, and all others from where Python has them.
_BEGIN = """
import importlib, importlib.util, json, sys
folder, path, work = sys.argv[1:]
if path:
    sys.path[:] = json.loads(path)
name = folder.rpartition("/")[2]
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules[name] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
child = importlib.import_module(name + ".api.child_main")
child.main(work)
"""


def child_command(work: str, *, imports_as_here: bool = False) -> list[str]:
    """The command that runs a child process; arguments as of `Child`."""
    path = json.dumps(sys.path) if imports_as_here else ""
    folder = Path(__file__).resolve().parent.parent
    return [sys.executable, "-P", "-c", _BEGIN, folder.as_posix(), path, work]


class Child:
    """A child process that does one kind of work. The first request starts it, and the next one after `let_go`.

    One thread speaks to it, and lets it go; as a context manager it does so at the end. Another thread may `end` it.
    It is in a process group of its own: Ctrl-C reaches it from its parent, if at all, and not from the terminal.

    Args:
        work: what it does, of the table `child_main.WORK`.
        imports_as_here: look for modules where this process does, as code of the user's needs it.
        passes_on: write what it writes to its standard error stream to that of this process, as the user's code in it
            may have a word to say. If not, its last words are kept.
        environment: its environment. None: that of this process.
    """

    def __init__(
        self,
        work: str,
        *,
        imports_as_here: bool = False,
        passes_on: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._work, self._imports_as_here, self._passes_on = work, imports_as_here, passes_on
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._words: deque[bytes] = deque(maxlen=1)
        self._listener: threading.Thread | None = None
        self._changing = threading.Lock()
        self._is_over = False

    def start(self) -> subprocess.Popen[bytes]:
        """Return the process, started if there is none, which takes a while.

        Raises:
            ProcessEnded: there can be no such process, or `end` was called.
        """
        with self._changing:
            if self._is_over:
                raise ProcessEnded("it was ended")
            if self._process is None:
                self._process = self._started()
            return self._process

    def _started(self) -> subprocess.Popen[bytes]:
        pipe, command = subprocess.PIPE, child_command(self._work, imports_as_here=self._imports_as_here)
        try:
            process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0, env=self._environment
            )
        except OSError as error:
            raise ProcessEnded(f"it could not be started: {error.strerror or error}") from error
        self._words.clear()
        errors_of_it, process.stderr = process.stderr, None  # closed by the thread that reads it
        arguments = (errors_of_it, self._words, self._passes_on)
        self._listener = threading.Thread(target=_listen, args=arguments, name="pooch-child", daemon=True)
        self._listener.start()
        return process

    def ask(self, *arguments: Any, progress: Callable[..., None] = silent) -> Any:
        """Send a request, and return the answer.

        Args:
            arguments: what the work takes.
            progress: called with what the work reports.

        Raises:
            PoochError: the one that the work raised.
            ProcessEnded: it could not be started, or ended without an answer, for example because it was killed.
            WireError: the arguments cannot be told.
            KeyboardInterrupt: Ctrl-C was pressed, which the child process is told, and it ended without an answer.
        """
        request = json.dumps(WIRE.plain(arguments)).encode() + b"\n"
        process = self.start()
        self._tell(process, request)
        try:
            return self._answer(process, progress)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            with suppress(ProcessEnded):
                return self._answer(process, progress)
            raise

    def _tell(self, process: subprocess.Popen[bytes], request: bytes) -> None:
        """Write a request. The input stays open, and with its end the process ends too."""
        assert process.stdin is not None
        left = memoryview(request)
        try:
            while left:  # not through a buffer, which would be written once more when it is closed
                left = left[os.write(process.stdin.fileno(), left) :]
        except BrokenPipeError:
            raise self._ended(process) from None

    def _answer(self, process: subprocess.Popen[bytes], progress: Callable[..., None]) -> Any:
        """Read events until the answer comes."""
        assert process.stdout is not None
        for line in process.stdout:
            event = _event_of(line)
            if "progress" in event:
                progress(*event["progress"])
            elif "error" in event:
                raise getattr(errors, event["error"])(*event["arguments"])
            elif "done" in event:
                return WIRE.made(event["done"])
        raise self._ended(process)

    def _ended(self, process: subprocess.Popen[bytes]) -> ProcessEnded:
        """Why there is no answer of it: what it said last, or how it ended."""
        assert self._listener is not None
        status = process.wait()
        self._listener.join(_LISTEN_S)
        words = visible(self._words[0].decode(errors="replace").strip()) if self._words else ""
        return ProcessEnded(f"it ended early (exit status {status}{words and f': {words}'})")

    def end(self) -> None:
        """End it for good, from any thread. Who waits for its answer meets the end of its output, and lets it go."""
        with self._changing:
            self._is_over = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def let_go(self) -> None:
        """End it, if it is running, and close its pipes, in the thread that speaks to it."""
        with self._changing:
            process, self._process = self._process, None
        if process is not None:
            assert self._listener is not None
            process.kill()
            process.wait()
            with process:
                self._listener.join(_LISTEN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.let_go()


def _listen(stream: BufferedReader, words: deque[bytes], passes_on: bool) -> None:
    """Read what a child process writes to its standard error stream."""
    with stream:
        for line in iter(lambda: stream.readline(_LONGEST_BYTES), b""):
            if line.strip():
                words.append(line)
            if passes_on:
                with suppress(OSError, ValueError, AttributeError):  # closed, or none
                    sys.stderr.write(line.decode(errors="replace"))
                    sys.stderr.flush()


def _event_of(line: bytes) -> dict[str, Any]:
    """The event of a line; empty for lines that the user's own file prints."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
