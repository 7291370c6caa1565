"""Values of options that are checked before a command does any work."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from ..ground.errors import TierError, UsageError

_DEVICE = re.compile(r"(cpu|cuda)(:\d+)?")
_OWN_DEVICE = re.compile(r"([a-z]\w*)(:\d+)?")


def device_name(context: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    """Refuse a device that does not exist; whether it is in this machine is `refuse_missing_device`'s question.

    Raises:
        UsageError: there is none of that name.
    """
    if name is None or _DEVICE.fullmatch(name) or _is_another_accelerator(name):
        return name
    raise UsageError(f"there is no device {name!r}: {parameter.opts[0]} takes cpu or cuda")


def _is_another_accelerator(name: str) -> bool:
    """Whether it is an accelerator of another kind, which this machine has."""
    matched = _OWN_DEVICE.fullmatch(name)
    if matched is None:
        return False
    from ..torchtools.accelerators import all_accelerators

    return matched.group(1) in {each.type for each in all_accelerators()}


def refuse_missing_device(name: str | None) -> None:
    """Refuse a GPU that this process cannot use.

    Raises:
        UsageError: PyTorch has no CUDA, or there is no such device.
    """
    kind, _, number = (name or "cpu").partition(":")
    if kind == "cpu":
        return
    import torch

    module = torch.get_device_module(kind)
    is_built = getattr(getattr(torch.backends, kind, None), "is_built", None)
    if is_built is not None and not is_built():
        name = kind.upper()
        raise UsageError(f"this PyTorch has no {name}: install a {name} build, or use --device cpu")
    if not module.is_available():
        raise UsageError(f"PyTorch finds no {kind} device here: check its driver, or use --device cpu")
    count = module.device_count()
    if number and int(number) >= count:
        raise UsageError(f"there is no {name}: this machine has {kind}:0 to {kind}:{count - 1}")


def spill_directory(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Use a directory for what leaves memory, while the command runs.

    Raises:
        UsageError: it cannot take files.
    """
    if path is not None:
        before = use_spill_directory(path)
        context.call_on_close(lambda: _restore(before))
    return path


def use_spill_directory(path: Path) -> str | None:
    """Use a directory for what leaves memory, in this process and those that it starts, once a file was opened there.

    Returns:
        The directory that was named before.

    Raises:
        UsageError: it cannot take files.
    """
    from ..torchtools.spill_directory import VARIABLE, SpillDirectory

    try:
        os.close(SpillDirectory(path, is_argument=False).open_unnamed())
    except TierError as error:
        raise UsageError(str(error).replace(VARIABLE, "--spill-directory")) from error
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(path.resolve())
    return before


def _restore(before: str | None) -> None:
    from ..torchtools.spill_directory import VARIABLE

    if before is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = before
