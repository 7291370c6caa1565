"""Watches the ops of a step natively, which costs less than a microsecond an op; a dispatch mode costs ten and more.

A kernel on a dispatch key below autograd sees every op that a dispatch mode would see. It follows the path of a plan by
itself and calls Python only where something is to be done. Where it is not ready-made, it is built at its first use
against the PyTorch that is installed, which takes half a minute of one core. Where that cannot be done, a dispatch mode
does the same work.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from ...ground import live_objects, native
from ..effects import StorageMap
from ..operators import OperatorFacts, operator_facts
from ..outside import changed_in_place, refuse
from ..settings import settings_now
from ..stand_ins import Place, StandIns
from ..tensors import bytes_of, memory_address, storage_of

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "watch.cpp"
_NAMES = (
    "python storages holding operators home parts settings recipe path region unplanned moves replays acting reads",
    "kernel handle saved quiet calls frames objects",
)
_COPIER = FOLDER.parent / "copier"  # has checksums of its own
HEADERS = (*(FOLDER / f"{name}.h" for name in " ".join(_NAMES).split()), _COPIER / "checksum.h")
VARIABLE = "POOCH_NATIVE_WATCH"  # "0": a dispatch mode watches
# What autograd may hold in place of a tensor. The native handle is among them from loading on, as native hooks make it.
HANDLES: set[type] = set()
# Operators that give views, though their schemas do not say so. What they give is looked at all the same.
_UNDECLARED_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "_unsafe_view.default",
        "unsafe_split.Tensor",
        "unsafe_split_with_sizes.default",
        "unsafe_chunk.default",
    )
)


def built_library() -> Path:
    """Return the compiled library, building it if this version of it was never built for this PyTorch and Python.

    Raises:
        BuildError: If there is no compiler, or it fails.
    """
    folder = Path(torch.__file__).parent
    of_pytorch = [folder / "include", folder / "include/torch/csrc/api/include"]
    includes = [*of_pytorch, sysconfig.get_paths()["include"], _COPIER]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return native.built_library(
        f"watch-{torch.__version__}-{sys.implementation.cache_tag}",
        SOURCE,
        headers=HEADERS,
        # Without the second definition, headers of all 2,700 operators are read.
        compile_flags=[
            "-w",
            "-fvisibility=hidden",
            f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            "-DAT_PER_OPERATOR_HEADERS",
            *map("-I{}".format, includes),
        ],
        link_flags=[f"-L{folder / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"],
        telling=f"building what watches steps for PyTorch {torch.__version__}: this takes half a minute, once",
    )


def _knows_fake(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return what knows fake tensors: those that bear our key are real."""
    return lambda tensor: original(tensor) and not is_marked(tensor)


