"""Lines for the user, through the logger `pooch`.

They stand on standard error, each behind `pooch: `, unless a handler of the program shows them: any on this logger, or
one of the root logger that writes to the terminal, as that of `logging.basicConfig()`. Other handlers of the root
logger, such as those that write a file, get them as well. Levels are `INFO` and `WARNING`.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any

from .visible import visible

LOGGER = logging.getLogger("pooch")
_OWN_NAME = "pooch"


class _StandardError(logging.Handler):
    """Writes what no other handler shows to what is standard error at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line. Training goes on where nobody can read it any more."""
        if not _is_shown(record, besides=self):
            with suppress(OSError, ValueError):
                write_line(record.getMessage(), getattr(record, "speaker", _OWN_NAME))


def _is_shown(record: logging.LogRecord, besides: logging.Handler) -> bool:
    if any(handler.name != besides.name for handler in LOGGER.handlers):
        return True
    above = logging.getLogger().handlers if LOGGER.propagate else []
    return any(record.levelno >= handler.level and _is_on_terminal(handler) for handler in above)


def _is_on_terminal(handler: logging.Handler) -> bool:
    """Whether a handler writes to standard output or error, and not to a file or into memory."""
    stream: Any = _stream_of(handler)
    if stream is None or stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        return stream is not None
    try:
        return stream.fileno() in (1, 2)
    except (AttributeError, OSError, ValueError):
        return False


def _stream_of(handler: Any) -> object:
    inner = getattr(handler, "python_handler", handler)  # of absl
    return getattr(inner, "stream", None) or getattr(getattr(inner, "console", None), "file", None)  # of rich


def write_line(text: str, speaker: str = _OWN_NAME) -> None:
    """Write a line to standard error, whatever the program has made of its logging.

    Args:
        text: the line. What a terminal would obey in it is written out.
        speaker: who speaks: "pooch", or "pooch (rank 1)".
    """
    if sys.stderr is not None:  # there is none under pythonw
        sys.stderr.write(f"{speaker}: {visible(text)}\n")
        sys.stderr.flush()


def tell(text: str) -> None:
    """Tell what happens, such as that a plan was made."""
    LOGGER.info("%s", visible(text))


def warn(text: str) -> None:
    """Tell what the user should look at, such as a step over the budget."""
    LOGGER.warning("%s", visible(text))


def report(text: str, speaker: str) -> None:
    """Tell what a command has to say: it is its output, also where the program that it runs has switched logging off.

    Args:
        text: the line.
        speaker: who speaks: "pooch", or "pooch (rank 1)".
    """
    if LOGGER.isEnabledFor(logging.INFO):
        LOGGER.info("%s", visible(text), extra={"speaker": speaker})
    else:
        write_line(text, speaker)


def be_silent(text: str) -> None:
    """Tell nothing."""


def _set_up() -> None:
    own = _StandardError()
    own.set_name("pooch: standard error")
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if all(handler.name != own.name for handler in LOGGER.handlers):
        LOGGER.addHandler(own)


_set_up()
