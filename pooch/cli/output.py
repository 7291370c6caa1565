"""Output of commands: results on stdout as tables or JSON, progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ..visible import visible

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.status import Status

_PLAIN_WIDTH = 120  # of tables in a file or a pipe
_SECONDS_BETWEEN_LINES = 2.0


def print_json(record: Mapping[str, object] | Sequence[Mapping[str, object]]) -> None:
    """Print one JSON document; numbers that JSON does not have raise an error."""
    click.echo(json.dumps(record, indent=2, allow_nan=False))


def say(text: str, *, err: bool = False) -> None:
    """Print a line, on stderr if asked for."""
    click.echo(visible(text), err=err)


class _Visible:
    """A table whose texts cannot steer the terminal.

    Args:
        table: the table.
    """

    def __init__(self, table: RenderableType) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        for text, style, control in console.render(self._table, options):
            yield Segment(text if control else visible(text), style, control)


def print_tables(*tables: RenderableType) -> None:
    """Print tables as wide as the terminal, or of a fixed width in a pipe."""
    from rich.console import Console

    how: dict[str, Any] = {} if sys.stdout.isatty() else {"width": _PLAIN_WIDTH}
    console = Console(markup=False, **how)  # brackets in a name are no markup
    for table in tables:
        console.print(_Visible(table))


def print_written(*paths: Path | None) -> None:
    """Print which files were written."""
    for path in paths:
        if path is not None:
            say(f"wrote {path}")


class ProgressLine:
    """Progress on stderr: a line that is rewritten on a terminal, elsewhere a line every few seconds.

    Args:
        status: the line on the terminal. None: there is no terminal.
    """

    def __init__(self, status: Status | None) -> None:
        self._status = status
        self._last_s = time.monotonic()

    def __call__(self, text: str, share: float | None = None) -> None:
        """Show what is being done and, if it is known, the share that is done."""
        shown = text if share is None else f"{text} ({share:.0%})"
        if self._status is not None:
            self._status.update(visible(shown))
        elif time.monotonic() - self._last_s >= _SECONDS_BETWEEN_LINES:  # to keep logs short
            self._last_s = time.monotonic()
            say(f"  {shown}", err=True)


@contextmanager
def progress_shown() -> Iterator[ProgressLine]:
    """Show progress while the block runs."""
    if not sys.stderr.isatty():
        yield ProgressLine(None)
        return
    from rich.console import Console

    with Console(stderr=True, markup=False).status("starting") as status:
        yield ProgressLine(status)
