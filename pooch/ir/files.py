"""Profiles and plans as JSON files, which are checked when they are read.

A document is one JSON object: `format` and `version`, then the fields of the data class. Every error is one line that
names the file and the remedy; callers never see an error of the decoder.

Without the profile, some changes to a plan (two ops with their values exchanged, for example) cannot be told from a
correct plan. So a plan also has a checksum of its fields, and is refused if it was changed since it was made. White
space and the order of keys do not matter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from ..ground.errors import FileFormatError, MissingFile
from ..ground.reading import file_bytes
from .validation import first_fault, validator_of

_PART_OF_WORD = re.compile(r"[\\\w.+-]{0,9}")  # of a number, an escape or a literal, with nothing else after the error
_LONGEST = 2**16  # characters of a text, and texts of a list
_HEADER = ("format", "version", "checksum")


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of document.

    Attributes:
        newest_version: the version that is written.
        remedy: for a file that cannot be used.
        has_checksum: whether the newest version holds a checksum, which no older one has.
    """

    newest_version: int
    remedy: str
    has_checksum: bool = False


FORMATS = {
    "pooch-profile": Format(1, "record it again with `pooch profile`"),
    "pooch-plan": Format(2, "make it again with `pooch plan`", has_checksum=True),
}


@singledispatch
def fault_of(document: Document) -> str | None:
    """The first inconsistency of a document that types cannot express, or None.

    What checks a kind of document knows all of it, and is imported after it; so it registers here.
    """
    raise NotImplementedError(f"nothing checks a {type(document).__name__}")


class Document:
    """A data class that is kept as a file: a profile or a plan."""

    __slots__ = ()
    format_name: ClassVar[str]

    def fault(self) -> str | None:
        """The first inconsistency that types cannot express, or None."""
        return fault_of(self)

    def save(self, path: str | Path) -> None:
        """Write it as JSON.

        Raises:
            FileFormatError: the file cannot be written; an old file is still there.
        """
        replace_file(path, self.as_bytes())

    def as_bytes(self) -> bytes:
        """What its file holds."""
        return _to_text(self).encode()

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a saved one.

        Raises:
            FileFormatError: missing, unreadable, truncated, foreign, of a newer version, or inconsistent.
        """
        return load_document(path, cls)


Kind = TypeVar("Kind", bound=Document)


def load_document(path: str | Path, *kinds: type[Kind]) -> Kind:
    """Read a document of one of these kinds.

    Raises:
        FileFormatError: as `Document.load`.
    """
    return document_of(_bytes_of(path), path, *kinds)


def document_of(read: bytes, path: str | Path, *kinds: type[Kind]) -> Kind:
    """Take a document of one of these kinds from what its file holds.

    Args:
        read: the bytes of the file.
        path: the file, for messages.
        kinds: the kinds that it may be of.

    Raises:
        FileFormatError: as `Document.load`.
    """
    content = _object_of(read, path)
    found = _format_of(content, path)
    for kind in kinds:
        if kind.format_name == found:
            return _validated(kind, content, path)
    wanted = " or ".join(kind.format_name for kind in kinds)
    raise FileFormatError(f"{path} is a {found} file, not a {wanted} file: give the other one")


def replace_file(path: str | Path, content: bytes, *, follow_links: bool = True) -> None:
    """Write a file beside the target, then rename it: readers see the old file or the new one, never a part.

    Args:
        path: the target.
        content: what it is to hold.
        follow_links: where the target is a link, whether what it leads to is replaced, or the link itself.

    Raises:
        FileFormatError: the folder is missing or cannot be written to, the target is a folder, pipe or device, or the
            disk is full.
    """
    target = Path(os.path.realpath(path)) if follow_links else Path(path)
    # No other thread writes there, and nobody else can have put a link there.
    beside = target.with_name(f".{target.name[:100]}.{os.getpid()}.{secrets.token_hex(8)}.part")
    try:
        _check_target(target)
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        reason = (error.strerror or str(error)).lower()
        raise FileFormatError(
            f"cannot write {path}: {reason}: give a file in a folder that can be written to"
        ) from error


def _check_target(target: Path) -> None:
    """Refuse what a file would take the place of for good: root may rename one to /dev/null."""
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(None, "it is a folder")
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        raise OSError(None, "it is not a regular file")


def _to_text(document: Document) -> str:
    """One line per field and per list element, so that differences between versions are readable."""
    import pydantic_core

    kind = FORMATS[document.format_name]
    header: dict[str, Any] = {"format": document.format_name, "version": kind.newest_version}
    # Numbers that JSON does not have (nan for "cannot be replayed") become strings, which the reader accepts.
    fields = json.loads(pydantic_core.to_json(document, inf_nan_mode="strings"))
    if kind.has_checksum:
        header["checksum"] = checksum(fields)
    lines = [f"{json.dumps(key)}: {_field_text(value)}" for key, value in {**header, **fields}.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def checksum(fields: dict[str, Any]) -> str:
    """Digest of a document's fields, whatever their order and the white space in the file."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _field_text(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(_compact(element) for element in value) + "\n]"
    return _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _bytes_of(path: str | Path) -> bytes:
    try:
        return file_bytes(path)
    except FileNotFoundError as error:
        if str(path) == "-":
            raise MissingFile("'-' is not read as standard input: give the path of a file") from error
        raise MissingFile(f"{path} does not exist: check the path") from error
    except OSError as error:
        raise FileFormatError(f"cannot read {path}: {(error.strerror or str(error)).lower()}: check it") from error


