"""From the name of a workload (`resnet50`, `train.py:make`, `model.onnx`) to a checked `Workload`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..ground.errors import PoochError, UnknownWorkload, UsageError, WorkloadError, first_line
from ..ground.plugins import provided
from .base import Workload
from .catalogue import built_in_workloads
from .registry import BATCH_SIZE, BuiltIn, Growth
from .settings import Setting, call_arguments
from .user_file import load_function

SEED = 1234  # of every build and every training, so that they can be compared


def load_workload(
    name: str,
    *,
    batch_size: int | None = None,
    device: str | None = None,
    settings: Mapping[str, Setting] | None = None,
) -> Workload:
    """Build a workload from the same random numbers each time, without changing the caller's random states.

    Args:
        name: a built-in name, one with a size (`resnet50@pooch`), `file.py:function` or `model.onnx`.
        batch_size: passed to the function. None: its default.
        device: passed to the function. None: its default.
        settings: further keyword arguments. These three take precedence over those of a size.

    Raises:
        UsageError: the batch size is not positive, or the function does not take an argument.
        WorkloadError: the workload is unknown, cannot be loaded, or does not return a valid `Workload`.
    """
    from ..torchtools.training_state import seeded

    if batch_size is not None and batch_size <= 0:
        raise UsageError(f"the batch size {batch_size} is not positive: give --batch-size 1 or more")
    with seeded(SEED):  # importing the user's file may draw random numbers too
        function, defaults = find_function(name)
        given = {**defaults, **(settings or {})}
        if batch_size is not None:
            given["batch_size"] = batch_size
        arguments = call_arguments(function, name, device=device, settings=given)
        return _complete(_call(function, name, arguments), name, arguments)


@dataclass(frozen=True)
class WorkloadFactory:
    """Builds the same workload at each call, with the same weights and data. It can be passed to another process.

    The fields are as `load_workload` takes them.
    """

    name: str
    batch_size: int | None = None
    device: str | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def __call__(self) -> Workload:
        """Build the workload."""
        return load_workload(self.name, batch_size=self.batch_size, device=self.device, settings=self.settings)


def find_function(name: str) -> tuple[Callable[..., Any], dict[str, Setting]]:
    """The function that builds a workload, and the settings that belong to the name.

    Raises:
        UsageError: the built-in workload has no such size.
        UnknownWorkload: there is no such workload.
    """
    entry = built_in(name)
    if entry is not None:
        _, _, size = name.partition("@")
        preset = dict(entry.preset(size).settings) if "@" in name else {}
        return entry.function(), dict(entry.defaults or {}) | preset
    for suffix, reader in provided("workload_files").items():
        if name.endswith(suffix):
            return reader.load()(name), {}
    path, colon, function_name = name.rpartition(":")
    if colon and path and function_name:
        return load_function(path, function_name), {}
    raise UnknownWorkload(_unknown(name))


def built_in(name: str) -> BuiltIn | None:
    """The built-in workload of a name with or without a size; None if there is none."""
    return built_in_workloads().get(name.partition("@")[0])


def workload_growth(name: str, setting: str = "batch_size") -> Growth:
    """How a setting makes the step of a workload larger: its smallest value and the distance between legal values.

    Any setting of a user's function is taken to grow in steps of 1.

    Raises:
        UsageError: the setting does not make that built-in workload larger.
    """
    entry = built_in(name)
    if entry is not None:
        return entry.growth(setting)
    return BATCH_SIZE if setting == BATCH_SIZE.setting else Growth(setting)


def _unknown(name: str) -> str:
    if name.endswith((".py", ".py:")):
        return f"the workload {name!r} names no function: write {name.rstrip(':')}:function"
    close = difflib.get_close_matches(name, built_in_workloads(), n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(built_in_workloads())}"
    return f"there is no workload {name!r}: {hint}; or give file.py:function or model.onnx"


def _call(function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> object:
    try:
        return function(**arguments)
    except PoochError:
        raise
    except (Exception, SystemExit) as error:  # an error in the user's function, or an invalid setting
        raise WorkloadError(
            f"building workload {name!r} raised {type(error).__name__}: {first_line(error)}: "
            "check its function and the settings given to it"
        ) from error


def _complete(built: object, name: str, arguments: Mapping[str, Any]) -> Workload:
    """Check what a builder returned, and add the name and the batch size if they are missing."""
    if not isinstance(built, Workload):
        kind = type(built).__name__
        raise WorkloadError(
            f"workload {name!r} returned {kind}: it must return pooch.Workload(model, forward, optimizer)"
        )
    _check_parts(built, name)
    batch_size = built.batch_size or int(arguments.get("batch_size", 0))
    return replace(built, name=built.name or name, batch_size=batch_size)


def _check_parts(built: Workload, name: str) -> None:
    import torch

    model: object = built.model  # the annotation may be wrong
    optimizer: object = built.optimizer
    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(f"the model of workload {name!r} is {type(model).__name__}: give a torch.nn.Module")
    if not callable(built.forward):
        raise WorkloadError(f"the forward of workload {name!r} is not callable: give a function that returns the loss")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise WorkloadError(f"the optimizer of workload {name!r} is {kind}: give a torch.optim.Optimizer or None")
