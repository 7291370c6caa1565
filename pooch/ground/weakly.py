"""Methods that others hold without keeping their objects alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def weakly(method: Callable[Given, Returned]) -> Callable[Given, Returned | None]:
    """Return a method without keeping its object alive: it does nothing, and returns None, once that is gone."""
    bound = weakref.WeakMethod(method)

    def call(*args: Given.args, **kwargs: Given.kwargs) -> Returned | None:
        alive = bound()
        return None if alive is None else alive(*args, **kwargs)

    return call
