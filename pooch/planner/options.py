"""Parameters of policies by name, such as how many tensors TFLMS swaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass, replace
from typing import Any

from ..ground.errors import UsageError
from .contract import Policy

FIXED = ("order",)  # fields that make it another policy


def option_names(policy: Policy) -> dict[str, object]:
    """The parameters of a policy with their defaults; most have none."""
    return {field.name: getattr(policy, field.name) for field in _fields(policy)}


def with_options(policy: Policy, name: str, options: Mapping[str, object]) -> Policy:
    """The policy with these parameters; strings are parsed as the type of the default.

    Raises:
        UsageError: it has no such parameter, or the value does not parse.
    """
    known = option_names(policy)
    for option in options:
        if option not in known:
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise UsageError(f"policy {name} has no option {option!r}: {there}")
    if not options:
        return policy
    read = {option: _read(name, option, value, known[option]) for option, value in options.items()}
    changed: Policy = replace(policy, **read)  # type: ignore[type-var]
    return changed


def described(name: str, options: Mapping[str, object]) -> str:
    """The policy's name with its parameters, such as "tflms(lb=2)"."""
    given = ", ".join(f"{option}={value}" for option, value in options.items())
    return f"{name}({given})" if given else name


def _fields(policy: Policy) -> tuple[Field[Any], ...]:
    if not is_dataclass(policy):
        return ()
    return tuple(field for field in fields(policy) if field.name not in FIXED)


def _read(policy: str, option: str, value: object, default: object) -> object:
    if isinstance(default, bool):
        return _read_switch(policy, option, value)
    try:
        return type(default)(value)  # type: ignore[call-arg]
    except (TypeError, ValueError):
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise UsageError(f"option {option} of policy {policy} is {value!r}: give {kind}, such as {default}") from None


def _read_switch(policy: str, option: str, value: object) -> bool:
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    read = known.get(str(value).lower())
    if read is None:
        raise UsageError(f"option {option} of policy {policy} is {value!r}: give true or false")
    return read
