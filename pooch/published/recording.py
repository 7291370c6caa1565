"""Records answers, one file per experiment. A recorded row is not answered again unless its question changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pydantic

from ..ground.errors import FileFormatError
from ..ground.reading import file_bytes
from ..ir.files import replace_file
from .rows import Answer, Row

FORMAT = "pooch-reproduction"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded answer.

    Attributes:
        fingerprint: of the row that was answered.
        answer: to it.
    """

    fingerprint: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class Record:
    """The file of one experiment.

    Attributes:
        format: identifies the kind of file.
        version: of the format.
        experiment: its name.
        answers: in the order in which they were recorded.
    """

    format: str
    version: int
    experiment: str
    answers: tuple[Recorded, ...]


def fingerprint(row: Row) -> str:
    """Return a digest of a row's question, without its titles."""
    asked = {key: value for key, value in asdict(row).items() if key not in ("title", "quick", "methods")}
    return hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=8).hexdigest()


class Recording:
    """The answers of one experiment, in memory and, if there is a folder, in a file.

    Args:
        experiment: its name.
        folder: holds NAME.json. None: nothing is written.

    Raises:
        FileFormatError: the file exists but cannot be read.
    """

    def __init__(self, experiment: str, folder: Path | None) -> None:
        self._experiment = experiment
        self._path = None if folder is None else folder / f"{experiment}.json"
        self._known: dict[tuple[str, str], Recorded] = {}
        if self._path is not None and self._path.exists():
            for each in _read(self._path, experiment).answers:
                self._known[each.answer.row, each.answer.method] = each

    def answer(self, row: Row, method: str) -> Answer | None:
        """Return the recorded answer to exactly this question, or None."""
        found = self._known.get((row.key, method))
        return found.answer if found is not None and found.fingerprint == fingerprint(row) else None

    def answers(self, rows: Iterable[Row]) -> tuple[Answer, ...]:
        """Return all recorded answers, in the order of rows and methods."""
        found = (self.answer(row, method) for row in rows for method in row.methods)
        return tuple(each for each in found if each is not None)

    def add(self, row: Row, answer: Answer) -> None:
        """Record an answer, and write the file.

        Raises:
            FileFormatError: the file cannot be written.
        """
        self._known[row.key, answer.method] = Recorded(fingerprint(row), answer)
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise FileFormatError(f"cannot make the folder {self._path.parent}: {error.strerror}") from error
            replace_file(self._path, self._text().encode())

    def _text(self) -> str:
        lines = [json.dumps(_without_nothing(asdict(each))) for each in self._known.values()]
        head = json.dumps({"format": FORMAT, "version": VERSION, "experiment": self._experiment})[:-1]
        return head + ', "answers": [\n' + ",\n".join(lines) + "\n]}\n"


def _without_nothing(record: dict[str, object]) -> dict[str, object]:
    answer = record["answer"]
    assert isinstance(answer, dict)
    return record | {"answer": {key: value for key, value in answer.items() if value not in (None, ())}}


def _read(path: Path, experiment: str) -> Record:
    remedy = f"delete it, and run `pooch reproduce {experiment}` again"
    try:
        record = pydantic.TypeAdapter(Record).validate_json(file_bytes(path))
    except OSError as error:
        raise FileFormatError(f"cannot read {path}: {error.strerror}") from error
    except pydantic.ValidationError as error:
        raise FileFormatError(f"{path} holds no recorded answers ({error.error_count()} faults): {remedy}") from error
    if (record.format, record.version, record.experiment) != (FORMAT, VERSION, experiment):
        raise FileFormatError(f"{path} holds answers of another kind ({record.format}, {record.experiment}): {remedy}")
    return record
