"""Output of commands: results on stdout as tables or JSON, progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType
    from rich.status import Status

_PLAIN_WIDTH = 120  # of tables in a file or a pipe
_SECONDS_BETWEEN_LINES = 2.0


def print_json(record: Mapping[str, object] | Sequence[Mapping[str, object]]) -> None:
    """Print one JSON document; numbers that JSON does not have raise an error."""
    click.echo(json.dumps(record, indent=2, allow_nan=False))


def print_tables(*tables: RenderableType) -> None:
    """Print tables as wide as the terminal, or of a fixed width in a pipe."""
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    for table in tables:
        console.print(table)


def print_written(*paths: Path | None) -> None:
    """Print which files were written."""
    for path in paths:
        if path is not None:
            click.echo(f"wrote {path}")


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
            self._status.update(shown)
        elif time.monotonic() - self._last_s >= _SECONDS_BETWEEN_LINES:  # to keep logs short
            self._last_s = time.monotonic()
            click.echo(f"  {shown}", err=True)


@contextmanager
def progress_shown() -> Iterator[ProgressLine]:
    """Show progress while the block runs."""
    if not sys.stderr.isatty():
        yield ProgressLine(None)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield ProgressLine(status)
