"""Blocks and offsets as CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path

from ..ground.errors import FileFormatError, MissingFile
from ..ground.reading import file_bytes
from ..ir.files import replace_file
from ..ir.layout import Block, Layout

COLUMNS = ("id", "lower", "upper", "size")
_ALIGNMENT = "alignment"


def load_blocks(path: str | Path) -> list[Block]:
    """Read blocks from a file with the columns id, lower, upper, size and, if it has one, alignment.

    Lifetimes are half-open: a block lives from `lower` until just before `upper`. Other columns are ignored.

    Raises:
        FileFormatError: missing or unreadable; a missing column; no blocks; an id that is there twice; a number that is
            not an integer; a negative size; lower >= upper; an alignment below 1.
    """
    try:
        text = file_bytes(path).decode("utf-8-sig")
        rows = csv.DictReader(io.StringIO(text), skipinitialspace=True)
        columns = [column.strip() for column in rows.fieldnames or []]
        rows.fieldnames = columns
        _check_columns(path, columns)
        blocks = [_block(row, f"{path}, line {rows.line_num}") for row in rows]
    except FileNotFoundError as error:
        raise MissingFile(f"{path} does not exist: check the path") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise FileFormatError(f"cannot read {path} ({reason}): give a CSV file of blocks") from error
    if not blocks:
        raise FileFormatError(f"{path} has no blocks: give at least one row below the header")
    seen: set[str] = set()
    for block in blocks:
        if block.name in seen:
            raise FileFormatError(f"{path} has the id {block.name!r} twice: give every block its own")
        seen.add(block.name)
    return blocks


def _check_columns(path: str | Path, columns: Sequence[str]) -> None:
    missing = [column for column in COLUMNS if column not in columns]
    if missing:
        wanted = ", ".join(COLUMNS)
        raise FileFormatError(f"{path} lacks the column {missing[0]!r}: its first line must name {wanted}[, alignment]")
    twice = [column for column in (*COLUMNS, _ALIGNMENT) if columns.count(column) > 1]
    if twice:
        raise FileFormatError(f"{path} has the column {twice[0]!r} twice: leave one of them out")


def _block(row: Mapping[str, str | None], place: str) -> Block:
    name = (row["id"] or "").strip()
    if not name:
        raise FileFormatError(f"{place}: the id is missing")
    lower, upper, size = (_integer(row, column, place) for column in COLUMNS[1:])
    alignment = _integer(row, _ALIGNMENT, place) if (row.get(_ALIGNMENT) or "").strip() else 1
    if lower >= upper:
        raise FileFormatError(f"{place}: lower is {lower} and upper {upper}, but upper must be larger than lower")
    if size < 0:
        raise FileFormatError(f"{place}: the size is {size}, but it must be 0 or more bytes")
    if alignment < 1:
        raise FileFormatError(f"{place}: the alignment is {alignment}, but it must be 1 or more bytes")
    return Block(lower, upper, size, alignment, name)


def _integer(row: Mapping[str, str | None], column: str, place: str) -> int:
    text = (row[column] or "").strip()
    try:
        return int(text)
    except ValueError:
        raise FileFormatError(f"{place}: {column} is {text!r}, but it must be an integer") from None


def save_offsets(path: str | Path, blocks: Sequence[Block], layout: Layout) -> None:
    """Write the blocks with their offsets, as they were read and with one column more.

    Parts of one value in a step have one name. The file can be packed again, so the second one is "gradient 11 (2)".

    Raises:
        FileFormatError: the file cannot be written.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*COLUMNS, _ALIGNMENT, "offset"])
    names = set[str]()
    for index, (block, offset) in enumerate(zip(blocks, layout.offsets, strict=True)):
        name = _unlike(block.name or str(index), names)
        names.add(name)
        writer.writerow([name, block.lower, block.upper, block.size_bytes, block.alignment_bytes, offset])
    replace_file(path, stream.getvalue().encode())


def _unlike(name: str, names: set[str]) -> str:
    """Return a name that is not among others: itself, or with the next number."""
    return next(each for each in chain([name], (f"{name} ({number})" for number in count(2))) if each not in names)
