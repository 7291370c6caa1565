"""The main module of every child process: does one kind of work for its parent, request by request.

Nothing that takes long to import is imported before the process is sure to end with its parent.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import sys
import threading
from importlib import import_module
from types import TracebackType
from typing import Any

from ..ground.errors import PoochError, ProcessEnded, first_line

# All that a child process does: a module, and its function, which takes what it is asked and a function to report its
# progress to. A line from the parent only ever names data, so nothing else can be made to run.
WORK = {
    "make a plan": ".planning:plan_here",
    "plan beside training": "..autopilot.jobs:answered",
    "measure beside training": "..autopilot.costs:measured_costs",
    "compare deterministically": ".measure.checking:compared",
    "train on an arena": ".measure.arena_training:served",
    "train under a limit": ".measure.limited_child:trained",
}
ASIDE = ("plan beside training", "measure beside training")
NICENESS = 10  # of work beside training, so that the training step goes first
_LOOK_S = 0.3  # how often it looks whether its parent is there; forked processes may hold its pipe open
_LONGEST_BYTES = 2**16  # of what is read at once


def main(work: str) -> None:
    """End with the parent from now on, have errors told and not shown, and do what is asked until then.

    Ctrl-C ends this process without a word, unless its work knows better. Beside training it is left to the training
    program, at whose end this one ends.
    """
    sys.excepthook = _tell
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, os.getppid()), name="pooch-parent", daemon=True).start()
    is_aside = work in ASIDE
    signal.signal(signal.SIGINT, signal.SIG_IGN if is_aside else signal.default_int_handler)
    if is_aside:
        os.nice(NICENESS)
    module, _, name = WORK[work].partition(":")
    function = getattr(import_module(module, __package__), name)
    from .wire import WIRE

    while True:
        arguments = WIRE.made(json.loads(requests.get()))
        try:
            _send({"done": WIRE.plain(function(*arguments, _report))})
        except PoochError as error:
            _send_error(error)


def _read(requests: queue.SimpleQueue[bytes], parent: int) -> None:
    """Read requests. With the parent, or with their end, this process ends, whatever it is doing."""
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
            requests.put(b"".join([*line, end]))
            line.clear()
        line.append(rest)
    os._exit(1)


def _tell(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    """Tell of an error that ends this process: its traceback would be one of machinery that the user does not know."""
    if not issubclass(kind, KeyboardInterrupt):
        _send_error(ProcessEnded(f"it ended early ({kind.__name__}: {first_line(error)})"))


def _send_error(error: PoochError) -> None:
    _send({"error": type(error).__name__, "arguments": error.__reduce__()[1]})


def _report(*progress: Any) -> None:
    _send({"progress": progress})


def _send(event: dict[str, Any]) -> None:
    """Write one event."""
    try:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # nobody is there to hear it
        os._exit(1)
