"""`--set key=value` for workloads: parsing, and checking which keys a workload takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..ground.errors import UsageError

Setting = int | float | bool | str

_WORDS: dict[str, bool] = {"true": True, "false": False}


def parse_setting_value(text: str) -> Setting:
    """Read a value as an int, float or bool if it looks like one."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_settings(texts: Iterable[str]) -> dict[str, Setting]:
    """Convert `["image_size=64"]` to `{"image_size": 64}`.

    Raises:
        UsageError: a text is not of the form `key=value`, or a key is given twice.
    """
    settings: dict[str, Setting] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise UsageError(
                f"the setting {text!r} is not of the form key=value: write --set image_size=64, for example"
            )
        if key in settings:
            raise UsageError(f"the setting {key!r} is given twice: give it once")
        settings[key] = parse_setting_value(value.strip())
    return settings


def call_arguments(
    function: Callable[..., Any], name: str, *, device: str | None, settings: Mapping[str, Setting]
) -> dict[str, Any]:
    """Keyword arguments for a workload function, after checking that it takes them.

    The device is optional; other arguments keep the defaults of the function unless they are given.

    Raises:
        UsageError: the function does not take an argument, or needs another one.
    """
    known, takes_any = _keywords(function)
    arguments: dict[str, Any] = {**settings} if device is None else {"device": device, **settings}
    unknown = [] if takes_any else [key for key in arguments if key not in known]
    if unknown:
        accepted = ", ".join(known) or "nothing"
        raise UsageError(f"workload {name!r} does not take {unknown[0]!r}: it takes {accepted}")
    missing = [key for key, is_required in known.items() if is_required and key not in arguments]
    if missing:
        option = "--batch-size N" if missing[0] == "batch_size" else f"--set {missing[0]}=VALUE"
        raise UsageError(f"workload {name!r} needs {missing[0]!r}: give {option}")
    return arguments


def _keywords(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Names of the parameters, whether each is required, and whether the function takes any others."""
    known: dict[str, bool] = {}
    takes_any = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            known[parameter.name] = parameter.default is inspect.Parameter.empty
    return known, takes_any
