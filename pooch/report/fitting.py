"""Tables that fit the terminal: where it is narrow, columns go and labels are shortened, and no cell is folded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from ..ground.visible import visible

Kind = Literal["figure", "figures", "word", "label", "text"]
_LEAST = {"figures": 16, "label": 12, "text": 20}  # cells, where there is more to show
_LONGEST_WORD = 26  # in a wrapped cell; what is longer is parted or shortened
_WORDS = re.compile(r"\S*\d[,.]?(?: (?:[KMGT]?i?B|[mu]?s|h)\b\S*)|\S+")  # figures with their units
_ON_THE_RIGHT, _WRAPPED = ("figure", "figures"), ("figures", "text")
_BETWEEN = 2  # cells between two columns, and as many at the edges together


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        heading: above the cells, in one line unless the cells are wrapped too.
        kind: a figure (on the right) or a word (on the left) is always shown whole, a label may be shortened in the
            middle, several figures (on the right) and a text are wrapped between words.
        drop: where room is short, the columns with the highest number go first, all of them together. 0: it stays.
        least: cells that a label keeps as long as other columns can go. 0: what is usual.
    """

    heading: str
    kind: Kind = "figure"
    drop: int = 0
    least: int = 0


class FittedTable:
    """A table that is never wider than the terminal.

    Where columns that have to stay do not fit, they go on in a second table under the first one.

    Args:
        title: above the table.
        columns: from left to right; the first one names the rows.
        explanations: of columns, by their headings; the title has those of the columns that are shown.
    """

    def __init__(
        self, title: str, columns: Sequence[Column], *, explanations: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._title = title
        self._columns = tuple(columns)
        self._explanations = explanations
        self._rows: list[tuple[Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a row: a cell for each column; a `Text` brings its style along."""
        assert len(cells) == len(self._columns), (cells, self._columns)
        self._rows.append(tuple(_clean(cell) for cell in cells))

    def whole(self) -> Table:
        """Return all columns and rows, for where there is room."""
        table = Table(title=self._title)
        for column in self._columns:
            table.add_column(column.heading, justify="right" if column.kind in _ON_THE_RIGHT else "left")
        for row in self._rows:
            table.add_row(*row)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        width = options.max_width
        shown = self._kept(width)
        headings = {self._columns[place].heading for place in shown}
        told = "; ".join(text for heading, text in self._explanations.items() if heading in headings)
        yield Text(visible(self._title) + (f" ({told})" if told else ""), style="bold")
        for part in self._parts(shown, width):
            yield self._drawn(part, width)
        dropped = [column.heading for place, column in enumerate(self._columns) if place not in shown]
        if dropped:
            yield Text(f"not shown in {width} columns: {', '.join(dropped)}\n", style="dim")

    def _kept(self, width: int) -> list[int]:
        """The places of the columns that stay."""
        places = list(range(len(self._columns)))
        while self._least_sum(places) > width:
            first = max(self._columns[place].drop for place in places)
            if not first:
                break
            places = [place for place in places if self._columns[place].drop != first]
        return places

    def _parts(self, places: list[int], width: int) -> list[list[int]]:
        """The columns of each table, as many as fit; each begins with the column that names the rows."""
        parts = [places[:1]]
        for place in places[1:]:
            if len(parts[-1]) > 1 and self._least_sum([*parts[-1], place]) > width:
                parts.append(places[:1])
            parts[-1].append(place)
        return parts

    def _least_sum(self, places: Sequence[int]) -> int:
        return sum(self._least(place) + _BETWEEN for place in places)

    def _least(self, place: int) -> int:
        column, natural = self._columns[place], self._natural(place)
        if column.kind not in _WRAPPED:
            return min(natural, max(column.least or _LEAST.get(column.kind, natural), cell_len(column.heading)))
        cells = (row[place].plain for row in self._rows)
        longest = max(cell_len(word) for text in (column.heading, *cells) for word in _WORDS.findall(text) or [""])
        return min(natural, max(_LEAST[column.kind], min(longest, _LONGEST_WORD)))

    def _natural(self, place: int) -> int:
        heading = cell_len(self._columns[place].heading)
        return max([heading, *(cell_len(row[place].plain) for row in self._rows)])

    def _widths(self, places: Sequence[int], width: int) -> dict[int, int]:
        """The widest that fit: what is left over goes to the narrowest of those that could use it."""
        widths = {place: self._least(place) for place in places}
        left = width - self._least_sum(places)
        while left > 0:
            wanting = [place for place in places if widths[place] < self._natural(place)]
            if not wanting:
                break
            widths[min(wanting, key=lambda place: widths[place])] += 1
            left -= 1
        return widths

    def _drawn(self, places: Sequence[int], width: int) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        widths = self._widths(places, width)
        for place in places:
            column = self._columns[place]
            justify: Literal["left", "right"] = "right" if column.kind in _ON_THE_RIGHT else "left"
            is_whole = column.kind not in _WRAPPED
            table.add_column(
                column.heading, justify=justify, width=widths[place], no_wrap=is_whole, overflow="ellipsis"
            )
        for row in self._rows:
            table.add_row(*(_fitted(row[place], widths[place], self._columns[place].kind) for place in places))
        return table


def shortened(text: str, width: int) -> str:
    """The text in at most so many cells: without its middle where it is too long."""
    if cell_len(text) <= width:
        return text
    tail = width // 2  # what tells labels of one layer apart is at their end
    head = width - 1 - tail
    while cell_len(text[:head]) > width - 1 - tail:
        head -= 1
    while tail and cell_len(text[-tail:]) > width // 2:
        tail -= 1
    return f"{text[:head].rstrip('.')}…{text[len(text) - tail :].lstrip('.')}"


def _clean(cell: str | Text) -> Text:
    """One line that cannot steer the terminal."""
    plain, style = (cell.plain, cell.style) if isinstance(cell, Text) else (cell, "")
    return Text(" ".join(visible(plain).split()), style=style)


def _fitted(cell: Text, width: int, kind: Kind) -> Text:
    if kind == "label":
        return Text(shortened(cell.plain, width), style=cell.style)
    if kind in _WRAPPED:
        return Text("\n".join(_lines(cell.plain, width)), style=cell.style)
    return cell


def _lines(text: str, width: int) -> Iterator[str]:
    """The text in lines that end between words, never between a figure and its unit."""
    line = ""
    for word in (part for whole in _WORDS.findall(text) for part in _parted(whole, width)):
        if line and cell_len(line) + 1 + cell_len(word) > width:
            yield line
            line = ""
        line = f"{line} {word}" if line else word
    yield line


def _parted(word: str, width: int) -> Iterator[str]:
    """The word, or of a longer one its parts after strokes, as in an address."""
    part = ""
    for piece in re.findall(r"[^/]+/?|/", word) if cell_len(word) > width else [word]:
        if part and cell_len(part + piece) > width:
            yield shortened(part, width)
            part = ""
        part += piece
    yield shortened(part, width)
