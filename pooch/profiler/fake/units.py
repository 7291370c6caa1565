"""How FSDP2 and DDP would divide a model: its units, and the bytes of each as they are gathered and reduced."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from ...analysis.sharding import Unit
from ...ground.errors import UsageError


def units_of(model: nn.Module, ranks: int, unit_class: str | None = None, *, divided: bool = True) -> tuple[Unit, ...]:
    """Returns the units, the root first: it has all parameters that are in no other unit, or in several.

    Args:
        model: whole; its tensors may be fake.
        ranks: among which dimension 0 of each parameter is divided. It is padded so that all pieces are equal.
        unit_class: name of the class of modules that are units. By default, these are the modules of the model's lists
            of modules (`nn.ModuleList`), which is where repeated blocks are.
        divided: whether there are units at all. If not, all parameters are the root's.

    Raises:
        UsageError: the model has no such modules.
    """
    modules = _unit_modules(model, unit_class) if divided else {}
    holders: dict[torch.nn.Parameter, list[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters():
            holders.setdefault(parameter, []).append(name)
    parameters: dict[str, list[torch.nn.Parameter]] = {"": [], **{name: [] for name in modules}}
    for parameter in model.parameters():
        names = holders.get(parameter, [])
        parameters[names[0] if len(names) == 1 else ""].append(parameter)
    return tuple(_unit(name, of_unit, ranks) for name, of_unit in parameters.items() if of_unit or not name)


def _unit_modules(model: nn.Module, unit_class: str | None) -> dict[str, nn.Module]:
    named = {name: module for name, module in model.named_modules() if name}
    if unit_class is not None:
        found = _outermost({name: module for name, module in named.items() if type(module).__name__ == unit_class})
        if not found:
            known = {type(module).__name__ for module in named.values() if next(module.parameters(), None) is not None}
            names = ", ".join(sorted(known))
            raise UsageError(f"the model has no module of class {unit_class!r}: give --unit one of {names}")
        return found
    lists = _outermost({name: module for name, module in named.items() if isinstance(module, nn.ModuleList)})
    blocks = {f"{name}.{place}": block for name, each in lists.items() for place, block in each.named_children()}
    blocks = {name: block for name, block in blocks.items() if next(block.parameters(), None) is not None}
    if not blocks:
        raise UsageError("the model has no nn.ModuleList, so its units are not known: name their class with --unit")
    return blocks


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        name: module for name, module in modules.items() if not any(name.startswith(f"{other}.") for other in modules)
    }


def _unit(name: str, parameters: Iterable[torch.nn.Parameter], ranks: int) -> Unit:
    parameters = list(parameters)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return Unit(
        name,
        parameter_bytes=sum(map(_bytes, parameters)),
        trained_bytes=sum(map(_bytes, trained)),
        gathered_bytes=sum(_padded_bytes(parameter, ranks) for parameter in parameters),
        reduced_bytes=sum(_padded_bytes(parameter, ranks) for parameter in trained),
    )


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _padded_bytes(parameter: torch.Tensor, ranks: int) -> int:
    """Returns the bytes of the parameter with as many rows as all ranks have together, each as many."""
    rows = parameter.shape[0] if parameter.ndim else 1
    row_bytes = _bytes(parameter) // rows if rows else 0
    return math.ceil(rows / ranks) * ranks * row_bytes