def _makes_alike(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes a tensor like another one: PyTorch asks our key for the device, which it cannot tell."""
    name = original.__name__

    @functools.wraps(original)
    def make(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and is_marked(tensor):
            tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return getattr(tensor, name)(*args, **kwargs)
        return original(tensor, *args, **kwargs)

    return make


def _know_types(module: ModuleType) -> None:
    """Have `isinstance(tensor, torch.FloatTensor)` be what it is without our key, by which PyTorch tells the type."""
    kinds = type(torch.FloatTensor)
    original: Any = vars(kinds)["__instancecheck__"]
    if isinstance(original, FunctionType):
        return  # another copy of this package has done it

    def is_instance(kind: Any, value: Any) -> bool:
        return value.type() == torch.typename(kind) if is_marked(value) else bool(original(kind, value))

    module.set_in_type(kinds, "__instancecheck__", is_instance)


_KEY_IS_OURS = StandIns(
    # PyTorch 2.14 takes all tensors with the key that marks ours for fake ones, of which it prints and saves no values.
    Place(torch._C, "_is_fake_tensor", _knows_fake),
    Place(torch.Tensor, "new", _makes_alike),
    Place(torch.Tensor, "new_tensor", _makes_alike),
)


def _loaded() -> ModuleType | None:
    if os.environ.get(VARIABLE) == "0":
        return None
    module = native.loaded_module("watch", built_library())
    module.use(_described, settings_now, refuse, changed_in_place)
    live_objects.find_natively(module.objects_of)
    _KEY_IS_OURS.use(module)
    _know_types(module)
    HANDLES.add(module.Handle)
    return module


LIBRARY = native.Extension(_loaded, "steps are watched in Python, which takes longer than natively")


def _described(name: str, overload: str) -> tuple[Any, int, int, int, bool, bool, bool, bool, bool, bool, bool]:
    """Return an operator for the kernel: itself, which arguments it writes, by bits, and what decides where it goes."""
    namespace, _, base = name.partition("::")
    func = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    facts = operator_facts(func)
    names = [argument.name for argument in func._schema.arguments]
    written = sum(1 << position for position in {*facts.written, *map(names.index, facts.written_names)})
    training = next((names.index(each) for each in ("train", "training") if each in names), -1)
    return (
        func,
        written,
        sum(1 << position for position in facts.statistics),
        training,
        facts.is_view,
        facts.reads_nothing,
        facts.may_surprise,
        _can_be_recorded(facts),
        facts.depends_on_call,
        facts.may_surprise or (facts.is_foreign and facts.refusal is not None),
        facts.name in _UNDECLARED_VIEWS,
    )


def _can_be_recorded(facts: OperatorFacts) -> bool:
    """Whether the kernel can record the calls of an operator. Those that draw random numbers are left to Python."""
    return not (facts.random or facts.is_foreign or facts.refusal or facts.cast_as)


def storage_map() -> Any:
    """Return a new `StorageMap`, a native one if there is one."""
    module = LIBRARY.get()
    return StorageMap() if module is None else module.StorageMap()


def is_away(key: int) -> bool:
    """Whether the bytes of a storage are away while the program holds it."""
    module = LIBRARY.loaded
    return module is not None and bool(module.is_away(key))


def with_homes(function: Callable[[], Any]) -> Any:
    """Call a function of Pooch's own that runs ops on what the program holds, the bytes of which may be away."""
    module = LIBRARY.loaded
    return function() if module is None else module.with_homes(function)


def copied_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy of a storage, the bytes of which may be away, from the device's current allocator."""
    return with_homes(lambda: storage_of(bytes_of(storage).clone()))  # type: ignore[no-any-return]


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor may be away while the program holds it."""
    module = LIBRARY.loaded
    return module is not None and bool(module.is_marked(tensor))


def unmark(tensor: torch.Tensor) -> None:
    """Have ops on a tensor seen within regions alone, whose bytes will not be away any more."""
    module = LIBRARY.loaded
    if module is not None:
        module.unmark(tensor)


def address_of(storage: torch.UntypedStorage) -> int:
    """Return where the bytes of a storage are, or 0 if they are away."""
    return 0 if is_away(storage._cdata) else memory_address(storage)


def path(
    writes: Sequence[tuple[int, ...]], reads: Sequence[tuple[int, ...] | None], due: Sequence[bool],
    replayed: Sequence[bool], awaited: Sequence[bool], moved: Sequence[int], swapped: Sequence[int],
    sources: Sequence[int], anchored: Sequence[int],
) -> Any:  # fmt: skip
    """Return the native path of a plan, or None if there is no native part.

    Args:
        writes: The values that each expected op makes.
        reads: Those that it reads, or None where that is not known.
        due: Whether something is to be done before it.
        replayed: Whether its call is to be recorded.
        awaited: Whether Python is to be told of what it makes.
        moved: The values that the plan moves.
        swapped: Those of them that it copies.
        sources: Those that its replays read.
        anchored: Those with whose first read something is due.
    """
    module = LIBRARY.get()
    if module is None:
        return None
    flags = map(bytes, (due, replayed, awaited))
    return module.Path(tuple(writes), tuple(reads), *flags, *map(list, (moved, swapped, sources, anchored)))


def region(native_path: Any, values: Any) -> Any:
    """Return a native region for a step, or None if there is no native part.

    Args:
        native_path: From `path`, or None for a step without a plan.
        values: From `storage_map`: takes the values that storages hold.
    """
    module = LIBRARY.get()
    return None if module is None else module.Region(native_path, values)


def _beneath(original: Any) -> Any:
    """Return what computes the keys by which an operator of higher order goes. Ours has no part there."""
    module = LIBRARY.get()
    assert module is not None
    ours = module.keys()

    def key_extractor(tensors: Any, key_mask: Any) -> Any:
        return original(tensors, key_mask - ours)

    return key_extractor


# In place as long as a region is entered: operators of higher order are dispatched in Python, which knows no such key.
HIGHER_ORDER = StandIns(Place(torch._ops, "key_extractor", _beneath))
