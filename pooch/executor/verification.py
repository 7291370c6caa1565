"""No replay is believed: what is known of each recipe, and how closely its next result is looked at.

A recipe is *unproven* until its result was the same, byte by byte, as what it replaces, in two steps. Until then the
value is also copied to the swap tier, so that a difference costs nothing but a line. A *proven* recipe is compared by a
sample in each step, and wholly, with a copy, in one step of `PERIOD`. A recipe that gave a difference is *banned*: its
value leaves by copy from then on. Whatever may change what recipes compute (other parameters, modes, settings) makes
all of them unproven again.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from traceback import walk_stack
from typing import Any, Literal

import torch

from ..ground.bounded import RecentlyUsed
from ..ground.errors import ReplayDiffers, UsageError
from ..ground.frames import local_of
from ..ground.units import plural
from ..ground.visible import one_line
from ..machine import Level, Witness
from ..torchtools.checksums import checksum_of
from ..torchtools.operators import is_foreign
from ..torchtools.settings import settings_now
from ..torchtools.tensors import storage_of

Verify = Literal["always", "first", "off"]

PROOFS = 2  # steps in which a recipe has to give the same bytes before it is proven
PROOFS_OF_FOREIGN = 8  # of operators that are not PyTorch's own, which may give the same a few times
PERIOD = 64  # steps in which each proven recipe is compared wholly once
_MOST_TRIES = 8  # steps in which a value is copied although nothing is ever replayed for it
_MOST_CONTEXTS = 16
_NEVER = 2**62
_MOST_RECIPES = 2**16  # in all contexts; beyond, the one that was not used for the longest time is unproven again
_MOST_DIFFERENCES = 1000  # that are listed
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Difference:
    """A replay that gave other bytes than the op had.

    Attributes:
        operator: Name of the op, such as "aten.gelu.default".
        module: Path or kind of the module that called it, "" if it is not known.
        cause: The likely cause.
        was_survived: Whether there was a copy of what it replaced.
    """

    operator: str
    module: str
    cause: str
    was_survived: bool

    @property
    def place(self) -> str:
        """The operator, and where it was called."""
        return f"{self.operator} in {self.module}" if self.module else self.operator


@dataclass(frozen=True, slots=True)
class Verified:
    """What was verified so far. `str()` gives a line such as "412 recipes, all proven".

    Attributes:
        recipes: Number of recipes that were replayed and compared.
        proven: Those that gave the same bytes in enough steps.
        compared: Number of comparisons of all bytes of a value.
        sampled: Number of comparisons of a sample.
        compared_bytes: Bytes that were compared wholly.
        differences: Replays that gave other bytes, the last thousand of them. Their recipes are banned.
    """

    recipes: int = 0
    proven: int = 0
    compared: int = 0
    sampled: int = 0
    compared_bytes: int = 0
    differences: tuple[Difference, ...] = ()

    def __repr__(self) -> str:
        return f"Verified({one_line(str(self), 100)})"

    def __str__(self) -> str:
        if not self.recipes and not self.differences:
            return "no recipe was used"
        proven = "all proven" if self.proven == self.recipes else f"{self.proven} proven so far"
        text = f"{plural(self.recipes, 'recipe')}, {proven}"
        if self.differences:
            places = list(dict.fromkeys(each.place for each in self.differences))
            more = f" and {len(places) - 3} more" if len(places) > 3 else ""
            text += f"; {len(self.differences)} banned: {', '.join(places[:3])}{more}"
        return text


NOTHING_VERIFIED = Verified()


@dataclass(slots=True)
class _Proof:
    """What is known of one recipe in one context."""

    number: int
    needed: int
    matches: int = 0
    tries: int = 0
    last_try: int = -1
    last_step: int = -1
    was_compared: bool = False

    @property
    def is_tried(self) -> bool:
        """Whether it is still to be shown."""
        return self.matches < self.needed and self.tries < _MOST_TRIES + self.needed


@dataclass(slots=True)
class Counts:
    """How many comparisons there were. The native watch counts those that it makes, under the interpreter's lock."""

    compared: int = 0
    sampled: int = 0
    sampled_natively: int = 0
    compared_bytes: int = 0
    differences: deque[Difference] = field(default_factory=lambda: deque(maxlen=_MOST_DIFFERENCES))


