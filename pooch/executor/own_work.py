"""What Pooch does itself in the middle of the program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from ..machine.own_time import OwnTime


class _OwnWork(threading.local):
    """Marks what the current thread does as Pooch's own work rather than the program's: `with OWN_WORK: ...`."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1

    def is_over(self) -> None:
        """Note that the thread does none, as a step begins. Ctrl-C may have kept `__exit__` from running."""
        self.depth = 0


OWN_WORK = _OwnWork()


class SavingHooks:
    """A pair of saved tensor hooks, of which is measured what they take.

    Args:
        hooks: The hooks.
        own_time: Measures that.
        are_quiet: Whether what they do does not count as reads by the program.

    Attributes:
        pack: Called with each tensor that autograd saves.
        unpack: Called with what it returned.
    """

    def __init__(self, hooks: Any, own_time: OwnTime, *, are_quiet: bool) -> None:
        within = partial(quietly, own_time=own_time) if are_quiet else own_time.measured
        self.pack, self.unpack = within(hooks.pack), within(hooks.unpack)


def quietly(hook: Callable[[Any], Any], own_time: OwnTime) -> Callable[[Any], Any]:
    """Wrap a hook so that what it does does not count as a read by the program, and measure what it takes."""

    @wraps(hook)
    def quiet(argument: Any) -> Any:
        with OWN_WORK:
            return hook(argument)

    return own_time.measured(quiet)
