"""When parameters, gradients and the state of optimizers may leave the device under `pooch.auto`: where they must.

Plans decide on activations alone, and lose less time than moving what each step needs again. So as long as a step fits
with everything else on the device, everything else stays.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..executor.evictor import Evictor
from ..executor.persistent import PersistentMemory, move_state
from ..executor.slices import known_moments
from ..executor.tier import rounded_bytes
from ..ground.errors import InfeasibleTier, UsageError
from ..ground.units import format_bytes
from ..ground.weakly import weakly
from ..machine.growing import GrowingBudget
from ..machine.persistent import KINDS, Kind, Moved
from ..torchtools.calls import compiled_part
from ..torchtools.module_tensors import module_tensors, parameters_of
from ..torchtools.optimizer_hooks import not_traced
from ..torchtools.standing_aside import CallsEverywhere
from ..torchtools.tensors import gradient_of
from ..torchtools.threads import is_alone
from ..torchtools.watch import LIBRARY, unmark
from .known import NOTHING_AWAY, Away
from .loop_times import LoopTimes
from .optimizer_states import OptimizerStates, is_on, is_stepping, stepped_by
from .persistent_needs import PersistentNeeds
from .program_data import ProgramData
from .sliced_optimizers import SlicedOptimizers
from .steps import Storages
from .summary import MovedKind

_RECORDS_STACKS = "TraceContext"  # of the type of PyTorch's own tracer
_MOST_STEPS_WITH_MOVES = 3  # in which more than state had to leave though they could be planned
_MANY_STEPS = 8  # of optimizers of other models, before a governed one is called
_NAMES: dict[Kind, str] = {
    "parameter": "parameters",
    "gradient": "gradients",
    "state": "optimizer's state",
    "buffer": "buffers",
    "data": "data of the program",
}


class Persistence:
    """What outlives the steps of some models, and may leave if a step does not fit with all of it on the device.

    Args:
        evictor: Holds the budget.
        optimizers: The optimizers of the models. Without any, those that are there are looked for.
        tell: Called with one line.
        times: Is told when optimizers step.

    Attributes:
        memory: What may leave, or None as long as everything stays.
        may_plan: Whether steps can be planned: of all this, only the optimizer's state is away in them.
        has_compiled: Whether compiled graphs run in steps.
        states: The optimizers, and the state that they have and have yet to make.
    """

    def __init__(
        self,
        evictor: Evictor,
        optimizers: Sequence[torch.optim.Optimizer],
        tell: Callable[[str], None],
        times: LoopTimes,
    ) -> None:
        self._evictor, self._tell, self.times = evictor, tell, times
        self._sliced = SlicedOptimizers(tell, times)
        self.states = OptimizerStates(optimizers, self._sliced.by_optimizer)
        self.memory: PersistentMemory | None = None
        self._moved: Moved | None = None
        self._staying_bytes: Mapping[str, int] = {}
        self._is_refused = self._has_begun = False
        self._is_on_trial = False  # whether memory is there for one step alone, unless that needs it
        self._moved_in: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # of models that do not fit
        self._has_missed = False  # whether the budget was passed in the last step, or in an optimizer's after it
        self._has_passed_by = False  # whether that was not under it
        self._hook = register_optimizer_step_post_hook(not_traced(weakly(self.optimizer_stepped)))
        self._before_steps: RemovableHandle = register_optimizer_step_pre_hook(not_traced(weakly(self.optimizer_steps)))
        self._calls = CallsEverywhere(weakly(self.compiled_call_begins))
        self._models: Sequence[weakref.ref[torch.nn.Module]] = ()
        self._unseen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # models, until a step begins
        self._others_steps = 0  # of optimizers that step none of their parameters
        self._known_bytes: int | None = None  # the budget when the step before began
        self._is_budget_known, self._share = False, 0.0  # what more it will have for each byte of state to come
        self._needs = PersistentNeeds(evictor, self.states)
        self._data = ProgramData(evictor, self._say)
        self._are_viewed = False  # whether autograd held views of parameters when things began to leave
        self._slice_bytes = 0
        self._moved_bytes = self._steps_with_moves = 0
        self.may_plan, self.has_compiled = True, False
        self._may_resort, self._may_adopt_state, self._is_in_op = True, True, False
        self._untold: list[str] = []  # what came up in the middle of an op
        self._said = set[str]()

    @property
    def moves(self) -> bool:
        """Whether anything of it has left or come back since the step began."""
        return self.memory is not None and self.memory.moved_bytes > self._moved_bytes

    @property
    def away(self) -> Away:
        """What of it is away, which plain training has there."""
        if self.memory is None:
            return NOTHING_AWAY
        away_bytes = self.memory.values.away_bytes()  # each step asks for it
        return Away(away_bytes.total(), away_bytes["state"])

    def refuse(self) -> None:
        """Have nothing leave, as that would free nothing."""
        self._is_refused = True

    def listen(self, quiet_steps: Any = None) -> None:
        """Note the steps of optimizers, but for those between steps for which nothing is done.

        Args:
            quiet_steps: Runs these natively, if anything does.
        """
        stepped: Callable[..., None] = not_traced(weakly(self.optimizer_stepped))
        steps: Callable[..., None] = not_traced(weakly(self.optimizer_steps))
        if quiet_steps is not None:  # which has the same to ask before an optimizer's step as after it
            stepped, steps = quiet_steps.after_step(stepped), quiet_steps.after_step(steps)
        self._hook.remove()
        self._before_steps.remove()
        self._hook = register_optimizer_step_post_hook(stepped)
        self._before_steps = register_optimizer_step_pre_hook(steps)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note that an optimizer has made a step, with as much state as it will have."""
        self.times.optimizer_stepped(optimizer)
        self._has_missed = self._has_missed or (self._evictor.missing_bytes > 0 and not self._has_passed_by)
        if self.memory is not None:
            self.states.stepped(optimizer)
        if self._unseen:
            self._tell_of_unseen(optimizer)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Have an optimizer step in slices that was not known when the step began, as one that was made since.

        If its first step would pass the budget with the state that it makes, things leave from here on.
        """
        if torch.compiler.is_compiling():
            return
        self.times.optimizer_steps(optimizer)
        if self._is_on_trial and not self._may_go_on(optimizer):
            return
        memory = self.memory
        if memory is not None and self._are_viewed and is_alone():
            self._are_viewed = False
            memory.staying_bytes.clear()
            memory.adopt_models(self._living())
            memory.make_room()
        if memory is None and not self.states.is_like_before(optimizer):
            memory = self._begin_before(optimizer)
        if memory is None or optimizer in self._sliced.by_optimizer or not is_on(optimizer, self._evictor.device):
            return
        memory.adopt_stepped(stepped_by(optimizer))
        self._sliced.add(optimizer, memory, self._slice_bytes)
        memory.make_room()

    def _may_go_on(self, optimizer: torch.optim.Optimizer) -> bool:
        """Go on with what is on trial if an optimizer's step would pass the budget, and return whether it would."""
        is_passed = not self.states.is_like_before(optimizer) and self._needs.is_passed_by_step(
            optimizer, self._evictor.budget_bytes, self._share
        )
        if is_passed and self.memory is not None:
            self._go_on(self.memory)
        return is_passed

    def _begin_before(self, optimizer: torch.optim.Optimizer) -> PersistentMemory | None:
        """Have things leave from an optimizer's step on if it would pass the budget."""
        budget_bytes = self._evictor.budget_bytes
        may_begin = self._is_budget_known and self._may_begin() and is_on(optimizer, self._evictor.device)
        if not (may_begin and self._needs.is_passed_by_step(optimizer, budget_bytes, self._share)):
            return None
        models = self._living() if is_alone() else []
        memory = self._begin(models, budget_bytes)
        if memory is not None:
            memory.begin_step(models)
            self._attach(models, memory)
            memory.make_room()
        return memory

    def step_passed_by(self) -> None:
        """Note that a step was not under the budget, and that this was told: what it took is no reason for anything."""
        self._has_passed_by = True
        self._unseen.clear()

    def _tell_of_unseen(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell that a model is trained whose calls are not seen, once."""
        stepped = set(map(id, stepped_by(optimizer)))
        for model in list(self._unseen):
            if any(id(parameter) in stepped for parameter in model.parameters()):
                self._unseen.clear()
                name = type(model).__name__
                self._tell(
                    f"an optimizer has made a step, but neither a call of {name} nor a backward pass was seen, as "
                    "where torch.func computes gradients, so the budget is not held: compute them by loss.backward()"
                )
                return
        self._others_steps += 1
        if self._others_steps == _MANY_STEPS:
            self._tell(
                f"optimizers have made {_MANY_STEPS} steps, but on parameters of none of the models under the budget, "
                "of which none was called either, so the budget is not held: give the models that are trained"
            )

    def compiled_call_begins(self, _: object) -> None:
        """Have everything back for good, as a compiled graph is about to run, whose kernels take addresses."""
        if self.memory is None:
            return
        was_on_trial = self._is_on_trial
        self._end_and_unmark()
        if not was_on_trial:
            self._refuse_compiled()

    def _end_and_unmark(self) -> None:
        """Have everything back for good, and nothing on any tensor, the keys of which are a reason to compile anew."""
        models = self._living()
        stepped = self.states.in_no_model(models)
        self._end_memory()
        for tensor in chain(stepped, *map(tensors_of, models)):
            unmark(tensor)
        self._data.unmark()

    def _refuse_compiled(self) -> None:
        self._is_refused, self.may_plan = True, True
        self._tell(
            "parameters, gradients and the optimizer's state stay on the device, as compiled graphs read them by their "
            "addresses: raise the budget, lower the batch size, or train without torch.compile"
        )

    def bring_in(self, models: Sequence[torch.nn.Module], device: torch.device, budget_bytes: int | None) -> None:
        """Have enough leave of what is there already, and move what is somewhere else to the device, one by one.

        Args:
            models: The models.
            device: Where they are to be. Parameters, gradients and buffers that are there already are not moved.
            budget_bytes: The budget, or None if it is not known yet.

        Raises:
            InfeasibleTier: If the swap tier may not take what has to leave.
        """
        try:
            self.step_begins(models, budget_bytes)
            self._unseen.update(models)
            self._move_in(models, device)
        except BaseException:
            self.close()
            raise
        self._has_begun = True

    def move_in(self, models: Sequence[torch.nn.Module], device: torch.device, budget_bytes: int | None) -> None:
        """Move further models to the device, or what has been put into models somewhere else.

        Args:
            models: The models.
            device: Where they are to be.
            budget_bytes: The budget, or None if it is not known yet.
        """
        if self.memory is None and budget_bytes is not None and self._is_needed(models, budget_bytes):
            self._begin(models, budget_bytes)
        self._move_in(models, device)

    def joins(self, model: torch.nn.Module) -> None:
        """Have what there is of a further model leave from now on: it may be called in a step that has begun before."""
        if self.memory is not None:
            self.memory.adopt_models([model])

    def _move_in(self, models: Sequence[torch.nn.Module], device: torch.device) -> None:
        elsewhere = [model for model in models if any(each.device != device for each in tensors_of(model))]
        if not elsewhere:
            return
        memory = self.memory
        if memory is None:  # they fit
            for model in elsewhere:
                model.to(device)
            moved = {id(parameter) for model in elsewhere for parameter in model.parameters()}
            for optimizer in self.states.optimizers_of(moved):
                move_state(optimizer)
            return
        self._moved_in.update(elsewhere)
        for model in elsewhere:
            memory.move_in(model)
        for optimizer in list(self._sliced.by_optimizer):
            memory.move_state_in(optimizer)
        memory.make_room()

    def step_begins(
        self,
        models: Sequence[torch.nn.Module],
        budget_bytes: int | None,
        arguments: object = None,
        most_bytes: int | None = None,
    ) -> None:
        """Look at what a step begins with, and let it leave if there is no room for it.

        Args:
            models: The models of the step.
            budget_bytes: The budget, or None if it is not known yet.
            arguments: What the model is called with, in any nesting. None: no step begins.
            most_bytes: What may be live as the step begins for its plan to be followed, or None without a plan.
        """
        self._unseen.clear()
        has_missed = self._has_missed or self._has_missed_between()
        self._has_passed_by = False
        self._models = [weakref.ref(model) for model in models]
        self._may_resort = self._may_adopt_state = True
        self._is_budget_known, self._share = budget_bytes is not None, 0.0
        if self._has_to_stay():
            return
        has_sizes = arguments is not None and budget_bytes is not None
        given_bytes = self._needs.most_given_bytes(arguments) if has_sizes else None
        memory = self._memory_of(models, budget_bytes, given_bytes)
        if memory is None:
            return
        if not self._is_on_trial:
            self._data.step_begins(memory, has_missed, arguments)
        if self._is_on_trial or (given_bytes is not None and not (self._has_limit or self._data.has_begun)):
            self._data.begin_trial(memory, arguments)
            memory.values.held_back |= {"data"}
        elif self._data.has_begun:
            memory.values.held_back = frozenset()
        self._has_missed = False
        here_bytes, parameters = memory.values.here_bytes(), parameters_of(models)
        stepped = self.states.in_no_model(models, parameters)
        has_room = self._needs.can_stay([*parameters, *stepped], here_bytes)
        self.may_plan = memory.values.are_last = has_room and self._steps_with_moves < _MOST_STEPS_WITH_MOVES
        if self.may_plan and not self._is_on_trial:  # else it leaves as pressure asks for it
            if most_bytes is None:
                memory.let_state_leave(self._needs.missing_bytes(here_bytes, budget_bytes))
            else:
                memory.let_state_leave(self._evictor.live.now() - most_bytes)
        memory.make_room()
        self._moved_bytes = memory.moved_bytes

    def _has_missed_between(self) -> bool:
        """Whether the budget was passed since the last step, as where averages of parameters are updated."""
        return self._evictor.missing_bytes > 0 and not self._has_passed_by

    def _memory_of(
        self, models: Sequence[torch.nn.Module], budget_bytes: int | None, given_bytes: int | None = None
    ) -> PersistentMemory | None:
        """Return what lets things leave, with all in it that the models have by now; None if nothing needs to leave.

        Args:
            models: The models.
            budget_bytes: The budget, or None if it is not known yet.
            given_bytes: What a step is given that begins, if that is more than any before it was given.
        """
        if self.memory is None and budget_bytes is not None:
            if self._is_needed(models, budget_bytes):
                self._begin(models, budget_bytes)
            elif given_bytes is not None and self._needs.may_be_tight(parameters_of(models), given_bytes):
                self._begin_trial(models, budget_bytes)
        memory = self.memory
        if memory is not None:
            memory.begin_step(models)
            if not self._is_on_trial:
                self._attach(models, memory)
        return memory

    def _begin_trial(self, models: Sequence[torch.nn.Module], budget_bytes: int) -> None:
        """Have things leave in one step if nothing else can: only its end shows what a step like none before needs.

        Later is too late, as autograd holds views of parameters then, which are read unseen.
        """
        if self._has_limit or LIBRARY.get() is None or not self._may_begin() or self._runs_compiled(models):
            return
        self._begin(models, budget_bytes, is_on_trial=True)

    def _has_to_stay(self) -> bool:
        """Have everything back as long as a profiler of the program reads addresses before ops are seen, and say so."""
        if not _are_addresses_recorded():
            return False
        memory = self.memory
        if memory is not None and (memory.fits or not self._moved_in):
            self._end_memory()
            self._say(
                "parameters, gradients and the optimizer's state stay on the device while PyTorch's profiler records "
                "shapes or stacks, as it takes addresses: profile with record_shapes=False, with_stack=False to have "
                "them leave"
            )
        return self.memory is None

    def gradients_come(self, growing: GrowingBudget, start_bytes: int) -> None:
        """Have gradients leave in the backward pass of the first step if they would pass a share that is not known yet.

        No op is running. What autograd holds views of stays, as parameters do until the optimizer steps.

        Args:
            growing: The share as far as it is known.
            start_bytes: What was live before the step.
        """
        if self.memory is not None or self._has_to_stay() or not self._may_begin():
            return
        models = self._living()
        least_bytes = growing.size_bytes()
        budget_bytes = self._needs.share_is_passed_by(parameters_of(models), start_bytes, growing.share, least_bytes)
        if not budget_bytes:
            return
        memory = self._begin(models, budget_bytes, f"{100 * growing.share:.4g}% of what it takes")
        if memory is not None:
            self._are_viewed = True
            memory.begin_step(models)
            self._attach(models, memory)

    def share_is_known(self, budget_bytes: int, share: float) -> None:
        """Have things leave from the optimizer's first step on if it would pass a budget that is known only now.

        Args:
            budget_bytes: The share of what the first step took, in which the optimizer's state was not there yet.
            share: The share, which that state will have as well.
        """
        self._share = share
        if self.memory is not None or not self._has_to_stay():
            models = self._living()
            expected_bytes = budget_bytes + int(share * self.states.bytes_to_come(models))
            if self.memory is None and (memory := self._memory_of(models, expected_bytes)) is not None:
                memory.make_room()
            if self.memory is not None:
                self._say_if_too_large(self._sliced.by_optimizer, self.memory, expected_bytes)
        self._is_budget_known = True

    def let_more_leave_now(self, followed: Storages) -> bool:
        """Have more leave in the middle of a step, as nothing else can; return whether there is any.

        The optimizers' state, on which no op of a forward or backward pass works, and data of the program. An optimizer
        that steps before the step has ended, as where its backward pass runs in another thread, works on any of it.
        Parameters and gradients may be what the op that asks for room works on: they leave in later steps.

        Args:
            followed: The storages that the step follows: what is in them leaves as its activations do.
        """
        if is_stepping():
            return False
        may_resort, self._may_resort = self._may_resort, False  # looking for it takes long
        library = LIBRARY.loaded
        if not may_resort or library is None or (self.memory is None and not self._may_begin()):
            return False
        self._is_in_op = True
        try:
            may_adopt, self._may_adopt_state = self._may_adopt_state, False
            has_state = may_adopt and (self.memory is None or self._is_on_trial) and self._adopt_state()
            may_look = self._data.may_look_now(library)
            trained = parameters_of(self._living()) if may_look else ()
            has_data = may_look and self._data.leaves_now(library, followed, self._memory_now, trained)
            self._may_resort = has_data or not may_look
            return has_data or has_state
        finally:
            self._is_in_op = False

    def let_all_leave_now(self) -> bool:
        """Let what is held back in a step leave from here on, in whatever thread; return whether there is any."""
        if self.memory is None or not self.memory.values.held_back:
            return False
        self.memory.values.held_back = frozenset()
        return True

    def let_put_state_leave_now(self) -> bool:
        """Have state leave that a step has put there, in the middle of an op; return whether there is any."""
        if self.memory is None:
            return False
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return self._sliced.let_put_leave(self.memory)

    def _adopt_state(self) -> bool:
        optimizers = self.states.optimizers_of({id(each) for each in parameters_of(self._living())})
        memory = self._memory_now() if any(optimizer.state for optimizer in optimizers) else None
        if memory is None:
            return False
        for optimizer in optimizers:
            memory.adopt_state(optimizer, list(optimizer.state))
        return True

    def _memory_now(self) -> PersistentMemory | None:
        """Return what lets things leave in the middle of a step, or None if nothing can."""
        if self.memory is None:
            self._has_begun = True  # it is too late for an error
            memory = self._begin(self._living(), self._evictor.budget_bytes)
            if memory is not None:
                memory.values.are_last = True
        return self.memory

    def _living(self) -> list[torch.nn.Module]:
        """Return the models of the last step that are still there."""
        return [model for model in (each() for each in self._models) if model is not None]

    def _say(self, text: str) -> None:
        """Tell something once, as soon as no op is running: the program's own code may be told."""
        if text not in self._said:
            self._said.add(text)
            self._untold.append(text)
        if not self._is_in_op:
            self._tell_untold()

    def _tell_untold(self) -> None:
        while self._untold:
            self._tell(self._untold.pop(0))

    def _may_begin(self) -> bool:
        """Whether there is somewhere to go."""
        health = self._evictor.engine.health
        return not (
            self._is_refused or health.fault is not None or health.known is not None or _are_addresses_recorded()
        )

    def step_ends(self, rise_bytes: int, *, may_still_be_planned: bool = False) -> None:
        """Note that a step ends, in which nothing had to leave if it can be planned.

        What Ctrl-C cuts short may have passed the budget because something was just about to leave.

        Args:
            rise_bytes: By how much its peak was above what was live before it.
            may_still_be_planned: Whether it had no plan, and there may be one for such steps that needs less.
        """
        self._tell_untold()
        if isinstance(sys.exception(), KeyboardInterrupt):
            return
        self._needs.step_ended(rise_bytes)
        self._has_missed = self._has_missed or self._evictor.missing_bytes > 0
        if self.may_plan and self.moves and not may_still_be_planned:
            self._steps_with_moves += 1
        if self._is_on_trial:
            self._end_trial()
        elif self.memory is not None:
            self._data.end_trial(self.memory)

    def _end_trial(self) -> None:
        """Go on if the step has needed it, or have everything stay again."""
        if self.memory is not None and (self.moves or self._has_missed):
            self._go_on(self.memory)
        else:
            self._end_and_unmark()

    def _go_on(self, memory: PersistentMemory) -> None:
        self._is_on_trial, memory.values.held_back = False, frozenset()
        self._has_to_move(memory, f"the budget of {format_bytes(self._evictor.budget_bytes)}")
        self._data.end_trial(memory)
        self._attach(self._living(), memory)

    @property
    def _has_limit(self) -> bool:
        """Whether the swap tier may take no more than so much."""
        return self._evictor.engine.room.limit_bytes is not None

    def _is_needed(self, models: Sequence[torch.nn.Module], budget_bytes: int) -> bool:
        if not self._may_begin():
            return False
        was_known, self._known_bytes = self._known_bytes, budget_bytes
        has_missed, self._has_missed = self._has_missed, False
        if has_missed and was_known == budget_bytes:
            return True
        return self._needs.is_tight(parameters_of(models), budget_bytes)

    def _runs_compiled(self, models: Sequence[torch.nn.Module]) -> bool:
        return self.has_compiled or any(compiled_part(model) is not None for model in models)

    def _begin(
        self, models: Sequence[torch.nn.Module], budget_bytes: int, told: str = "", *, is_on_trial: bool = False
    ) -> PersistentMemory | None:
        if self._runs_compiled(models):
            self._refuse_compiled()
            return None
        with self._evictor.lock:  # another thread may be about to step its optimizer
            if self.memory is not None:
                return self.memory
            self._slice_bytes = self._needs.slice_bytes(parameters_of(models))
            needed_bytes = self._check_tier(models)
            try:
                self.memory = PersistentMemory(self._evictor, budget_bytes, self._slice_bytes)
            except UsageError as error:
                self._is_refused = True
                self._say(str(error))
                return None
            self._models = [weakref.ref(model) for model in models]
            self._calls.begin()
            self._moved = self.memory.values.moved
            if needed_bytes is not None:
                self.memory.reserve(needed_bytes)
            self._is_on_trial = is_on_trial
            if is_on_trial:
                self.memory.values.held_back = KINDS
        if not is_on_trial:
            self._has_to_move(self.memory, told or f"the budget of {format_bytes(budget_bytes)}")
        return self.memory

    def _has_to_move(self, memory: PersistentMemory, exceeded: str) -> None:
        """Note, and tell, that things leave where a step would exceed something."""
        self.times.moves, self._staying_bytes = True, memory.staying_bytes
        self._say(
            f"parameters, gradients and the optimizer's state leave {self._evictor.device.type} memory where a step "
            f"would exceed {exceeded}"
        )

    def _check_tier(self, models: Sequence[torch.nn.Module]) -> int | None:
        """Return what all of this takes of a swap tier that has a limit, or None if that is not known to fit.

        Raises:
            InfeasibleTier: If it does not fit, and training has not begun.
        """
        room = self._evictor.engine.room
        if room.limit_bytes is None:
            return None
        parameters = parameters_of(models)
        optimizers = self.states.optimizers_of({id(parameter) for parameter in parameters})
        moments = max((known_moments(each) or 0 for each in optimizers), default=0)  # where that is known
        times = [(each, 2 + moments if each.requires_grad else 1) for each in parameters]
        needed_bytes = sum(count * rounded_bytes(each.nbytes) for each, count in times)
        if needed_bytes <= room.limit_bytes:
            return needed_bytes
        error = InfeasibleTier(room.limit_bytes, needed_bytes, room.limited_by)
        if not self._has_begun:
            raise error
        self._say(str(error))
        return None

    def _attach(self, models: Sequence[torch.nn.Module], memory: PersistentMemory) -> None:
        """Have the optimizers of the models step in slices."""
        parameters = parameters_of(models)
        further = self.states.to_attach(models, self._evictor.device, parameters)
        for optimizer in further:
            self._sliced.add(optimizer, memory, self._slice_bytes)
        if self._is_budget_known:
            self._say_if_too_large(further, memory)
        self._sliced.look(memory)
        for optimizer in self.states.own():  # the program may have put something else there, or loaded it
            memory.adopt_state(optimizer, list(optimizer.state))
        memory.adopt_stepped(self.states.in_no_model(models, parameters))

    def _say_if_too_large(
        self, optimizers: Iterable[torch.optim.Optimizer], memory: PersistentMemory, budget_bytes: int | None = None
    ) -> None:
        """Tell beforehand if a single parameter is too large for its step to hold the budget."""
        for optimizer in optimizers:
            found = self._needs.too_large(optimizer, memory.values.here_bytes(), budget_bytes)
            if found is not None:
                parameter, needed, room = map(format_bytes, found)
                self._say(
                    f"{type(optimizer).__name__} takes about {needed} at once to step its largest parameter, of "
                    f"{parameter}, and the budget leaves {room} for that: optimizer.step() will exceed it"
                )

    def moved(self) -> tuple[MovedKind, ...]:
        """Return what was copied so far."""
        moved = self._moved
        return (
            ()
            if moved is None
            else tuple(MovedKind(name, moved.out_bytes[kind], moved.in_bytes[kind]) for kind, name in _NAMES.items())
        )

    def staying(self) -> tuple[tuple[str, int], ...]:
        """Return why some of it cannot leave, and how many bytes that are."""
        return tuple(self._staying_bytes.items())

    def close(self) -> None:
        """Let nothing leave any more: everything is back on the device, or on the host if it does not fit."""
        self._hook.remove()
        self._before_steps.remove()
        self._end_memory(is_over=True)

    def _end_memory(self, *, is_over: bool = False) -> None:
        self._calls.end()
        optimizers = self._sliced.end()
        memory, self.memory, self.times.moves = self.memory, None, False
        self._is_on_trial = False
        if memory is None:
            return
        if is_over and self._moved_in and not memory.fits:
            memory.move_out(self._moved_in, optimizers)
        memory.close()


def _are_addresses_recorded() -> bool:
    """Whether a profiler of the program takes the addresses of what ops read, before the ops are seen.

    Where it records stacks, it takes those of each module's parameters as the module is called.
    """
    if LIBRARY.loaded is None:
        return False
    return bool(LIBRARY.loaded.records_inputs()) or type(sys.getprofile()).__name__ == _RECORDS_STACKS


def tensors_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters of a model, their gradients, and its buffers."""
    parameters, buffers = module_tensors(model)
    for parameter in parameters:
        yield parameter
        if (gradient := gradient_of(parameter)) is not None:
            yield gradient
    yield from buffers
