"""Checks what was read from a file against the data class that it is to become.

Only the first fault is told, so no more are looked for: a file with a million faults would make a million texts.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from ..ground.errors import FileFormatError

if TYPE_CHECKING:
    import pydantic
    import pydantic_core

Entry = TypeVar("Entry")
_COLLECTIONS = ("list", "tuple", "dict")


def validator_of(kind: type) -> pydantic_core.SchemaValidator:
    """Return what checks values of a data class and makes them. It stops at the first faulty element of a collection.

    Args:
        kind: The data class.
    """
    return _made(kind)


@cache
def _made(kind: Any) -> pydantic_core.SchemaValidator:
    import pydantic
    import pydantic_core

    stopping = tuple(each for each in _COLLECTIONS if _can_stop(each))
    schema: Any = pydantic.TypeAdapter(kind).core_schema
    return pydantic_core.SchemaValidator(_failing_fast(schema, stopping))


def _failing_fast(schema: Any, stopping: tuple[str, ...]) -> Any:
    """Return a schema of pydantic in which collections stop at their first fault.

    `pydantic.FailFast` does that for a field, but the data classes are imported where pydantic is not.
    """
    if isinstance(schema, dict):
        changed = {key: _failing_fast(value, stopping) for key, value in schema.items()}
        return changed | {"fail_fast": True} if schema.get("type") in stopping else changed
    if isinstance(schema, list):
        return [_failing_fast(each, stopping) for each in schema]
    return schema


def _can_stop(collection: str) -> bool:
    """Whether this version of pydantic can stop at the first fault of such a collection."""
    from pydantic_core import core_schema

    return "fail_fast" in getattr(core_schema, f"{collection.title()}Schema").__annotations__


def first_fault(error: pydantic.ValidationError) -> str:
    """Return where the first fault is and what it is, in one line."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg'].lower()}"


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
