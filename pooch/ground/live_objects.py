"""Which objects of a type there are."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import chain, compress, starmap
from typing import Any

YOUNG = (0, 1)  # generations of objects that few collections of garbage have looked through

_known_frozen = 0  # objects
_natively: Callable[..., list[Any]] | None = None


def find_natively(objects_of: Callable[..., list[Any]]) -> None:
    """Have `live_objects` use native code, which takes half the time.

    Args:
        objects_of: Returns the objects of exactly some types, given `gc.get_objects`, generations and those types.
    """
    global _natively
    _natively = objects_of


def freeze_known() -> None:
    """Have collections of garbage pass by what there is now, and `live_objects` as well: nobody looks for any of it."""
    global _known_frozen
    gc.freeze()
    _known_frozen = gc.get_freeze_count()


def unfreeze() -> None:
    """Have collections of garbage, and `live_objects`, look at everything again."""
    global _known_frozen
    gc.unfreeze()
    _known_frozen = 0


def live_objects(kind: type, generations: Sequence[int | None] = (None,)) -> list[Any]:
    """Return all objects of a type and of types derived from it that the interpreter tracks.

    Args:
        kind: The type.
        generations: Those to look through, such as `YOUNG`, which takes next to no time. None: all of them.

    What a program has frozen by `gc.freeze()` is not listed, though it may be its data and its optimizers. So that ends
    here: collections of garbage look through it again.

    No other object is held where another thread can run: `tuple` raises a SystemError if somebody else holds what it is
    just filling. So one call of a function in C takes all objects, chooses by the types that they really have
    (`isinstance` would ask them for their `__class__`, which may be a property in Python), and lets the others go.
    """
    if gc.get_freeze_count() > _known_frozen:
        unfreeze()
    derived = _with_derived(kind)
    if _natively is not None:
        return _natively(gc.get_objects, tuple(generations), tuple(derived))
    kinds = frozenset(map(id, derived))
    everything: list[Any] = []
    taking = map(everything.extend, map(gc.get_objects, generations))
    choosing = compress(everything, map(kinds.__contains__, map(id, map(type, everything))))
    letting_go = starmap(everything.clear, ((),))  # also of itself
    return list(chain(taking, choosing, letting_go))[len(generations) : -1]  # the first and the last return None


def _with_derived(kind: type) -> list[type]:
    found = {id(kind): kind}  # by their ids: a metaclass may have made types that have no hash
    waiting = [kind]
    while waiting:
        derived: type
        for derived in type.__subclasses__(waiting.pop()):
            if id(derived) not in found:
                found[id(derived)] = derived
                waiting.append(derived)
    return list(found.values())
