"""Steps that are far away from the budget, for which nothing is done: how one of them is known again, at little cost.

What tells the kind of such a step is looked at in every step, and before anything runs. But it is compared with what
was seen last instead of being worked out anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from ..ir import Profile
from .known import Known
from .signature import StepKey, casts_now
from .summary import Counters

FAR_SHARE = 0.5  # of the budget: a step that is known to take no more is far away from it
MOST_KINDS = 256  # that are known again; beyond, all of them are looked at anew

_requires_grad = attrgetter("requires_grad")
_END = (object(),)  # equal to nothing else: what is compared must also be as long
_is_any_cast = torch._C._is_any_autocast_enabled


@dataclass(slots=True)
class QuietKind:
    """A kind of step that is far away from the budget.

    Attributes:
        key: Its key.
        known: What is known of it.
        profile: Its profile.
        start_bytes: Bytes that were live before the last such step that was looked at closely.
        rise_bytes: By how much its peak is higher than what is live before it, as recorded, or as seen since.
        forgotten: How many kinds of steps were forgotten when this was looked up.
    """

    key: StepKey
    known: Known
    profile: Profile
    start_bytes: int
    rise_bytes: int
    forgotten: int

    def expected_bytes(self, start_bytes: int) -> int:
        """Return what such a step takes at most, as far as is known.

        Args:
            start_bytes: Bytes that are live before it. Gradients that are no longer among them come back in the step.
        """
        return max(start_bytes, self.start_bytes) + self.rise_bytes

    def seen(self, rise_bytes: int) -> None:
        """Note what a step of it has taken."""
        self.rise_bytes = max(self.rise_bytes, rise_bytes)


class QuietCalls:
    """The calls of a model that begin such steps. The model alone holds this, as it holds the model's parameters.

    Attributes:
        kinds: The kinds of steps that they begin.
    """

    def __init__(self) -> None:
        self.kinds: dict[Hashable, QuietKind] = {}
        self._seen: _Seen | None = None

    def find(self, args: Any, kwargs: Any, changes: int) -> QuietKind | None:
        """Return the kind of step that a call begins, if it is known to be far away and the model is as it was.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            changes: How often modules were given something: only then is the model looked through again.
        """
        seen = self._seen
        if seen is None or (seen.changes != changes and not seen.is_as_it_was(changes)):
            return None
        return self.kinds.get(seen.signature(args, kwargs))

    def teach(self, steps: Any, args: Any, kwargs: Any, kind: QuietKind) -> None:
        """Have the native part know a call that was found, so that the next one like it begins without Python.

        Args:
            steps: The native part.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            kind: The kind of step that it begins.
        """
        if self._seen is not None:
            self._seen.teach(steps, args, kwargs, kind)

    def add(self, model: torch.nn.Module, args: Any, kwargs: Any, kind: QuietKind, changes: int) -> None:
        """Note the kind of step that a call begins, unless its arguments or the model are of unusual kinds.

        Args:
            model: The model.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            kind: The kind of step.
            changes: How often modules were given something.
        """
        seen = self._seen
        signature = None if seen is None or not seen.is_as_it_was(changes) else seen.signature(args, kwargs)
        if signature is None or len(self.kinds) >= MOST_KINDS:
            self.kinds.clear()
            self._seen = seen = _Seen(model, changes)
            signature = seen.signature(args, kwargs)
        if signature is not None:
            self.kinds[signature] = kind


class _Seen:
    """A model as it was: its modules and parameters, and which of these are not trained.

    Where fewer of them are trained, and where there are gradients already, a step takes no more than it did. So only
    the other way round is told apart for certain.

    Args:
        model: The model.
        changes: How often modules were given something. Also an attribute.
    """

    def __init__(self, model: torch.nn.Module, changes: int) -> None:
        self._model, self.changes = weakref.ref(model), changes
        self._registries = [each for module in model.modules() for each in (module._modules, module._parameters)]
        self._items = [*self._items_now()]
        parameters = list(model.parameters())
        # Attributes of other kinds of parameters may be functions of the program.
        is_ordinary = all(type(each) is torch.nn.Parameter for each in parameters)
        trained = [each for each in parameters if is_ordinary and each.requires_grad]
        self._frozen = [each for each in parameters if is_ordinary and not each.requires_grad]
        self._ends = (trained[0], trained[-1]) if trained else None

    def _items_now(self) -> Iterator[object]:
        return chain(chain.from_iterable(registry.values() for registry in self._registries), _END)

    def is_as_it_was(self, changes: int) -> bool:
        """Whether it still has the same modules and parameters."""
        if not all(map(is_, self._items_now(), self._items)):
            return False
        self.changes = changes
        return True

    def teach(self, steps: Any, args: Any, kwargs: Any, kind: QuietKind) -> None:
        """Have the native part know the model, and a call that begins steps of a kind."""
        model, ends = self._model(), self._ends
        if model is not None and ends is not None:
            steps.see(*ends, self._frozen, self.changes)
            steps.learn(model, args, kwargs, kind, kind.start_bytes, kind.rise_bytes)

    def signature(self, args: Any, kwargs: Any) -> Hashable | None:
        """Return what two calls have in common whose steps have the same key; None if it is not worth finding out.

        This runs in every step, when hardly anything of Pooch is left in the processor's cache. So it touches little.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        model, ends = self._model(), self._ends
        if model is None or ends is None or (self._frozen and any(map(_requires_grad, self._frozen))):
            return None
        has_gradients = ends[0].grad is not None or ends[1].grad is not None
        found: list[Hashable] = [model.training, has_gradients, casts_now() if _is_any_cast() else None]
        for item in (*args, *kwargs, *kwargs.values()) if kwargs else args:
            kind: Any = type(item)
            if kind is torch.Tensor and not item.is_nested:
                found += (item.shape, item.dtype, item.requires_grad)
            elif kind is str or kind is bool or item is None:
                found += (kind, item)
            elif kind is int or kind is float:  # numbers do not count
                found.append(kind)
            else:
                return None
        return tuple(found)


class QuietTally:
    """What is counted in such steps. It is added up when somebody asks.

    Attributes:
        steps: Number of steps.
        steps_ms: Their time.
        peak_bytes: The highest of their peaks.
    """

    def __init__(self) -> None:
        self.steps = self.peak_bytes = 0
        self.steps_ms = 0.0

    def add(self, steps: int, steps_ms: float, peak_bytes: int) -> None:
        """Add some of them."""
        self.steps += steps
        self.steps_ms += steps_ms
        self.peak_bytes = max(self.peak_bytes, peak_bytes)

    def counters(self) -> Counters:
        """Return it as counters."""
        return Counters(steps_in_core=self.steps, steps_ms=self.steps_ms, peak_bytes=self.peak_bytes)