def _object_of(read: bytes, path: str | Path) -> dict[str, Any]:
    try:
        text = read.decode("utf-8-sig")  # some editors begin a text with a byte order mark
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} is a binary file, not a Pooch profile or plan: check the path") from error
    try:
        content = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise FileFormatError(_not_json(path, text, error)) from error
    except _DuplicateKeyError as error:
        raise FileFormatError(f"{path} is damaged (it has the key {error} twice): make it again") from error
    except _TooLongError as error:
        raise FileFormatError(f"{path} is damaged ({error} is too long): make it again") from error
    except ValueError as error:  # a number with thousands of digits
        raise FileFormatError(f"{path} is damaged (it has a number that is too large): make it again") from error
    except RecursionError as error:
        raise FileFormatError(f"{path} is nested too deeply for a Pooch profile or plan: check the path") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"{path} holds JSON, but not a Pooch profile or plan: check the path")
    return content


class _DuplicateKeyError(Exception):
    """An object of a file has a key twice, so that its meaning is ambiguous."""


class _TooLongError(Exception):
    """A text of a file, or a list of texts, is longer than any that Pooch writes."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    for key, value in pairs:
        is_list = isinstance(value, list) and bool(value) and isinstance(value[0], str)
        if len(key) > _LONGEST or ((isinstance(value, str) or is_list) and len(value) > _LONGEST):
            raise _TooLongError(repr(key[:80]))
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKeyError(repr(next(key for key in keys if keys.count(key) > 1))[:80])
    return found


def _not_json(path: str | Path, text: str, error: json.JSONDecodeError) -> str:
    if not text.strip():
        return f"{path} is empty: make it again with `pooch profile` or `pooch plan`"
    ends_in_word = _PART_OF_WORD.fullmatch(text[error.pos :].rstrip()) is not None
    cut_off = ends_in_word or error.msg.startswith("Unterminated string")
    if cut_off and text.lstrip().startswith("{"):
        return f"{path} is truncated: make it again with `pooch profile` or `pooch plan`"
    return f"{path} is not JSON (line {error.lineno}), and not a Pooch profile or plan: check the path"


def _format_of(content: dict[str, Any], path: str | Path) -> str:
    name = content.get("format")
    if not isinstance(name, str) or name not in FORMATS:
        raise FileFormatError(f"{path} holds JSON, but not a Pooch profile or plan (no such format): check the path")
    version, kind = content.get("version"), FORMATS[name]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FileFormatError(f"{path} has the unreadable version {version!r}: {kind.remedy}")
    if version > kind.newest_version:
        raise FileFormatError(
            f"{path} has version {version}, written by a newer Pooch (this one reads up to {kind.newest_version}): "
            "upgrade Pooch"
        )
    return name


def _validated(cls: type[Kind], content: dict[str, Any], path: str | Path) -> Kind:
    import pydantic

    fields = {key: value for key, value in content.items() if key not in _HEADER}
    kind = FORMATS[cls.format_name]
    if kind.has_checksum and content["version"] < kind.newest_version:
        raise FileFormatError(f"{path} was written by an older Pooch, without a checksum: {kind.remedy}")
    try:
        document: Kind = validator_of(cls).validate_json(json.dumps(fields))
    except pydantic.ValidationError as error:
        raise FileFormatError(f"{path} is damaged ({first_fault(error)}): {kind.remedy}") from error
    fault = document.fault()
    if fault is not None:
        raise FileFormatError(f"{path} is inconsistent ({fault}): {kind.remedy}")
    if kind.has_checksum and content.get("checksum") != checksum(fields):
        raise FileFormatError(
            f"{path} was changed since it was made: {kind.remedy}, or make a plan of your own decisions with "
            "`pooch.plan_from_decisions`"
        )
    return document
