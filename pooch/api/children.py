"""Child processes that do a part of the work: their environment, and the events that they write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import InfeasibleBudget, PoochError

Event = dict[str, Any]


def child_environment() -> dict[str, str]:
    """This process's environment, in which a child process imports the same package."""
    folders = [str(Path(errors.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def run_child(module: str, job: Event, progress: Callable[..., None]) -> Event | None:
    """Run a module that reads its job from standard input and writes one JSON line per event.

    Args:
        module: run with `python -m`.
        job: plain data.
        progress: called with the arguments of each "progress" event.

    Returns:
        The "done" event; None if the process ended without one, for example because it was killed.

    Raises:
        PoochError: the one that the child process raised.
    """
    command = [sys.executable, "-m", module]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=child_environment()) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(job))
        child.stdin.close()
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
