"""A region around every call of a module that does not affect `forward`, hooks, copies or wrappers of the module.

`torch.nn.Module` has a place for this: the function in `_compiled_call_impl` is called in place of `_call_impl`, and
copies of the module do not have it. `Module.compile()` uses it too. A region that takes compiled modules calls what was
there, and puts it back.

What takes all attributes of a module over, as the replicas of DataParallel do, has it among them. So whoever is in that
place looks which module is being called, and leaves those alone that are not its own.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch

from ..ground.errors import UsageError
from ..ground.live_objects import live_objects
from .stand_ins import Place, StandIns

PLACE = "_compiled_call_impl"
Purpose = Literal["plan", "auto", "profile", "watch", "arena"]
_STATES = {
    "plan": "under a plan already: call remove() on what pooch.apply or pooch.guard returned",
    "auto": "under pooch.auto already: call remove() on what it returned",
    "profile": "being profiled already: wait until that is over",
    "arena": "on an arena already: call remove() on what pooch.arena returned",
}
Region = Callable[[], AbstractContextManager[object]]


class CallContext(AbstractContextManager[None]):
    """The region of one call.

    Attributes:
        is_left: Whether the call is over, also where Ctrl-C at the entry of `__exit__` has kept that from running.
    """

    is_left = False


class CallingThread(threading.local):
    """What the calling thread does.

    Attributes:
        call: The outermost call that it was in of those that share this.
    """

    call: CallContext | None = None

    @property
    def is_within_call(self) -> bool:
        """Whether it is in that call now."""
        return self.call is not None and not self.call.is_left


class _Placed:
    """What stands in the place of a module's calls. Copies of the module, and what is saved of it, are without it."""

    _module: Callable[[], torch.nn.Module | None]

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()

    def is_in_place(self) -> bool:
        """Returns whether calls of the module still go through this."""
        module = self._module()
        return module is not None and vars(module).get(PLACE) is self

    def leave_to(self, taker: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a module that has taken over the attributes of this one's, and takes this out of them."""
        module = self._module()
        if module is not None and vars(module) is vars(taker):
            return taker._call_impl(*args, **kwargs)
        vars(taker).pop(PLACE, None)
        return taker(*args, **kwargs)


class CallRegion(_Placed):
    """Runs each call of a module, including the module's own hooks, within a region.

    Copies of the module do not have the region, and direct calls of `module.forward(...)` bypass it.

    Args:
        module: the module; it holds the region, and the region does not keep it alive.
        region: creates the context manager for one call.
        purpose: what the region is for. A region that only watches yields to one that does not.
        here: what the calling thread does. Within an outermost call nothing is done around others.
        takes_compiled: whether the module may be compiled, in whole or in part.

    Raises:
        UsageError: if the module is compiled and must not be, under a plan, or being profiled.
    """

    stays = False  # where the module is compiled in place from now on

    def __init__(
        self,
        module: torch.nn.Module,
        region: Region,
        purpose: Purpose,
        here: CallingThread | None = None,
        *,
        takes_compiled: bool = False,
    ) -> None:
        refuse_taken(module, takes_compiled=takes_compiled)
        self._takes_compiled = takes_compiled
        there = vars(module).get(PLACE)
        self._compiled: Callable[..., Any] | None = None if isinstance(there, CallRegion) else there
        self.purpose, self._here = purpose, here
        self._module, self._region = weakref.ref(module), region
        if purpose not in ("auto", "watch"):  # what places many of them uses it once for all
            SAVED_WITHOUT.use(self)
        vars(module)[PLACE] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        module, here = self._module(), self._here
        # Also in a part of a compiled function that Dynamo runs in Python.
        if _is_traced() or _compiler._is_compiling_flag or callable(_compiling_now()):
            assert module is not None, "the module is being called"
            if not (self._takes_compiled or _compiler._is_exporting_flag):  # Dynamo 2.11 takes its function for True
                _refuse_to_compile_a_planned_model()
            return module._call_impl(*args, **kwargs)
        caller = sys._getframe(1)
        if caller.f_code is _CALLING and (called := caller.f_locals["self"]) is not module:
            return self.leave_to(called, args, kwargs)
        assert module is not None, "the module is being called"
        if here is None or (call := here.call) is None or call.is_left:
            return self.run(module, args, kwargs)
        # Each part of a model comes here in each call of the model, so this is `plain` without a call of its own.
        return module._call_impl(*args, **kwargs) if self._compiled is None else self._compiled(*args, **kwargs)

    def run(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs one call of the module within the region."""
        with self._region():
            return self.plain(module, args, kwargs)

    def plain(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs one call of the module as without the region."""
        if self._compiled is not None:
            return self._compiled(*args, **kwargs)
        return module._call_impl(*args, **kwargs)

    def compiled_in_place(self) -> None:
        """Notes that `Module.compile()` was called, which has taken the place."""
        module = self._module()
        if module is not None and self.stays:
            self._compiled = vars(module)[PLACE]
            vars(module)[PLACE] = self

    def compiled_outside(self, compiled: torch.nn.Module) -> None:
        """Notes that `torch.compile` has made another module of this one, which calls it."""

    def remove(self) -> None:
        """Restores the module's calls, unless something else has taken the place since."""
        SAVED_WITHOUT.leave(self)
        module = self._module()
        if module is not None and self.is_in_place():
            if self._compiled is None:
                del vars(module)[PLACE]
            else:
                vars(module)[PLACE] = self._compiled


class FirstCall(_Placed):
    """Stands in the place of a module's calls until something else is put there, which the first call asks for.

    Args:
        module: the module; it holds this, which does not keep it alive.
        comes: is called with the module before a call of it runs, and may put a region there.
    """

    def __init__(self, module: torch.nn.Module, comes: Callable[[torch.nn.Module], None]) -> None:
        self._module, self._comes = weakref.ref(module), comes
        vars(module)[PLACE] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        module = self._module()
        if not (_is_traced() or _compiler._is_compiling_flag or callable(_compiling_now())):
            caller = sys._getframe(1)
            if caller.f_code is _CALLING and (called := caller.f_locals["self"]) is not module:
                return self.leave_to(called, args, kwargs)
            assert module is not None, "the module is being called"
            self.remove()
            self._comes(module)
            if vars(module).get(PLACE) is not None:
                return module(*args, **kwargs)
            vars(module)[PLACE] = self
        assert module is not None, "the module is being called"
        return module._call_impl(*args, **kwargs)

    def remove(self) -> None:
        """Restores the module's calls, unless something else has taken the place since. May be repeated."""
        module = self._module()
        if module is not None and self.is_in_place():
            del vars(module)[PLACE]


_CALLING = torch.nn.Module.__call__.__code__  # of the function that calls what is in that place
# Asked in every call of every part of a model, so each is one call at most. Dynamo knows what the first one returns.
_is_traced, _compiler = torch.compiler.is_dynamo_compiling, torch.compiler
_compiling_now = torch._C._dynamo.eval_frame.get_eval_frame_callback


def _nothing() -> None:
    return None


# `torch.compiler.disable` would import Dynamo. A compiler that insists on a whole graph shows this function's name.
@torch._compile._disable_dynamo
def _refuse_to_compile_a_planned_model() -> None:
    raise UsageError(
        "the model was compiled while it is under a plan, and compiled code saves activations where the plan cannot "
        "see them: train without torch.compile, or remove the plan first"
    )


def _compile_in_place(original: Any) -> Any:
    @functools.wraps(original)
    def compiling(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        region, finder = vars(module).get(PLACE), vars(torch.nn.Module).get(PLACE)
        original(module, *args, **kwargs)
        if isinstance(region, CallRegion):
            region.compiled_in_place()
        elif finder is not None:
            finder.compiled_in_place(module)

    return compiling


def _compile_outside(original: Any) -> Any:
    @functools.wraps(original)
    def compiling(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        for module in (*args[:1], kwargs.get("model")):
            region = vars(module).get(PLACE) if isinstance(module, torch.nn.Module) else None
            if isinstance(region, CallRegion) and isinstance(made, torch.nn.Module):
                region.compiled_outside(made)
        return made

    return compiling


def _save_without(original: Any) -> Any:
    @functools.wraps(original)
    def reducing(module: torch.nn.Module, protocol: Any) -> Any:
        made = original(module, protocol)
        state = made[2] if isinstance(made, tuple) and len(made) > 2 else None
        if not (isinstance(state, dict) and isinstance(state.get(PLACE), _Placed)):
            return made
        return (*made[:2], {name: value for name, value in state.items() if name != PLACE}, *made[3:])

    return reducing


# In place as long as regions are: recurrent modules, DDP and others that say themselves what is saved of them save all
# attributes, and what names a function of Pooch cannot be loaded without it, nor with `weights_only`.
SAVED_WITHOUT = StandIns(Place(torch.nn.Module, "__reduce_ex__", _save_without))
# In place as long as somebody governs modules that the program may compile later.
COMPILED_LATER = StandIns(
    Place(torch.nn.Module, "compile", _compile_in_place), Place(torch, "compile", _compile_outside)
)


def compiled_kinds() -> list[type]:
    """Returns the type of what `torch.compile` makes of modules; none, as long as nothing was compiled."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # loaded by any program that compiles
    return [] if dynamo is None else [dynamo.OptimizedModule]


def compiled_of(models: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Returns what `torch.compile` has made of some models so far, and what is still there of it."""
    wrappers = [each for kind in compiled_kinds() for each in live_objects(kind)]
    made_of = [(each, vars(each).get("_modules", {}).get("_orig_mod")) for each in wrappers]
    return [wrapper for wrapper, original in made_of if any(original is model for model in models)]


@contextmanager
def called_within(module: torch.nn.Module, region: Region, purpose: Purpose) -> Iterator[None]:
    """Context manager that places a region around the calls of a module."""
    placed = CallRegion(module, region, purpose, takes_compiled=True)
    try:
        yield
    finally:
        placed.remove()


def refuse_taken(model: torch.nn.Module, *, can_replace: bool = False, takes_compiled: bool = False) -> None:
    """Checks that a region can be placed around the calls of a model and of its modules.

    Args:
        model: the model.
        can_replace: whether the caller can take the place of an earlier `pooch.auto`.
        takes_compiled: whether it can be compiled, in whole or in part.

    Raises:
        UsageError: if the model is compiled and must not be, or has a region already.
    """
    if not takes_compiled:
        refuse_compiled(model)
    for name, module in model.named_modules():
        there = vars(module).get(PLACE)
        if isinstance(there, CallRegion) and there.purpose != "watch":
            what = f"module {name!r} of the model" if name else "the model"
            instead = ", or give replace=True" if can_replace and there.purpose == "auto" else ""
            raise UsageError(f"{what} is {_STATES[there.purpose]}{instead}")


def refuse_compiled(model: torch.nn.Module) -> None:
    """Checks that `torch.compile` was not applied to any part of a model.

    Raises:
        UsageError: if the model or one of its modules is compiled.
    """
    compiled = compiled_part(model)
    if compiled is not None:
        raise UsageError(
            f"{compiled} is compiled by torch.compile, and compiled code saves activations where a plan cannot see "
            "them: give the model as it was before compiling, and train that"
        )


def compiled_part(model: torch.nn.Module) -> str | None:
    """Returns a description of a compiled module of the model, or None. This is called before every step."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # loaded by any program that compiles
    if dynamo is None:
        return None
    ahead: list[torch.nn.Module | None] = [model]
    while ahead:  # `modules()` takes three times as long
        module = ahead.pop()
        if module is not None:
            if is_compiled(module):
                return "the model" if module is model else f"its module {_name_of(module, model)!r}"
            ahead.extend(module._modules.values())
    return None


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns whether `torch.compile` was applied to a module itself."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    own = vars(module)
    call = own.get(PLACE)
    if isinstance(call, CallRegion):
        call = call._compiled
    if call is not None or type(module) is dynamo.OptimizedModule:
        return True
    forward = own.get("forward") or getattr(type(module), "forward", None)  # that of a traced module refuses to tell
    return hasattr(forward, "_torchdynamo_orig_callable")


def _name_of(part: torch.nn.Module, model: torch.nn.Module) -> str:
    return next((name for name, module in model.named_modules() if module is part), "")
