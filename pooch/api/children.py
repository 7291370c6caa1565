"""Child processes that do a part of the work: their environment, and what both sides tell one another.

They speak over pipes only, one line of JSON for each job and each event. A child ends with its parent, however that
ends, and shows nothing to the user by itself.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .. import errors
from ..errors import InfeasibleBudget, PoochError, ProcessEnded, first_line
from ..visible import visible

Event = dict[str, Any]
_LOOK_S = 0.3  # how often a child looks whether its parent is there; forked processes may hold its pipe open
_LISTEN_S = 5.0  # for the last words of a child that has ended; processes that it started may hold its pipe open
_LONGEST_BYTES = 2**16  # of a line that is passed on


# `python -m` would import whatever `json.py` lies in the current directory. So the child takes this package from where
# it is, whatever else has its name, and all others from where Python has them.
_BEGIN = """
import importlib, importlib.util, json, runpy, sys
folder, path, module, *sys.argv[1:] = sys.argv[1:]
if path:
    sys.path[:] = json.loads(path)
name = folder.rpartition("/")[2]
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules[name] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
importlib.import_module(name + ".api.children").begin()
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def child_command(module: str, *, imports_as_here: bool = False) -> list[str]:
    """The command that runs a module of this package in a process of its own.

    Args:
        module: its full name.
        imports_as_here: look for modules where this process does, as code of the user's needs it.
    """
    path = json.dumps(sys.path) if imports_as_here else ""
    folder = Path(errors.__file__).resolve().parent
    return [sys.executable, "-P", "-c", _BEGIN, folder.as_posix(), path, module]


# In the parent -------------------------------------------------------------------------------------------------------


