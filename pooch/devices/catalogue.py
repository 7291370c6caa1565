"""The catalogue of devices: Pooch's own, and the user's, which takes precedence."""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import pydantic
import tomli_w

from ..ground.errors import FileFormatError, MissingFile, UsageError
from ..ground.reading import file_bytes
from ..ir.files import replace_file
from ..ir.validation import first_fault, validator_of
from .model import DeviceModel

_GIB = 2**30
_MOST_BYTES = 2**20  # of a file; a device takes less than a thousandth of it


def user_catalogue() -> Path:
    """The file with the user's own devices."""
    root = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(root) / "pooch" / "devices.toml"


def known_devices() -> dict[str, DeviceModel]:
    """Every device by name; the user's own take precedence.

    Raises:
        FileFormatError: the user's file cannot be read.
    """
    own = user_catalogue()
    text = files(__package__).joinpath("catalogue.toml").read_text(encoding="utf-8")
    return _parse(text, "catalogue.toml") | (read_catalogue(own) if own.exists() else {})


def find_device(name: str) -> DeviceModel:
    """The device with a name, or in a file.

    Args:
        name: such as "V100-PCIe" (case does not matter), "FILE.toml" with one device, or "FILE.toml:NAME".

    Raises:
        UsageError: there is no such device.
        FileFormatError: the file cannot be read.
    """
    path, colon, inside = name.rpartition(":") if ".toml:" in name else (name, "", "")
    if path.endswith(".toml"):
        return _only_one(read_catalogue(path), path, inside if colon else None)
    known = known_devices()
    found = {each.lower(): model for each, model in known.items()}.get(name.lower())
    if found is None:
        close = difflib.get_close_matches(name.lower(), [each.lower() for each in known], n=3, cutoff=0.4)
        names = [each for each in known if each.lower() in close] or list(known)
        raise UsageError(
            f"there is no device {name!r}: did you mean {', '.join(names)}? `pooch devices --all` lists them; "
            "`pooch devices --measure` adds this machine"
        )
    return found


def _only_one(models: dict[str, DeviceModel], path: str, name: str | None) -> DeviceModel:
    if name is not None and name in models:
        return models[name]
    if name is None and len(models) == 1:
        return next(iter(models.values()))
    names = ", ".join(models)
    what = f"has no device {name!r}" if name is not None else "has several devices"
    raise UsageError(f"{path} {what}: write {path}:NAME with one of {names}")


def read_catalogue(path: str | Path) -> dict[str, DeviceModel]:
    """The devices of a file.

    Raises:
        FileFormatError: the file is missing, unreadable or not TOML, or a figure is invalid.
    """
    try:
        text = file_bytes(path, _MOST_BYTES).decode()
    except FileNotFoundError as error:
        raise MissingFile(f"cannot read {path}: there is no such file: give a catalogue of devices") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise FileFormatError(f"cannot read {path}: {reason.lower()}: give a catalogue of devices") from error
    return _parse(text, str(path))


def _parse(text: str, name: str) -> dict[str, DeviceModel]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FileFormatError(f"{name} is not TOML ({error}): correct it, or make it again") from error
    except RecursionError as error:
        raise FileFormatError(f"{name} is nested too deeply for a catalogue of devices: check the path") from error
    except ValueError as error:  # a number with thousands of digits
        raise FileFormatError(f"{name} has a number that is too large: correct it") from error
    defaults = tables.pop("defaults", {})
    if not isinstance(defaults, dict):
        raise FileFormatError(f"{name}: defaults is not a table: write [defaults] and its figures below")
    models = {}
    for device, table in tables.items():
        if not isinstance(table, dict):
            raise FileFormatError(f"{name}: {device} is not a table: write [{device}] and its figures below")
        models[device] = _model(device, {**defaults, **table}, name)
    if not models:
        raise FileFormatError(f"{name} has no device: `pooch devices --measure` writes one")
    return models


def _model(device: str, table: dict[str, Any], name: str) -> DeviceModel:
    memory_gib = table.pop("memory_gib", None)
    if memory_gib is not None:
        is_number = isinstance(memory_gib, int | float) and math.isfinite(float(memory_gib) * _GIB)
        table["memory_bytes"] = round(memory_gib * _GIB) if is_number else memory_gib
    try:
        model: DeviceModel = validator_of(DeviceModel).validate_python({**table, "name": device})
    except pydantic.ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_input=False)
        if first["type"] == "value_error":  # of `DeviceModel` itself
            raise FileFormatError(f"{name}: {first['ctx']['error']}") from error
        fault = first_fault(error).replace("memory_bytes", "memory_gib")
        raise FileFormatError(f"{name}: [{device}] {fault}: correct it") from error
    return model


def write_device(model: DeviceModel, path: str | Path) -> None:
    """Add a device to a catalogue file, or replace the one with its name; the file is made if there is none.

    Raises:
        FileFormatError: the file exists but is not a catalogue, or cannot be written.
    """
    target = Path(path)
    models = read_catalogue(target) if target.exists() else {}
    models[model.name] = model
    target.parent.mkdir(parents=True, exist_ok=True)
    document = {name: _table(each) for name, each in models.items()}
    replace_file(target, tomli_w.dumps(document).encode())


def _table(model: DeviceModel) -> dict[str, Any]:
    table = asdict(model) | {"memory_gib": model.memory_bytes / _GIB, "recalled": list(model.recalled)}
    known = {key: value for key, value in table.items() if value is not None}
    return {key: value for key, value in known.items() if key not in ("name", "memory_bytes")}