class Verification:
    """What is known of the recipes of one run, or of all steps of `pooch.auto`.

    Args:
        verify: "first": as the head of this file says. "always": every replay is compared wholly. "off": none is.
        tell: Called with a topic and a line for each recipe that is banned.

    Raises:
        UsageError: If `verify` is none of these.
    """

    def __init__(self, verify: Verify, tell: Callable[[Hashable, str], None]) -> None:
        if verify not in ("always", "first", "off"):
            raise UsageError(f"verify={verify!r}: choose 'always', 'first' or 'off'")
        self.verify, self._tell, self.number = verify, tell, next(_numbers)
        self._contexts: OrderedDict[Hashable, OrderedDict[Hashable, _Proof]] = OrderedDict()
        self._proofs: OrderedDict[Hashable, _Proof] = OrderedDict()
        self._recipes = 0  # in all contexts
        self._numbers = itertools.count()
        self._banned: RecentlyUsed[Hashable, Difference] = RecentlyUsed(_MOST_RECIPES)
        self.counts = Counts()
        self._new: list[Hashable] = []
        self._step = 0
        self._lock = threading.Lock()
        self._places: dict[int, Callable[[], torch.nn.Module | None]] = {}
        self._models: list[Callable[[], torch.nn.Module | None]] = []
        self.begin_step(())

    @property
    def is_on(self) -> bool:
        """Whether anything is compared."""
        return self.verify != "off"

    def begin_step(self, models: Iterable[torch.nn.Module]) -> None:
        """Begin a step of some models. What was proven with other parameters, modes or settings is not proven in it."""
        if not self.is_on:
            return
        models = list(models)
        with torch._C.DisableTorchFunction():
            context = context_of(models)
        with self._lock:
            self._models = [weakref.ref(model) for model in models]
            self._step += 1
            self._proofs = self._contexts.setdefault(context, OrderedDict())
            self._contexts.move_to_end(context)
            while len(self._contexts) > _MOST_CONTEXTS:
                self._recipes -= len(self._contexts.popitem(last=False)[1])

    def ban(self, keys: Iterable[Hashable]) -> None:
        """Ban recipes that were banned in an earlier run."""
        for key in keys:
            self._banned.put(key, self._banned.get(key) or Difference("", "", "found in an earlier run", True))

    def take_new(self) -> list[Hashable]:
        """Return the recipes that were banned since the last call."""
        if not self._new:
            return []
        with self._lock:
            new, self._new = self._new, []
        return new

    @property
    def has_banned(self) -> bool:
        """Whether any recipe is not used again."""
        return len(self._banned) > 0

    def is_banned(self, key: Hashable) -> bool:
        """Whether a recipe is not used again."""
        return key in self._banned

    def compare(
        self, witness: Witness, storage: torch.UntypedStorage, difference: Callable[[bool], Difference]
    ) -> None:
        """Compare what a replay gave with what was there, and put that in its place if it differs.

        Args:
            witness: What was there.
            storage: What the replay gave.
            difference: Returns what to tell of a difference, given whether there was a copy.

        Raises:
            ReplayDiffers: If it differs and there is no copy.
        """
        if witness.agrees(storage):
            self.matched(witness, storage.nbytes())
        else:
            self.restore(witness, storage, difference)

    def restore(
        self, witness: Witness, storage: torch.UntypedStorage, difference: Callable[[bool], Difference]
    ) -> None:
        """Put the copy of what was there in the place of a replay that differs, and ban the recipe; as `compare`."""
        found = difference(witness.restore(storage))
        self.differed(witness, found)
        if not found.was_survived:
            raise ReplayDiffers(
                f"a replay of {found.place} gave other bits than the op had, and there was no copy of them, so the "
                "gradients of this step cannot be computed: repeat the step, in which the value is copied (likely "
                f"cause: {found.cause})"
            )

    def note_place(self, recipe: int) -> None:
        """Remember which module of the program calls the op that is running, for a recipe that is new."""
        if recipe not in self._places and self.is_on:
            if len(self._places) >= _MOST_RECIPES:
                self._places.clear()
            self._places[recipe] = calling_module()

    def place_of(self, recipe: int) -> str:
        """Return the module that a recipe was met in, as far as it is known: its path, or else its kind."""
        module = self._places.get(recipe, lambda: None)()
        if module is None:
            return ""
        names = (name for model in self._models for name, each in _named(model()) if each is module)
        return next(filter(None, names), type(module).__name__)

    def level(self, key: Hashable, *, is_foreign: bool = False, device_type: str = "cpu") -> Level:
        """Return how closely the replay of a value that leaves now is looked at.

        Args:
            key: Its recipe.
            is_foreign: Whether the recipe runs operators that are not PyTorch's own.
            device_type: Where the value is. There are no samples where the host would wait for the device.
        """
        if key in self._banned and self._banned.get(key):
            return Level.BANNED
        if self.verify == "off":
            return Level.NONE
        with self._lock:
            proof = self._proofs.get(key)
            if proof is None:
                needed = PROOFS_OF_FOREIGN if is_foreign else PROOFS
                proof = self._proofs[key] = _Proof(next(self._numbers), needed)
                self._forget_beyond_limit()
            else:
                self._proofs.move_to_end(key)
            if proof.is_tried:
                if proof.last_try != self._step:  # a value may leave many times in one step
                    proof.last_try, proof.tries = self._step, proof.tries + 1
                return Level.COPIED
        if self._is_its_turn(proof):
            return Level.COPIED
        if self.verify == "always" or is_foreign:
            return Level.WHOLE
        return Level.SAMPLE if device_type == "cpu" else Level.NONE

    def sampled(self, keys: Iterable[Hashable]) -> set[Hashable]:
        """Return those of some recipes of which no more than a sample is compared in this step, on a CPU."""
        return set() if self.verify == "always" else self.settled(keys)

    def settled(self, keys: Iterable[Hashable]) -> set[Hashable]:
        """Return those of some recipes of which no copy is looked at in this step: asked for many, it takes little."""
        settled = {key for key in keys if key not in self._banned}
        if self.verify == "off":
            return settled
        with self._lock:
            proofs, known = self._proofs, settled & self._proofs.keys()
            settled = {key for key in known if not (proofs[key].is_tried or self._is_its_turn(proofs[key]))}
            for key in settled:
                proofs.move_to_end(key)
        return settled

    def _is_its_turn(self, proof: _Proof) -> bool:
        """Whether what was shown is looked at again in this step."""
        return (self._step + proof.number) % PERIOD == 0

    def _forget_beyond_limit(self) -> None:
        """Note one recipe more, and forget one for it: that of the context, and in it that, which is least recent."""
        self._recipes += 1
        if self._recipes > _MOST_RECIPES:
            next(filter(None, self._contexts.values())).popitem(last=False)
            self._recipes -= 1

    def matched(self, witness: Witness, size_bytes: int) -> None:
        """Note that a replay gave what was there."""
        with self._lock:
            if witness.level == Level.SAMPLE:
                self.counts.sampled += 1
                return
            self.counts.compared += 1
            self.counts.compared_bytes += size_bytes
            proof = self._proofs.get(witness.key)
            if proof is not None:
                proof.was_compared = True
                if proof.last_step != self._step:
                    proof.last_step, proof.matches = self._step, proof.matches + 1

    def copy_matched(self, witness: Witness) -> None:
        """Note that a swapped value did not change after it was copied."""
        with self._lock:
            proof = self._proofs.get(witness.key)
            if proof is not None:
                proof.matches += 1

    def copy_differed(self, witness: Witness) -> None:
        """Note that a swapped value changed after it was copied, so that it has to be looked at in each step."""
        with self._lock:
            proof = self._proofs.get(witness.key)
            if proof is not None:
                proof.needed, proof.tries = _NEVER, -_NEVER

    def differed(self, witness: Witness, difference: Difference) -> None:
        """Ban a recipe that gave something else, and tell."""
        with self._lock:
            known = self._banned.get(witness.key) or difference
            if known is difference:
                self._banned.put(witness.key, difference)
                self.counts.differences.append(difference)
                self._new.append(witness.key)
        if known is difference:
            fate = "its copy was used, and" if difference.was_survived else "there was no copy, and"
            self._tell(
                ("differs", difference.operator, difference.module),
                f"a replay of {difference.place} gave other bits than the op had: {fate} the value is copied rather "
                f"than recomputed from now on (likely cause: {difference.cause})",
            )

    @property
    def verified(self) -> Verified:
        """What was verified so far."""
        with self._lock:
            proofs = [proof for context in self._contexts.values() for proof in context.values() if proof.was_compared]
            counts = self.counts
            return Verified(
                recipes=len(proofs),
                proven=sum(proof.matches >= proof.needed for proof in proofs),
                compared=counts.compared,
                sampled=counts.sampled + counts.sampled_natively,
                compared_bytes=counts.compared_bytes,
                differences=tuple(counts.differences),
            )


