"""What child processes do for tests."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from pooch.api import children

WORK = {"end": "tests.api.child_work:end", "wait": "tests.api.child_work:wait", "not start": "tests.api.ending:none"}


def let_children_do_it(patch: pytest.MonkeyPatch | None = None) -> None:
    """Have child processes know the work of this file too, which their table of work is closed to.

    Args:
        patch: undoes it. None: this process is for nothing else.
    """
    begin = children._BEGIN.replace("child.main(", f"child.WORK.update({WORK!r})\nchild.main(")
    (patch or pytest.MonkeyPatch()).setattr(children, "_BEGIN", begin)


def end(how: str, mark: str, report: Callable[..., None]) -> str:
    """End in the way that the request names."""
    match how:
        case "an error of its own":
            raise KeyError("nothing of this name")
        case "killed, with last words":
            sys.stderr.write("one line\nthe last \x1b[31mwords\n\n")
            sys.stderr.flush()
            os._exit(3)
        case "killed":
            os._exit(4)
        case "with a warning":
            warnings.warn("mind this", stacklevel=1)
            os.write(2, b"and that, without an end")
        case "an answer that nobody reads":
            Path(mark).touch()
            while True:
                report("on")
    return how


def wait(answers: bool, report: Callable[..., None]) -> bool:
    """Tell the process number, then wait for Ctrl-C."""
    try:
        report(os.getpid())
        time.sleep(600)
    except KeyboardInterrupt:
        if not answers:
            raise
    return answers
