"""Hooks and modes that stand aside for code which would refuse them, or which they would change.

`torch.func` raises where saved tensor hooks are in place, and `torch.compile` leaves a function uncompiled under a
dispatch mode. Both happen in the middle of a forward pass. So what Pooch has put on PyTorch's stacks is silent there,
as if it were not: what such code saves is kept. Hooks of the program's own stay where they are, with all that PyTorch
does about them.

A compiled call has two parts. While Dynamo looks at frames, checks its guards and compiles, nothing of ours may be in
place: what is seen there becomes part of the code, or a reason to compile anew. While a compiled graph runs, Dynamo
looks at nothing. Hooks that want to are in place again then, and see what the graph saves.
"""

from __future__ import annotations

import inspect
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch

from .graph_gaps.operators import HOLDERS, OPERATORS, Left
from .graph_gaps.partition import GAPS
from .mode_stacks import UnnotedMode, take_hooks_away, take_mode_away
from .saved_objects import SAVED_OBJECTS
from .watch import LIBRARY

_autograd: Any = torch._C._autograd
_eval_frame: Any = torch._C._dynamo.eval_frame
_frames_now: Any = _eval_frame.get_eval_frame_callback  # what Python runs would be compiled if it is callable


class CompiledCalls(ABC):
    """Who governs what compiled graphs save."""

    @abstractmethod
    def begins(self, options: Callable[[], Mapping[str, Any]]) -> bool:
        """Prepare for a compiled call, before Dynamo looks at anything. Hooks and modes may come and go here.

        Returns whether what its graphs save is governed. If not, all is silent in all of the call.

        Args:
            options: Returns the options of the compiler.
        """

    def stand_aside(self) -> None:
        """Do nothing in the calling thread from here on: Dynamo is at work, and would look at it."""
        return

    def come_back(self, *, runs_graph: bool) -> None:
        """Go on.

        Args:
            runs_graph: Whether a graph is about to run, until `stand_aside`. Otherwise the call is over.
        """
        return

    def saved_within(self) -> None:
        """Note that the graph which is running has saved something in its midst."""
        return