def new_witness(key: Hashable, level: Level) -> Witness:
    """Return what remembers the bytes of a value for its replay.

    Args:
        key: Its recipe.
        level: How closely the replay is looked at.
    """
    return Witness(key, level, checksum_of)


def calling_module() -> Callable[[], torch.nn.Module | None]:
    """Return a weak reference to the innermost module whose forward pass is running in the calling thread."""
    for frame, _ in walk_stack(sys._getframe(1)):
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self" and code.co_name != "__torch_dispatch__":
            found = local_of(frame, "self")
            if isinstance(found, torch.nn.Module):
                return weakref.ref(found)
    return lambda: None


def _named(model: torch.nn.Module | None) -> Iterable[tuple[str, torch.nn.Module]]:
    return () if model is None else model.named_modules()


def context_of(models: Iterable[torch.nn.Module]) -> Hashable:
    """Return what the recipes of some models depend on, apart from what each of them carries: which parameters there
    are, which modules are in training mode, and the settings of PyTorch. This is called before every step.
    """
    found: list[Any] = [settings_now()]
    ahead: list[torch.nn.Module | None] = list(models)
    while ahead:
        module = ahead.pop()
        if module is not None:
            found.append(module.training)
            for parameter in module._parameters.values():
                found.append(id(parameter))
                if type(parameter) is torch.nn.Parameter and not parameter.is_meta:
                    found.append(storage_of(parameter)._cdata)  # it may have been given other data
            ahead.extend(module._modules.values())
    return hash(tuple(found))


def likely_cause(func: Any, is_random: bool, has_outer: bool) -> str:
    """Return why a replay most likely gave other bits.

    Args:
        func: The operator.
        is_random: Whether it draws random numbers.
        has_outer: Whether it reads tensors from before the step.
    """
    if is_foreign(func):
        return f"{func._schema.name} is not PyTorch's own and does not give the same result twice"
    if is_random:
        return "the random numbers that it drew do not come from a generator that PyTorch knows"
    written = "numpy, data_ptr, DLPack, `.data` or another thread wrote to the memory of this value"
    return f"{written} or to what it is made from" + (", such as a parameter or buffer" if has_outer else "")
