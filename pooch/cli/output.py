"""Output of commands: results on stdout as tables or JSON, progress on stderr."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ..ground.visible import visible
from .phases import FIRST_SIGN_S, SHORTEST_S, Phases

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

_PLAIN_WIDTH = 120  # of tables in a file or a pipe


_printed: list[None] = []  # documents of this command


def print_json(record: Mapping[str, object] | Sequence[Mapping[str, object]]) -> None:
    """Print one JSON document; numbers that JSON does not have raise an error."""
    text = json.dumps(record, indent=2, allow_nan=False)
    _printed.append(None)
    click.echo(text)


def has_printed_json() -> bool:
    """Whether the command has printed its document."""
    return bool(_printed)


def forget_printed() -> None:
    """Begin another command."""
    _printed.clear()


def say(text: str, *, err: bool = False) -> None:
    """Print a line, on stderr if asked for."""
    click.echo(visible(text), err=err)


class _Visible:
    """A table whose texts cannot steer the terminal."""

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


def command_line() -> str:
    """What the user has typed, for files that say what they were written by."""
    return shlex.join(["pooch", *sys.argv[1:]])


def print_written(*paths: Path | None) -> None:
    """Print which files were written."""
    for path in paths:
        if path is not None:
            say(f"wrote {path}")


class ProgressLine:
    """Progress on stderr: a line that is rewritten on a terminal, elsewhere a line at the end of each longer phase.

    Args:
        phases: what a command is in.
        is_terminal: whether something else shows the phases, as often as it likes.
    """

    def __init__(self, phases: Phases, *, is_terminal: bool) -> None:
        self._phases, self._is_terminal = phases, is_terminal
        self._next_sign_s = FIRST_SIGN_S

    def __call__(self, text: str, share: float | None = None) -> None:
        """Show what is being done and, if it is known, the share that is done."""
        if self._phases.is_new(text):
            self.end()
        self._phases.update(text, share)
        is_over = self._phases.share is not None and self._phases.share >= 1
        if not self._is_terminal and not is_over and self._phases.phase_elapsed_s >= self._next_sign_s:
            self._next_sign_s *= 2  # to keep logs short
            say(f"  {self._phases.going_on()}", err=True)

    def end(self) -> None:
        """End the phase."""
        self._next_sign_s = FIRST_SIGN_S
        if not self._is_terminal and self._phases.name and self._phases.phase_elapsed_s >= SHORTEST_S:
            say(f"  {self._phases.ended()}", err=True)


class _RewrittenLine:
    """The phases as rich shows them, with times that go on."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(visible(self._phases.line()), no_wrap=True, overflow="ellipsis")


@contextmanager
def progress_shown(**limits_s: float) -> Iterator[ProgressLine]:
    """Show progress while the block runs.

    Args:
        **limits_s: the time that phases may take whose names begin so, together.
    """
    phases = Phases({name.replace("everything", ""): limit_s for name, limit_s in limits_s.items()})
    if not sys.stderr.isatty():
        progress = ProgressLine(phases, is_terminal=False)
        try:
            yield progress
        finally:
            progress.end()
        return
    from rich.console import Console

    with Console(stderr=True, markup=False).status(_RewrittenLine(phases)):
        yield ProgressLine(phases, is_terminal=True)
