"""Which objects of a type there are."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, compress, starmap
from typing import Any

YOUNG = (0, 1)  # generations of objects that few collections of garbage have looked through

_known_frozen = 0  # objects
_natively: Callable[..., list[Any]] | None = None


class _Along(threading.local):
    """What the calling thread notes as it looks for something else: by type, or None as long as it has not looked."""

    found: dict[type, list[weakref.ref[Any]] | None] | None = None


_along = _Along()


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


@contextmanager
def noting(*kinds: type) -> Iterator[None]:
    """Note objects of further types in the first look at everything within this, which answers all later ones there.

    With large libraries loaded, a look takes some ten milliseconds. What is looked for within this is not made there.

    Args:
        kinds: The types, none of which is derived from another. Their objects can be referred to weakly.
    """
    before, _along.found = _along.found, dict.fromkeys(kinds)
    try:
        yield
    finally:
        _along.found = before


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
    noted = _along.found
    if noted is None or tuple(generations) != (None,):
        return _look(_with_derived(kind), generations)
    before = noted.get(kind)
    if before is None:
        return _look_along(kind, noted)
    return [each for each in (reference() for reference in before) if each is not None]


def _look_along(kind: type, noted: dict[type, list[weakref.ref[Any]] | None]) -> list[Any]:
    """Return all objects of a type, and note those of the others of which nothing is noted yet."""
    wanted = dict.fromkeys([kind, *(each for each, found in noted.items() if found is None)])
    types = {each: _with_derived(each) for each in wanted}
    belong = {id(derived): each for each, all_of_it in types.items() for derived in all_of_it}
    found: dict[type, list[Any]] = {each: [] for each in wanted}
    for one in _look(list(chain(*types.values())), (None,)):
        found[belong[id(type(one))]].append(one)
    noted.update({each: list(map(weakref.ref, ones)) for each, ones in found.items() if each in noted})
    return found[kind]


def _look(types: Sequence[type], generations: Sequence[int | None]) -> list[Any]:
    """Return all objects of exactly some types."""
    if gc.get_freeze_count() > _known_frozen:
        unfreeze()
    if _natively is not None:
        return _natively(gc.get_objects, tuple(generations), tuple(types))
    kinds = frozenset(map(id, types))
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
