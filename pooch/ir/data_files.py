"""Tables that come with the package: TOML files beside its modules, of which nothing is executed."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any, TypeVar

from ..errors import FileFormatError
from .validation import first_fault

Entry = TypeVar("Entry")


def packaged_tables(package: str, name: str) -> dict[str, Any]:
    """Returns the tables of a file beside the modules of a package.

    Raises:
        FileFormatError: there is no such file, or it is not TOML.
    """
    try:
        return tomllib.loads((files(package) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{name} of {package} cannot be read ({error}): install Pooch again") from error


def checked_entry(kind: type[Entry], tables: dict[str, Any], name: str) -> Entry:
    """Returns tables as a data class, whose fields have these names and types, and no others.

    Args:
        kind: the data class.
        tables: its fields.
        name: of the file, for messages.

    Raises:
        FileFormatError: a field is missing, unknown, or of another type.
    """
    import pydantic

    adapter = pydantic.TypeAdapter(tuple[kind], config=pydantic.ConfigDict(extra="forbid"))  # type: ignore[valid-type]
    try:
        (made,) = adapter.validate_python((tables,))
    except pydantic.ValidationError as error:
        fault = first_fault(error).partition(".")[2]
        raise FileFormatError(f"{name}: {fault}: correct it") from error
    return made
