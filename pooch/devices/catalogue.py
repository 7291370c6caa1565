"""The catalogue of devices: the one that comes with Pooch, and the user's own, which goes before it."""

from __future__ import annotations

import difflib
import os
import tomllib
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import pydantic
import tomli_w

from pooch.devices.model import DeviceModel, Efficiency, LinkModel
from pooch.errors import FileFormatError, UsageError
from pooch.ir.files import replace_file

_GIB = 2**30


@dataclass(frozen=True)
class _Entry:
    """A device as it stands in a file; units as data sheets have them."""

    title: str
    kind: str
    memory_gib: float
    memory_gb_per_s: float
    tflops: dict[str, float]
    link: LinkModel
    efficiency: Efficiency = field(default_factory=Efficiency)
    tensor_cores: bool = True
    launch_us: float = 5.0
    copy_share: float = 0.0
    blas_workspace_mib: float = 8.125
    source: str = ""
    recalled: tuple[str, ...] = ()


_SHARED = tuple(each.name for each in fields(_Entry) if each.name != "memory_gib")
_READER = pydantic.TypeAdapter(_Entry)


def user_catalogue() -> Path:
    """Where the user's own devices stand."""
    root = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(root) / "pooch" / "devices.toml"


def known_devices() -> dict[str, DeviceModel]:
    """Every device by name: those of Pooch, then the user's own (which replace one of the same name).

    Raises:
        FileFormatError: the user's file cannot be read.
    """
    own = user_catalogue()
    text = files(__package__).joinpath("catalogue.toml").read_text(encoding="utf-8")
    return _parse(text, "catalogue.toml") | (read_catalogue(own) if own.exists() else {})


def find_device(name: str) -> DeviceModel:
    """The device of a name, or the one in a file.

    Args:
        name: such as "V100-PCIe" (in any case), "FILE.toml" that holds one device, or "FILE.toml:NAME".

    Raises:
        UsageError: there is no such device. FileFormatError: the file cannot be read.
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
    what = f"has no device {name!r}" if name is not None else "holds several devices"
    raise UsageError(f"{path} {what}: write {path}:NAME with one of {names}")


def read_catalogue(path: str | Path) -> dict[str, DeviceModel]:
    """The devices of a file.

    Raises:
        FileFormatError: missing, unreadable, no TOML, or with figures that make no sense.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise FileFormatError(f"cannot read {path}: {reason.lower()}: give a catalogue of devices") from error
    return _parse(text, str(path))


def _parse(text: str, name: str) -> dict[str, DeviceModel]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FileFormatError(f"{name} is no TOML ({error}): mend it, or make it again") from error
    defaults = tables.pop("defaults", {})
    models = {}
    for device, table in tables.items():
        if not isinstance(table, dict):
            raise FileFormatError(f"{name}: {device} is no table: write [{device}] and its figures below")
        models[device] = _model(device, {**defaults, **table}, name)
    if not models:
        raise FileFormatError(f"{name} holds no device: `pooch devices --measure` writes one")
    return models


def _model(device: str, table: dict[str, Any], name: str) -> DeviceModel:
    try:
        entry = _READER.validate_python(table)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise FileFormatError(f"{name}: [{device}] {place}: {first['msg'].lower()}: mend it") from error
    try:
        shared: dict[str, Any] = {each: getattr(entry, each) for each in _SHARED}
        return DeviceModel(name=device, memory_bytes=round(entry.memory_gib * _GIB), **shared)
    except UsageError as error:
        raise FileFormatError(f"{name}: {error}") from error


def write_device(model: DeviceModel, path: str | Path) -> None:
    """Add a device to a catalogue file, or replace the one of its name; the file is made where there is none.

    Raises:
        FileFormatError: the file is there but no catalogue, or cannot be written.
    """
    target = Path(path)
    models = read_catalogue(target) if target.exists() else {}
    models[model.name] = model
    target.parent.mkdir(parents=True, exist_ok=True)
    document = {name: _table(each) for name, each in models.items()}
    replace_file(target, tomli_w.dumps(document).encode())


def _table(model: DeviceModel) -> dict[str, Any]:
    table = {name: getattr(model, name) for name in _SHARED}
    nested = {"link": asdict(model.link), "efficiency": asdict(model.efficiency), "recalled": list(model.recalled)}
    return table | nested | {"memory_gib": model.memory_bytes / _GIB}
