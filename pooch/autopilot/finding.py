"""Finds the models that a program trains, so that a script runs under a budget without a line of its own."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ..api.budgets import parse_budget
from ..api.recompute import AllowRecompute
from ..executor.live_bytes import live_bytes_of
from ..executor.verification import Verify
from ..ground.errors import InfeasibleTier, UsageError
from ..torchtools import accelerators
from ..torchtools.calls import COMPILED_LATER, PLACE, CallRegion
from ..torchtools.stand_ins import Place, StandIns
from ..torchtools.training_state import model_device
from .autopilot import Auto, auto
from .backward import RUNNING, BackwardWatch
from .budget import Bound, budget_of, check_bound
from .governed import device_named
from .remarks import uncalled
from .stacks import is_ordinary_call
from .summary import AutoSummary

_compiling_now = torch._C._dynamo.eval_frame.get_eval_frame_callback
# Wrappers of a model that call it. What they hold is governed in their place.
_TRANSPARENT = ("DistributedDataParallel",)
_WITHOUT_A_MODEL = 2  # backward passes, until it is taken that there is none: one may be found with its second step
_MOST_REFUSALS = 1000  # lines: a program may make models for as long as it runs


class ModelFinder:
    """Puts every model that is trained under one budget, when it is called for the first time.

    The outermost module that is called with gradients enabled and has trainable parameters is such a model, as is one
    with frozen parameters that is given something that requires gradients. It is found
    where `torch.nn.Module` looks for a compiled call, before the call begins, so the first step is governed as well.

    Args:
        budget: Device bytes of the process, or a share of the first step's in-core peak.
        device: Where to compute. What the program moves there is put under the budget at once, and moved one by one, as
            is what it leaves on the host when that is trained. None: where the models are.
        host_budget: Most bytes that the swap tier of this machine may take; its ranks share them. None: no limit.
        disk_budget: The same where that tier is on disk.
        cache: Directory in which plans are kept for the next run. None: they are not kept.
        tell: Called with one line for each new plan, and for each model that cannot be governed.
        verify: How closely replays are compared with what they replace.
        bound: What the budget bounds, as `pooch.auto` takes it.
        allow_recompute: As `pooch.auto` takes it.

    Raises:
        UsageError: A budget does not parse or does not go with `bound`, or there is no such device.

    Attributes:
        auto: What holds the budget, or None as long as no model was trained.
        preparing_s: Time that it took to put the first model under the budget.
        refusals: Why models are not under it, one line each, for the last thousand of them.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        device: str | None = None,
        host_budget: int | str | None = None,
        disk_budget: int | str | None = None,
        cache: Path | None = None,
        tell: Callable[[str], None],
        verify: Verify = "first",
        bound: Bound = "live",
        allow_recompute: AllowRecompute = "exact",
    ) -> None:
        check_bound(bound, budget_of(budget)[0])
        for name, given in (("host budget", host_budget), ("disk budget", disk_budget)):
            if given is not None:
                parse_budget(given, None, name=name)
        self._budget, self._tell = budget, tell
        self._device = None if device is None else device_named(device)
        self._moves = None if self._device is None else StandIns(*_moving(self._device, self._moved_by_program))
        self._moving = threading.local()
        self._options: dict[str, Any] = {
            "device": self._device, "host_budget": host_budget, "disk_budget": disk_budget, "cache": cache,
            "verify": verify, "bound": bound, "allow_recompute": allow_recompute,
        }  # fmt: skip
        self.auto: Auto | None = None
        self.preparing_s = 0.0
        self.refusals: deque[str] = deque(maxlen=_MOST_REFUSALS)
        self._governing = threading.RLock()  # two threads may call their models for the first time at once
        self._live = live_bytes_of(torch.device("cpu"))  # from the beginning, so that every byte is counted
        self._refused: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._process = os.getpid()
        self._is_on = self._is_skipped = False
        self._backward = BackwardWatch(self._backward_begins, self._backward_ended)
        self._unfound: float = 0  # backward passes of the program so far

    def start(self) -> None:
        """Begin to look."""
        self._is_on = True
        setattr(torch.nn.Module, PLACE, self)
        if self._moves is not None:
            self._moves.use(self)
        COMPILED_LATER.use(self)
        if self._device is None:
            self._backward.start()

    def go_on_in_fork(self) -> bool:
        """Look in this process, which the one that began has forked. False: it cannot, as a model was found before."""
        if self.auto is not None:
            return False
        self._process, self._unfound = os.getpid(), 0
        self._governing = threading.RLock()  # another thread of the parent may have had it
        return True

    def stop(self, *, verbose: bool = False) -> AutoSummary | None:
        """Look no longer, take the budget off, and return what happened, or None if no model was found.

        Args:
            verbose: As `Auto.summary` takes it.
        """
        if self._is_on:
            self._is_on = False
            self._backward.stop()
            COMPILED_LATER.leave(self)
            setattr(torch.nn.Module, PLACE, None)
            self._live.close()
            if self._moves is not None:
                self._moves.leave(self)
        if self.auto is None:
            return None
        with suppress(UsageError):  # a daemon thread trains as the program ends, and its step ends with that
            self.auto.remove()
        return self.auto.summary(verbose=verbose)

    # A module's own attribute comes first: that of a governed model, or of one that is compiled.
    def __get__(self, module: torch.nn.Module | None, owner: type | None = None) -> Callable[..., Any] | None:
        """Return what runs the call of a module that has no region, or None if nothing has to be done."""
        if torch.compiler.is_compiling() or callable(_compiling_now()):
            return None  # a part of what is compiled
        if module is None or not torch.is_grad_enabled() or _is_scripted():
            return None
        if not self._is_skipped and (dynamo := sys.modules.get("torch._dynamo.eval_frame")) is not None:
            self._is_skipped = True
            dynamo.skip_code(ModelFinder.__get__.__code__)  # compiled modules are looked up in the midst of its work
        if not self._is_outermost() or type(module).__name__ in _TRANSPARENT:
            return None
        if module in self._refused:
            return partial(_ungoverned_call, module)
        why = obstacle(module)
        if why is not None:
            self._refuse(module, why)
            return partial(_ungoverned_call, module)
        parameters = list(module.parameters())
        if any(is_lazy(parameter) for parameter in parameters):  # it finds out its shapes
            return partial(_ungoverned_call, module)
        if any(each.requires_grad for each in parameters):
            is_first = self.auto is None
            called = self._governed_call(module)
            if is_first and self.auto is not None:
                self.auto.begins_now()
            return called
        return partial(self._frozen_call, module) if parameters else None

    def _frozen_call(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a model that is not trained. It is put under the budget once gradients pass through it."""
        given = tree_leaves((args, kwargs))
        found = None
        if any(isinstance(each, torch.Tensor) and each.requires_grad for each in given):
            found = self._governed_call(module)
        return (own_call(module) if found is None else found)(*args, **kwargs)

    def compiled_in_place(self, module: torch.nn.Module) -> None:
        """Note that a module was compiled in place, where it would not be looked for any more."""
        if self._is_on:
            vars(module)[PLACE] = _CompiledInPlace(self, module, vars(module)[PLACE])

    # Programs without modules -----------------------------------------------------------------------------------------

    def _backward_begins(self, builds_graph: bool) -> None:
        """Do nothing: what it is about is seen when it has ended."""

    def _backward_ended(self, is_complete: bool, builds_graph: bool) -> None:
        """Put a program under the budget that trains tensors which belong to no module, in its second backward pass."""
        device = RUNNING.device
        if self.auto is not None or self._refused:
            self._backward.stop()
            return
        if not is_complete or builds_graph or not self._is_outermost():
            return
        self._unfound += 1
        if self._unfound < _WITHOUT_A_MODEL or device is None:
            return
        with self._governing:
            if self.auto is None:
                self._govern_without_a_model(device)

    def _govern_without_a_model(self, device: torch.device) -> None:
        peak_bytes = self._peak_bytes(device)
        try:
            self.auto = Auto([], self._budget, tell=self._tell, **{**self._options, "device": device})
        except UsageError as error:
            self._unfound = -math.inf
            self.refusals.append(f"tensors of no module are not under the budget: {error}")
            self._tell(self.refusals[-1])
            return
        self.auto.was_counted_before(peak_bytes)
        self._tell(uncalled(_WITHOUT_A_MODEL))
        self.auto.expect_uncalled()

    def _is_outermost(self) -> bool:
        if not self._is_on or os.getpid() != self._process or getattr(_ungoverned, "depth", 0) > 0:
            return False
        if self.auto is not None and self.auto.is_within_call():
            return False
        return is_ordinary_call() and not BackwardWatch.is_running()

    def _governed_call(self, module: torch.nn.Module) -> Callable[..., Any] | None:
        try:
            self._govern(module)
        except UsageError as error:
            self._refuse(module, str(error))
            return partial(_ungoverned_call, module)
        except InfeasibleTier as error:  # it would not train with what it asks for
            self._refuse(module, str(error))
            raise SystemExit(error.exit_code) from None
        placed: Callable[..., Any] | None = vars(module).get(PLACE)
        return placed

    def _govern(self, module: torch.nn.Module) -> None:
        with self._governing, self._moving_itself():
            if self.auto is None:
                begin_s, peak_bytes = time.monotonic(), self._peak_bytes(self._device or model_device(module))
                self.auto = auto(module, self._budget, tell=self._tell, **self._options)
                self.auto.was_counted_before(peak_bytes)
                self.preparing_s = time.monotonic() - begin_s
            else:
                self.auto.add(module)

    def _peak_bytes(self, device: torch.device) -> int:
        """Return the most that was live on a device so far."""
        return accelerators.peak_allocated_bytes(device) if accelerators.has_streams(device) else self._live.peak()

    # Moves to the device ----------------------------------------------------------------------------------------------

    @contextmanager
    def _moving_itself(self) -> Iterator[None]:
        """While this moves models, moves are not the program's."""
        self._moving.is_on = True
        try:
            yield
        finally:
            self._moving.is_on = False

    def _moved_by_program(self, module: torch.nn.Module) -> bool:
        """Put a model under the budget that the program moves to the device, and return whether that has moved it."""
        if not self._is_outermost() or getattr(self._moving, "is_on", False):
            return False
        parameters = list(module.parameters())
        if not any(each.requires_grad for each in parameters) or any(map(is_lazy, parameters)):
            return False
        if module in self._refused or obstacle(module) is not None:
            return False
        if isinstance(vars(module).get(PLACE), CallRegion):
            assert self.auto is not None
            with self._moving_itself():
                self.auto.take_in(module)
            return True
        return self._governed_call(module) is not None and module not in self._refused

    def _refuse(self, module: torch.nn.Module, why: str) -> None:
        """Leave a model alone from now on, and say so once."""
        self._refused.add(module)
        self.refusals.append(f"{type(module).__name__} is not under the budget: {why}")
        self._tell(self.refusals[-1])
        if self.auto is not None:
            self.auto.release(module)


def _moving(own: torch.device, is_moved: Callable[[torch.nn.Module], bool]) -> Iterator[Place]:
    """Yield the places of what moves a module, and asks first whether it was moved already, if it goes to a device."""

    def is_own(device: torch.device | None) -> bool:
        if device is None or device.type != own.type:
            return False
        numbers = {str(each).partition(":")[2] for each in (device, own)}
        return len(numbers) == 1 or "" in numbers

    def moving_to(original: Any) -> Any:
        @wraps(original)
        def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            parsed: Any = torch._C._nn._parse_to(*args, **kwargs)
            device, dtype, _, layout = parsed
            if not is_own(device):
                return original(module, *args, **kwargs)
            if dtype is not None or layout is not None:  # where there is room for it
                original(module, dtype=dtype, memory_format=layout)
            return module if is_moved(module) else original(module, *args, **kwargs)

        return to

    def moving_to_cuda(original: Any) -> Any:
        @wraps(original)
        def cuda(module: torch.nn.Module, device: Any = None) -> Any:
            given = "cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device
            is_done = is_own(torch.device(given)) and is_moved(module)
            return module if is_done else original(module, device)

        return cuda

    yield Place(torch.nn.Module, "to", moving_to)
    yield Place(torch.nn.Module, "cuda", moving_to_cuda)


class _CompiledInPlace:
    """What stands in place of the compiled call of a module, so that it is found like any other.

    Args:
        finder: Looks for models.
        module: The module.
        compiled: Its compiled call.
    """

    def __init__(self, finder: ModelFinder, module: torch.nn.Module, compiled: Callable[..., Any]) -> None:
        self._finder, self._module, self.compiled = finder, weakref.ref(module), compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a part of what is compiled
            return self.compiled(*args, **kwargs)
        found = self._finder.__get__(self._module())
        return self.compiled(*args, **kwargs) if found is None else found(*args, **kwargs)


_ungoverned = threading.local()


def _ungoverned_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module that is left alone, and so are its parts."""
    _ungoverned.depth = getattr(_ungoverned, "depth", 0) + 1
    try:
        return own_call(module)(*args, **kwargs)
    finally:
        _ungoverned.depth -= 1


def own_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return what runs the call of a module that is not governed."""
    place = vars(module).get(PLACE)
    call: Callable[..., Any] = place.compiled if isinstance(place, _CompiledInPlace) else module._call_impl
    return call


def _is_scripted() -> bool:
    """Whether it is TorchScript that looks a module's call up, as it does with all attributes of what it translates."""
    return sys._getframe(2).f_globals.get("__name__") == "torch.jit._recursive"


def obstacle(module: torch.nn.Module) -> str | None:
    """Return why the activations of a module cannot be governed, in a few words, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript runs it"
    sharding: Any = sys.modules.get("torch.distributed.fsdp")
    if sharding is not None and isinstance(module, sharding.FullyShardedDataParallel):
        return "FSDP keeps its parameters in pieces"
    return None