class Child:
    """A child process that reads jobs and writes events; also a context manager, which ends it.

    It is in a process group of its own: Ctrl-C reaches it from its parent, if at all, and not from the terminal.

    Args:
        module: the full name of what it runs.
        imports_as_here: as of `child_command`.
        passes_on: write what it writes to its standard error stream to that of this process, as the user's code in it
            may have a word to say. If not, its last words are kept.
        environment: its environment. None: that of this process.

    Raises:
        ProcessEnded: there can be no such process.
    """

    def __init__(
        self,
        module: str,
        *,
        imports_as_here: bool = False,
        passes_on: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        pipe, command = subprocess.PIPE, child_command(module, imports_as_here=imports_as_here)
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0, env=environment
            )
        except OSError as error:
            raise ProcessEnded(f"it could not be started: {error.strerror or error}") from error
        self._words: deque[bytes] = deque(maxlen=1)
        errors_of_it, self._process.stderr = self._process.stderr, None  # closed by the thread that reads it
        arguments = (errors_of_it, self._words, passes_on)
        self._listener = threading.Thread(target=_listen, args=arguments, name="pooch-child", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has ended. What it told until then can still be read."""
        return self._process.poll() is not None

    def tell(self, job: Event) -> None:
        """Write a job. Its input stays open, and with its end the process ends too.

        Args:
            job: plain data.

        Raises:
            ProcessEnded: it has ended.
        """
        assert self._process.stdin is not None
        left = memoryview(json.dumps(job).encode() + b"\n")
        try:
            while left:  # not through a buffer, which would be written once more when it is closed
                left = left[os.write(self._process.stdin.fileno(), left) :]
        except BrokenPipeError:
            raise self.ended() from None

    def events(self) -> Iterator[Event]:
        """What it tells until it ends; empty events for lines that the user's own code prints."""
        assert self._process.stdout is not None
        return map(_event_of, self._process.stdout)

    def answer(self, progress: Callable[..., None]) -> Event:
        """Read events until the "done" event, and return that.

        Args:
            progress: called with the arguments of each "progress" event.

        Raises:
            PoochError: the one that the child process raised.
            ProcessEnded: it ended without an answer.
        """
        for event in self.events():
            if "progress" in event:
                progress(*event["progress"])
            elif "error" in event:
                raise _error_of(event)
            elif "done" in event:
                return event
        raise self.ended()

    def ended(self) -> ProcessEnded:
        """Why there is no answer of it: what it said last, or how it ended."""
        status = self._process.wait()
        self._listener.join(_LISTEN_S)
        words = visible(self._words[0].decode(errors="replace").strip()) if self._words else ""
        return ProcessEnded(f"it ended early (exit status {status}{words and f': {words}'})")

    def interrupt(self) -> None:
        """Tell it that Ctrl-C was pressed."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it, from any thread. Who waits for its events meets their end."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it, and close its pipes, in the thread that speaks to it."""
        self.kill()
        with self._process:
            self._listener.join(_LISTEN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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


def run_child(module: str, job: Event, progress: Callable[..., None], *, imports_as_here: bool = False) -> Event:
    """Run a module that reads its job and writes events, the last of them "done".

    Args:
        module: its full name.
        job: plain data.
        progress: called with the arguments of each "progress" event.
        imports_as_here: as of `child_command`; what the user's code says in it is then passed on.

    Returns:
        The "done" event.

    Raises:
        PoochError: the one that the child process raised.
        ProcessEnded: it ended without a "done" event, for example because it was killed.
        KeyboardInterrupt: Ctrl-C was pressed, which the child process is told, and it ended without a "done" event.
    """
    with Child(module, imports_as_here=imports_as_here, passes_on=imports_as_here) as child:
        child.tell(job)
        try:
            return child.answer(progress)
        except KeyboardInterrupt:
            child.interrupt()
            with suppress(ProcessEnded):
                return child.answer(progress)
            raise


def _event_of(line: bytes) -> Event:
    """The event of a line; empty for lines that the user's own file prints."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _error_of(event: Event) -> PoochError:
    if event["error"] == InfeasibleBudget.__name__:
        return InfeasibleBudget(*event["arguments"])
    kind: type[PoochError] = getattr(errors, event["error"])
    return kind(event["message"])


# In the child --------------------------------------------------------------------------------------------------------


def begin() -> None:
    """Before anything else is imported: end with the parent from now on, and have errors told and not shown."""
    sys.excepthook = _tell
    _jobs()


def received() -> Event:
    """Wait for the next job. With its parent, or with the end of the jobs, this process ends, whatever it is doing."""
    job: Event = json.loads(_jobs().get())
    return job


@cache
def _jobs() -> queue.SimpleQueue[bytes]:
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs, os.getppid()), name="pooch-parent", daemon=True).start()
    return jobs


def _read(jobs: queue.SimpleQueue[bytes], parent: int) -> None:
    descriptor = sys.stdin.fileno()  # not through `sys.stdin`, whose lock the interpreter needs when it ends
    line: list[bytes] = []
    while os.getppid() == parent:
        if not select.select([descriptor], [], [], _LOOK_S)[0]:
            continue
        read = os.read(descriptor, _LONGEST_BYTES)
        if not read:
            break
        *ends, rest = read.split(b"\n")
        for end in ends:
            jobs.put(b"".join([*line, end]))
            line.clear()
        line.append(rest)
    os._exit(1)


def _tell(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    """Tell of an error that ends this process: its traceback would be one of machinery that the user does not know."""
    if not issubclass(kind, KeyboardInterrupt):
        send({"error": ProcessEnded.__name__, "message": f"it ended early ({kind.__name__}: {first_line(error)})"})


def send(event: Event) -> None:
    """Write one event."""
    try:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # nobody is there to hear it
        os._exit(1)


@contextmanager
def errors_sent() -> Iterator[None]:
    """Write a `PoochError` as an event."""
    try:
        yield
    except InfeasibleBudget as error:
        send({"error": InfeasibleBudget.__name__, "arguments": error.__reduce__()[1]})
    except PoochError as error:
        send({"error": type(error).__name__, "message": str(error)})
