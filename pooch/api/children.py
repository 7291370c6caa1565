"""Child processes that do a part of the work: their environment, and the events that they write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import InfeasibleBudget, PoochError

Event = dict[str, Any]


# `python -m` would import whatever `json.py` lies in the current directory. So the child takes this package from where
# it is, whatever else has its name, and all others from where Python has them.
_BEGIN = """
import importlib.util, json, runpy, sys
folder, path, module, *sys.argv[1:] = sys.argv[1:]
if path:
    sys.path[:] = json.loads(path)
name = folder.rpartition("/")[2]
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules[name] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def child_command(module: str, *arguments: str, imports_as_here: bool = False) -> list[str]:
    """The command that runs a module of this package in a process of its own.

    Args:
        module: its full name.
        arguments: given to it.
        imports_as_here: look for modules where this process does, as code of the user's needs it.
    """
    path = json.dumps(sys.path) if imports_as_here else ""
    folder = Path(errors.__file__).resolve().parent
    return [sys.executable, "-P", "-c", _BEGIN, folder.as_posix(), path, module, *arguments]


def run_child(module: str, job: Event, progress: Callable[..., None], *, imports_as_here: bool = False) -> Event | None:
    """Run a module that reads its job from standard input and writes one JSON line per event.

    Args:
        module: its full name.
        job: plain data.
        progress: called with the arguments of each "progress" event.
        imports_as_here: as of `child_command`.

    Returns:
        The "done" event; None if the process ended without one, for example because it was killed.

    Raises:
        PoochError: the one that the child process raised.
        KeyboardInterrupt: Ctrl-C was pressed, which the child process is told, and it ended without a "done" event.
    """
    child = _started(child_command(module, imports_as_here=imports_as_here))
    if child is None:
        return None
    with child:
        try:
            if not _told(child, job):
                return None
            try:
                return _done_event(child, progress)
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)
                event = _done_event(child, progress)
                if event is None:
                    raise
                return event
        except BaseException:
            child.kill()
            raise


def _started(command: list[str]) -> subprocess.Popen[str] | None:
    """Start the process in a group of its own: Ctrl-C reaches it once, from its parent, and not from the terminal."""
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, process_group=0)
    except OSError:
        return None


def _told(child: subprocess.Popen[str], job: Event) -> bool:
    """Write the job; False if the process has ended. Its input stays open, and with its end the process ends too."""
    assert child.stdin is not None
    try:
        child.stdin.write(json.dumps(job) + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        with suppress(BrokenPipeError):  # closing tries to write once more
            child.stdin.close()
        return False
    return True


def _done_event(child: subprocess.Popen[str], progress: Callable[..., None]) -> Event | None:
    assert child.stdout is not None
    for event in map(_event_of, child.stdout):
        if "progress" in event:
            progress(*event["progress"])
        elif "error" in event:
            raise _error_of(event)
        elif "done" in event:
            return event
    return None


def _event_of(line: str) -> Event:
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


def received() -> Event:
    """In the child process: read the job. From then on this process ends with its parent, however that ends."""
    job: Event = json.loads(sys.stdin.readline())
    end_with_the_parent()
    return job


def end_with_the_parent() -> None:
    """In the child process: end when the input does, which the parent holds open and nobody else reads."""
    threading.Thread(target=_end_with_the_input, name="pooch-parent", daemon=True).start()


def _end_with_the_input() -> None:
    descriptor = sys.stdin.fileno()
    while os.read(descriptor, 1):  # not through `sys.stdin`, whose lock the interpreter needs when it ends
        pass
    os._exit(1)


def send(event: Event) -> None:
    """In the child process: write one event."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


@contextmanager
def errors_sent() -> Iterator[None]:
    """In the child process: write a `PoochError` as an event."""
    try:
        yield
    except InfeasibleBudget as error:
        send({"error": InfeasibleBudget.__name__, "arguments": error.__reduce__()[1]})
    except PoochError as error:
        send({"error": type(error).__name__, "message": str(error)})