class StepHooks:
    """Saved tensor hooks of Pooch's, which are silent inside of `torch.func`.

    Args:
        pack: Called with each tensor that autograd saves.
        unpack: Called with what it returned.
        told: Called with what they were silent for, such as "torch.func".
        calls: Is told of compiled calls, the graphs of which may be hooked then. None: they never are.
        is_of_backward: Whether they are in place while a backward pass begins, which takes them along into the threads
            that it runs in.
    """

    def __init__(
        self,
        pack: Callable[[Any], Any],
        unpack: Callable[[Any], Any],
        told: Callable[[str], None] | None = None,
        calls: CompiledCalls | None = None,
        *,
        is_of_backward: bool = False,
    ) -> None:
        self.pair, self.told, self.calls = (pack, unpack), told, calls
        self.is_of_backward = is_of_backward
        self.is_lifted = False

    def __enter__(self) -> None:
        try:
            _note_in_place(True)
            _HERE.hooks.append(self)
            _autograd._push_saved_tensors_default_hooks(*self.pair)
            SAVED_OBJECTS.use(self)
            _install(self)
        except BaseException:
            self.leave()
            raise

    def __exit__(self, *exception: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Take them away, if they are there. May be repeated."""
        if self not in _HERE.hooks:
            return
        if not self.is_lifted:
            take_hooks_away(self.pair)
        self.is_lifted = False
        SAVED_OBJECTS.leave(self)
        _uninstall(self)
        _HERE.hooks.remove(self)
        if not _HERE.hooks and _HERE.lifted is None:
            _HERE.regions.clear()

    def abandon(self) -> None:
        """Take back what is in place for the whole process, as the thread whose stack they are on has ended."""
        SAVED_OBJECTS.leave(self)
        _uninstall(self)


class SilentMode(UnnotedMode):
    """A dispatch mode of Pooch's, which is silent inside of compiled functions.

    It stays on the stack there, and passes on what it is given.

    Attributes:
        is_silent: Whether the ops that come are those of a compiled function.
    """

    supports_higher_order_operators = True  # they come as any other operator

    def __init__(self) -> None:
        super().__init__()
        self.is_silent = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out the wrapper that hides `__torch_dispatch__` from Dynamo.

        It costs as much as all of a step's mode. And it imports Dynamo in the middle of the first op, where something
        keeps frames of the user's forward pass, and their tensors, until the garbage collector runs.
        """
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions be compiled under this mode, as they are without."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op of the thread."""
        if func in OPERATORS:
            return func(*args, **(kwargs or {}))  # it passes what it is given to the hooks
        if not callable(_frames_now()):
            return self.dispatch(func, types, args, kwargs)
        frames = _ORIGINALS["set_eval_frame"](None)  # in what Dynamo leaves to Python within a compiled call
        try:
            return self.dispatch(func, types, args, kwargs)
        finally:
            _ORIGINALS["set_eval_frame"](frames)

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op, of which Dynamo sees nothing."""
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        try:
            _note_in_place(True)
            _HERE.modes.append(self)
            return super().__enter__()
        except BaseException:
            self.leave()
            raise

    def __exit__(self, *exception: Any) -> None:
        self.leave()

    def leave(self) -> None:
        """Take it away, if it is there. May be repeated."""
        if any(each is self for each in _HERE.modes):
            take_mode_away(self)
            _HERE.modes.remove(self)


class Watch(ABC):
    """Watches the ops of a thread without a dispatch mode. It is silent inside of compiled functions as well.

    Attributes:
        is_silent: Whether the ops that come are those of a compiled function.
    """

    is_silent: bool

    @abstractmethod
    def put(self) -> None:
        """Begin to watch in the calling thread."""

    @abstractmethod
    def take_away(self) -> None:
        """Watch no longer, in whatever thread this is called. May be repeated."""

    def __enter__(self) -> None:
        try:
            _note_in_place(True)
            _HERE.modes.append(self)
            self.put()
        except BaseException:
            self.leave()
            raise

    def __exit__(self, *exception: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Take it away, if it is there. May be repeated."""
        if any(each is self for each in _HERE.modes):
            self.take_away()
            _HERE.modes.remove(self)

    def abandon(self) -> None:
        """Watch no longer, as the thread that was watched has ended."""
        self.take_away()


COMPILED = "a compiled function"


class _Here(threading.local):
    """What Pooch has on the stacks of the calling thread.

    Attributes:
        is_muted: Whether hooks are disabled while ours are in place.
        regions: The compiled regions that are running, one within the other, by the frame that began them, and what
            is exempt from compiling within them (False; None: it may end next).
        lifted: The hooks from the lowest of ours on, while ours are lifted; None while they are not.
        is_governed: Whether what the graphs of the compiled call save is governed.
        wants_gaps: Whether what is compiled now gets gaps.
    """

    def __init__(self) -> None:
        self.hooks: list[StepHooks] = []
        self.modes: list[SilentMode | Watch] = []
        self.is_muted = False
        self.regions: list[tuple[Any, bool | None]] = []
        self.lifted: list[Any] | None = None
        self.is_governed = False
        self.wants_gaps = False


_HERE = _Here()


def _note_in_place(is_in_place: bool) -> None:
    """Note whether anything may be in place in the calling thread, before it comes, or after all has gone.

    As long as nothing is, `_set_eval_frame` is hardly ever called.
    """
    library = LIBRARY.loaded
    if library is not None:
        library.note_in_place(is_in_place)


def _own_hooks(pair: Any) -> StepHooks | None:
    return next((each for each in (*_HERE.hooks, *_taken_along()) if each.pair[0] is pair[0]), None)


def _taken_along() -> list[StepHooks]:
    """Hooks that may be on the stack of this thread though another one has put them in place."""
    return [each for each in tuple(_users) if isinstance(each, StepHooks) and each.is_of_backward]


def _take(enough: Callable[[list[Any]], bool]) -> list[Any]:
    """Take pairs of hooks off the stack until there are enough or none is left, and return them, the lowest first."""
    found: list[Any] = []
    while not enough(found) and (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        _autograd._pop_saved_tensors_default_hooks()
        found.insert(0, top)
    return found


def _put(pairs: list[Any]) -> None:
    for pair in pairs:
        _autograd._push_saved_tensors_default_hooks(*pair)


def _lifted_hooks() -> list[Any]:
    """Take ours away, and return what lay there from the lowest of them on."""
    count = len(_HERE.hooks)
    before = _take(lambda found: sum(_own_hooks(pair) is not None for pair in found) >= count)
    for pair in before:
        mine = _own_hooks(pair)
        if mine is None:
            _put([pair])
        else:
            mine.is_lifted = True
    return before


def _put_hooks_back(before: list[Any]) -> None:
    """Put ours back, where they were unless others have come or gone. Some may have ended meanwhile."""
    mine = [pair for pair in before if (each := _own_hooks(pair)) is not None and each.is_lifted]
    others = [pair for pair in before if _own_hooks(pair) is None]
    now = _take(lambda found: len(found) >= len(others))
    is_unchanged = len(now) == len(others) and all(a[0] is b[0] for a, b in zip(now, others, strict=True))
    _put([pair for pair in before if pair in mine or pair in others] if is_unchanged else [*now, *mine])
    for hooks in map(_own_hooks, mine):
        assert hooks is not None
        hooks.is_lifted = False


def _tell(what: str) -> None:
    for hooks in _HERE.hooks:
        if hooks.told is not None:
            hooks.told(what)


# torch.func ---------------------------------------------------------------------------------------------------------


def _only_ours() -> bool:
    """Whether all saved tensor hooks in place are Pooch's."""
    if not _HERE.hooks and not _taken_along():
        return False
    if not _autograd._saved_tensors_hooks_is_enabled():
        return _HERE.is_muted  # none could be added since
    there = _take(lambda _: False)
    _put(there)
    return all(_own_hooks(pair) is not None for pair in there)


def _disable(error_message: str, fail_if_non_empty: bool = True) -> None:
    """Disable hooks as PyTorch does, which refuses if there are any: ours do not count, and are silent meanwhile."""
    if fail_if_non_empty and _only_ours():
        if _autograd._saved_tensors_hooks_is_enabled():
            _HERE.is_muted = True
            _tell("torch.func")
        fail_if_non_empty = False
    _ORIGINALS["disable"](error_message, fail_if_non_empty)


# torch.compile ------------------------------------------------------------------------------------------------------


def _set_eval_frame(callback: Any) -> Any:
    """Set what compiles the frames of this thread, as TorchDynamo does around each compiled region.

    The former callback alone does not tell whether a region begins or ends: it is unset while a frame is compiled, and
    stays so if that fails. So regions are known by the frame that sets it.
    """
    here = _HERE
    frame = sys._getframe(1)
    if _EVERYWHERE and callback is None and frame.f_code.co_name == _BEGINS_CALL and not callable(_frames_now()):
        _tell_everywhere(frame)
    if not (here.hooks or here.modes or here.regions):
        _note_in_place(False)
        return _ORIGINALS["set_eval_frame"](callback)
    region = frame.f_locals["self"] if frame.f_code.co_name in ("__enter__", "__exit__") else frame
    is_top = bool(here.regions) and here.regions[-1][0] is region
    if callback is not None:
        if is_top and not here.regions[-1][1]:
            # What is exempt is over, unless it begins: where nothing may be compiled anew, that is not None either.
            if callback is not False or here.regions[-1][1] is None:
                here.regions.pop()
        elif not is_top:
            _call_begins(frame)
            here.regions.append((region, True))
        _lift_or_put_back()  # before it is set, as else it would look at our own frames
        return _ORIGINALS["set_eval_frame"](callback)
    prior = _ORIGINALS["set_eval_frame"](None)
    if len(here.regions) > 1 and here.regions[-2][0] is region:
        here.regions.pop()  # a graph has run where nothing was to be compiled
        _lift_or_put_back()
        is_top = True
    if is_top and here.regions[-1][1]:
        here.regions.pop()
    elif is_top:
        here.regions[-1] = (region, None)
    elif prior is not None or _runs_full_graph(frame):
        here.regions.append((region, False))
    elif frame.f_code.co_name == _BEGINS_CALL and "prior" not in frame.f_locals:
        # Before it notes which keys are included, to be included again within the call. It sets None later too where
        # it compiles nothing, as torch.compiler.set_stance("force_eager") has it.
        _call_begins(frame)
    _lift_or_put_back()
    return prior


_BEGINS_CALL = "compile_wrapper"  # the function that Dynamo has in place of one that is compiled


def _runs_full_graph(frame: FrameType) -> bool:
    """Whether a frame calls the graph of a function that was compiled with `fullgraph=True`.

    Nothing is compiled from there on, so PyTorch has unset the callback before (2.13). It is unset as well while a
    frame is compiled, where other functions are exempt: what calls a graph is told by the reason it gives.
    """
    exempting = frame.f_locals.get("self") if _HERE.regions and _HERE.regions[-1][1] else None
    return getattr(exempting, "msg", None) == "do not trace Dynamo-compiled graph"


def _call_begins(frame: FrameType) -> None:
    def options() -> Mapping[str, Any]:
        return getattr(frame.f_locals.get("self"), "compiler_config", None) or {}

    here = _HERE
    if any(is_compiled for _, is_compiled in here.regions) or here.lifted is not None:
        return
    # Hooks of ours that others take the place of are beneath those that the program has put in place since.
    found = _take(lambda found: sum(_own_hooks(pair) is not None for pair in found) >= len(here.hooks))
    theirs = [pair for pair in found if _own_hooks(pair) is None]
    _put([pair for pair in found if pair not in theirs])
    try:
        here.is_governed = True
        asked = set[StepHooks]()  # a step may begin or go on as another one, whose hooks are asked then
        while (hooks := next((each for each in here.hooks if each not in asked), None)) is not None:
            asked.add(hooks)
            here.is_governed &= hooks.calls is not None and hooks.calls.begins(options)
    finally:
        _put(theirs)


def _lift_or_put_back() -> None:
    here = _HERE
    is_within = any(is_compiled for _, is_compiled in here.regions)
    # What is exempt from compiling within a region includes the compiled code itself.
    if is_within and not (here.is_governed and not here.regions[-1][1]):
        _lift()
    elif here.lifted is not None:
        _put_back(runs_graph=is_within)
    for mode in here.modes:
        mode.is_silent = is_within


def _lift() -> None:
    if _HERE.lifted is not None:
        return
    if not _HERE.is_governed:
        _tell(compiled_name())
    elif not _HERE.wants_gaps:
        _HERE.wants_gaps = True
        GAPS.begin()
    _HERE.lifted = _lifted_hooks()
    for hooks in _HERE.hooks:
        if hooks.calls is not None:
            hooks.calls.stand_aside()


def _put_back(*, runs_graph: bool) -> None:
    assert _HERE.lifted is not None
    if _HERE.wants_gaps:
        _HERE.wants_gaps = False
        GAPS.end()
    before, _HERE.lifted = _HERE.lifted, None
    _put_hooks_back(before)
    for hooks in _HERE.hooks:
        if hooks.calls is not None:
            hooks.calls.come_back(runs_graph=runs_graph)


def _held_within(tensor: torch.Tensor) -> Left | None:
    """Pass what a graph saves in its midst to the hooks in place, if they are ours."""
    pair = _autograd._top_saved_tensors_default_hooks(True) if _HERE.hooks else None
    if pair is None or _own_hooks(pair) is None:
        return None
    left = Left(pair[0](tensor), pair[1])
    for hooks in _HERE.hooks:
        if hooks.calls is not None:
            hooks.calls.saved_within()
    return left


HOLDERS.append(_held_within)


def backward_is_compiled() -> bool:
    """Whether backward passes are compiled as well, in which unpacking is a part of what is compiled."""
    config, module = (sys.modules.get(f"torch._dynamo.{name}") for name in ("config", "compiled_autograd"))
    is_on = bool(getattr(config, "compiled_autograd", False))
    return is_on or bool(getattr(module, "compiled_autograd_enabled", False))


def compiled_name() -> str:
    """Return what is compiled, for people: an operator of higher order compiles itself."""
    for frame, _ in walk_stack(sys._getframe()):
        name = frame.f_globals.get("__name__", "")
        for package in ("torch._higher_order_ops.", "torch.nn.attention."):
            if name.startswith(package) and not name.endswith(".utils"):
                return f"torch.{name.removeprefix(package)}"
    return COMPILED


class CallsEverywhere:
    """Tells of compiled calls of any thread before they begin, as long as it is in use.

    Args:
        begins: Called before each of them, with what was compiled.
    """

    def __init__(self, begins: Callable[[Any], None]) -> None:
        self._begins = begins

    def begin(self) -> None:
        """Tell from now on."""
        _install(self)
        _EVERYWHERE.append(self)

    def end(self) -> None:
        """Tell no longer. May be repeated."""
        if self in _EVERYWHERE:
            _EVERYWHERE.remove(self)
        _uninstall(self)

    def tell(self, compiled: Any) -> None:
        """Tell of a call, unless Dynamo itself makes it while it compiles another one."""
        if torch._guards.TracingContext.try_get() is None:
            self._begins(compiled)


_EVERYWHERE: list[CallsEverywhere] = []


def _tell_everywhere(frame: FrameType) -> None:
    for each in list(_EVERYWHERE):
        each.tell(inspect.unwrap(frame.f_locals["fn"]))


# Putting both in place ----------------------------------------------------------------------------------------------

_ORIGINALS: dict[str, Any] = {
    "disable": _autograd._saved_tensors_hooks_disable,
    "set_eval_frame": _eval_frame.set_eval_frame,
}
_WRAPPERS = {"disable": _disable, "set_eval_frame": _set_eval_frame}
_lock = threading.Lock()
_users: set[StepHooks | CallsEverywhere] = set()  # of all threads


def _places() -> list[tuple[Any, str, str]]:
    places = [(_autograd, "_saved_tensors_hooks_disable", "disable"), (_eval_frame, "set_eval_frame", "set_eval_frame")]
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # it has its own references from when it was imported
    if dynamo is not None:
        places += [(dynamo, name, "set_eval_frame") for name in ("set_eval_frame", "_maybe_set_eval_frame")]
    return places


def _install(user: StepHooks | CallsEverywhere) -> None:
    """Put the wrappers in place with the first user of any thread."""
    with _lock:
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        if dynamo is not None:  # as they are called within compiled calls, they would be looked at as a part of those
            for function in (_set_eval_frame, _note_in_place, SilentMode.__torch_dispatch__):
                dynamo.skip_code(function.__code__)
        is_first = not _users
        _users.add(user)
        if is_first:
            library = LIBRARY.loaded
            if library is not None:
                original, name = _ORIGINALS["set_eval_frame"], _BEGINS_CALL
                _WRAPPERS["set_eval_frame"] = library.frame_setter(original, _set_eval_frame, name)
            for place, name, which in _places():
                if getattr(place, name, None) is _ORIGINALS[which]:
                    setattr(place, name, _WRAPPERS[which])


def _uninstall(user: StepHooks | CallsEverywhere) -> None:
    with _lock:
        _users.discard(user)
        if not _users:
            for place, name, which in _places():
                if getattr(place, name, None) is _WRAPPERS[which]:
                    setattr(place, name, _ORIGINALS[which])
