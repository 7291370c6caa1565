"""`--set key=value` for workloads: parsing, and telling which keys a workload knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pooch.errors import UsageError

Setting = int | float | bool | str
Settings = Mapping[str, Setting]

_WORDS: dict[str, bool] = {"true": True, "false": False}


def parse_setting_value(text: str) -> Setting:
    """Read a value as int, float or bool where it looks like one; else it stays text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_settings(texts: Iterable[str]) -> dict[str, Setting]:
    """Turn `["image_size=64"]` into `{"image_size": 64}`.

    Raises:
        UsageError: a text is no `key=value`, or a key is given twice.
    """
    settings: dict[str, Setting] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise UsageError(f"the setting {text!r} is not of the form key=value: write, say, --set image_size=64")
        if key in settings:
            raise UsageError(f"the setting {key!r} is given twice: give it once")
        settings[key] = parse_setting_value(value.strip())
    return settings


def check_batch_size(batch_size: int | None) -> None:
    """Refuse a batch of no items (`None` means the workload's default).

    Raises:
        UsageError: the batch size is zero or negative.
    """
    if batch_size is not None and batch_size <= 0:
        raise UsageError(f"the batch size {batch_size} is not positive: give --batch-size 1 or more")


def call_arguments(
    function: Callable[..., Any], name: str, *, batch_size: int | None, device: str | None, settings: Settings
) -> dict[str, Any]:
    """Keyword arguments for a workload function, after checking that it takes them.

    What was not asked for is left to the function's own defaults; a function that has no parameter for
    something that nobody asked for is simply called without it.

    Raises:
        UsageError: something was asked for that the function does not take, or the other way round.
    """
    known, takes_any = _keywords(function)
    given: dict[str, Any] = {"batch_size": batch_size, "device": device, **settings}
    arguments = {key: value for key, value in given.items() if value is not None}
    unknown = [] if takes_any else [key for key in arguments if key not in known]
    if unknown:
        accepted = ", ".join(known) or "nothing"
        raise UsageError(f"workload {name!r} takes no {unknown[0]!r}: it takes {accepted}")
    missing = [key for key, is_required in known.items() if is_required and key not in arguments]
    if missing:
        option = "--batch-size N" if missing[0] == "batch_size" else f"--set {missing[0]}=VALUE"
        raise UsageError(f"workload {name!r} needs {missing[0]!r}: give {option}")
    return arguments


def _keywords(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Names of the parameters, each with whether it is required; and whether any other is taken as well."""
    known: dict[str, bool] = {}
    takes_any = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            known[parameter.name] = parameter.default is inspect.Parameter.empty
    return known, takes_any
