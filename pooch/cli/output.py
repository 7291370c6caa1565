"""What commands print: results on stdout (tables for people, JSON for programs), progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.status import Status

_PLAIN_WIDTH = 120  # of tables that go into a file or a pipe
_SECONDS_BETWEEN_LINES = 2.0


def print_json(record: Mapping[str, object] | Sequence[Mapping[str, object]]) -> None:
    """One JSON document on stdout; numbers that JSON does not know are refused rather than written."""
    click.echo(json.dumps(record, indent=2, allow_nan=False))


def print_tables(*tables: RenderableType) -> None:
    """Tables on stdout, as wide as the terminal; in a pipe, wide enough to be read."""
    console = _console(sys.stdout.isatty())
    for table in tables:
        console.print(table)


def _console(is_terminal: bool) -> Console:
    from rich.console import Console

    return Console() if is_terminal else Console(width=_PLAIN_WIDTH)


class ProgressLine:
    """What is being done, on stderr: on a terminal a line that is rewritten; elsewhere a line now and then.

    The stages call it with a text and, where they know it, the share that is done.
    """

    def __init__(self, status: Status | None) -> None:
        self._status = status
        self._last_s = time.monotonic()

    def __call__(self, text: str, share: float | None = None) -> None:
        """Tell what is being done."""
        told = text if share is None else f"{text} ({share:.0%})"
        if self._status is not None:
            self._status.update(told)
        elif time.monotonic() - self._last_s >= _SECONDS_BETWEEN_LINES:  # so that logs stay short
            self._last_s = time.monotonic()
            click.echo(f"  {told}", err=True)


@contextmanager
def progress_shown() -> Iterator[ProgressLine]:
    """Show progress while the block runs."""
    if not sys.stderr.isatty():
        yield ProgressLine(None)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield ProgressLine(status)
