"""The parameters that FSDP gathers: which of its units each belongs to, and whether they are there."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# The op that copies what a collective gathered into the storages of the unit's parameters. What any other op writes
# there cannot be gathered again.
GATHERING = "fsdp.split_with_sizes_copy.default"


@dataclass(frozen=True, slots=True)
class ShardedUnit:
    """A group of parameters that FSDP gathers and frees together (its `FSDPParamGroup`).

    Attributes:
        name: the modules that it was made of, as FSDP names them ("" for the root).
        storages: of the gathered parameters. FSDP keeps them, and empties and fills them in place.
    """

    name: str
    storages: tuple[torch.UntypedStorage, ...]

    def is_gathered(self) -> bool:
        """Whether all of its parameters are there."""
        return all(storage.nbytes() > 0 for storage in self.storages)


def sharded_units(models: Iterable[torch.nn.Module]) -> tuple[ShardedUnit, ...]:
    """Returns the units of models that have been gathered at least once; none if FSDP does not shard them.

    FSDP has no public way to ask. If its internals are not those that are known, no unit is found, and nothing is
    replayed that reads gathered parameters.
    """
    groups = {id(group): group for model in models for module in _sharded_modules(model) for group in _groups(module)}
    units = []
    for group in groups.values():
        gathered = [tensor for parameter in group.fsdp_params for tensor in parameter.all_gather_outputs]
        if gathered:
            storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in gathered}
            units.append(ShardedUnit(group._module_fqn or "", tuple(storages.values())))
    return tuple(units)


def reshard(model: torch.nn.Module) -> None:
    """Releases what FSDP gathered for a backward pass that will not run.

    A forward pass leaves the root's parameters gathered, and the model then exposes them in place of its own.
    """
    for module in _sharded_modules(model):
        module.reshard()


def _sharded_modules(model: torch.nn.Module) -> Iterator[Any]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # loaded by any program that shards a model
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is not None:
        yield from (module for module in model.modules() if isinstance(module, kind))


def _groups(module: Any) -> tuple[Any, ...]:
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # PyTorch 2.11 has one group in each state
        only = getattr(state, "_fsdp_param_group", None)
        groups = () if only is None else (only,)
    known = ("fsdp_params", "_module_fqn")
    found = tuple(group for group in groups if all(hasattr(group, name) for name in known))
    return tuple(g for g in found if all(hasattr(p, "all_gather_outputs") for p in g.fsdp_params))
