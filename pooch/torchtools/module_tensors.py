"""The parameters and buffers of a module, found in one walk: each step asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor, nn

_ASKED: tuple[Callable[..., object], ...] = (
    nn.Module.parameters, nn.Module.named_parameters, nn.Module.buffers, nn.Module.named_buffers,
    nn.Module._named_members, nn.Module.named_modules,
)  # fmt: skip


class ModuleTensors(NamedTuple):
    """What a module and those within it have registered, each once.

    Attributes:
        parameters: The parameters.
        buffers: The buffers.
    """

    parameters: list[nn.Parameter]
    buffers: list[Tensor]


def module_tensors(module: nn.Module) -> ModuleTensors:
    """Return the parameters and buffers of a module, in the order in which `parameters()` and `buffers()` give them.

    Those two walk over all modules by nested generators, which takes as long for a model of some hundred modules as
    some hundred small ops. Where a class defines them anew, it is asked.
    """
    kind = type(module)
    if any(getattr(kind, each.__name__) is not each for each in _ASKED):
        return ModuleTensors(list(module.parameters()), list(module.buffers()))
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    seen, ahead = set[int](), [module]
    while ahead:
        each = ahead.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        for parameter in each._parameters.values():
            if parameter is not None:
                parameters.setdefault(id(parameter), parameter)
        for buffer in each._buffers.values():
            if buffer is not None:
                buffers.setdefault(id(buffer), buffer)
        ahead += [child for child in list(each._modules.values())[::-1] if child is not None]
    return ModuleTensors([*parameters.values()], [*buffers.values()])


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of some modules, each once."""
    found = [module_tensors(module).parameters for module in {id(each): each for each in modules}.values()]
    if len(found) == 1:
        return found[0]
    return list({id(each): each for parameters in found for each in parameters}.values())
