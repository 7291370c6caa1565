"""`pooch.auto`: any training loop under a budget, from its first step on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from ..api.budgets import is_free
from ..api.options import PlanOptions
from ..api.recompute import AllowRecompute, MadeAgain, check_allowed
from ..executor.engines import make_engine
from ..executor.evictor import Evictor
from ..executor.live_bytes import WalkedBytes, live_bytes_of
from ..executor.silence import Silence
from ..executor.status import Status
from ..executor.verification import Verification, Verify
from ..ground import messages
from ..ground.errors import UsageError
from ..ground.live_objects import noting
from ..ground.units import format_bytes
from ..ground.visible import one_line
from ..ir import Plan, Profile
from ..torchtools.accelerators import has_streams, shares_memory, why_unheard
from ..torchtools.calls import compiled_kinds
from ..torchtools.cuda_only import spills_silently
from ..torchtools.device_memory import free_bytes
from ..torchtools.ranks import local_count
from ..torchtools.watch import LIBRARY
from .budget import Bound, HeldBudget, budget_of, check_bound
from .cache import PlanCache, Purpose
from .costs import costs_of
from .driver import StepDriver
from .free_memory import FreeMemory
from .garbage import Garbage
from .governed import GovernedModels, device_named, models_of
from .held_devices import beginning, end_held
from .library import Library
from .loop_times import LoopTimes
from .node import tier_budget, tier_share
from .optimizer_states import given_optimizers
from .persistence import Persistence
from .remarks import Remarks
from .reserved_memory import ReservedMemory
from .summary import AutoSummary
from .team import Team, ranks_of

PLANNING_TIME_LIMIT_S = 10.0


class Auto:
    """A budget that is held over every step of some models. Made by `pooch.auto`; also a context manager."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        budget: float | str,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        device: torch.device | str | None = None,
        host_budget: float | str | None = None,
        disk_budget: float | str | None = None,
        cache: str | Path | None = None,
        process_group: object = None,
        tell: Callable[[str], None] | None = None,
        verify: Verify = "first",
        bound: Bound = "live",
        allow_recompute: AllowRecompute = "exact",
        replace: bool = False,
    ) -> None:
        size_bytes, share = budget_of(budget)
        check_bound(bound, size_bytes)
        check_allowed(allow_recompute)
        if replace:
            end_held(models)
        governed = GovernedModels(models, None if device is None else device_named(device))
        self._moves_in = device is not None and bool(models)
        device = governed.device
        if why := why_unheard(device):
            raise UsageError(why)
        optimizers = given_optimizers(optimizer)
        LIBRARY.get()  # objects are looked through natively from now on
        with beginning(device), noting(torch.optim.Optimizer, *compiled_kinds()):
            tell, warn = (messages.tell, messages.warn) if tell is None else (tell, tell)
            node_bytes = tier_budget(device, host_budget, disk_budget)
            ranks = ranks_of(process_group)
            local_ranks = 1 if ranks is None else local_count(ranks.count)
            self._team = Team(ranks, tier_share(node_bytes, device, local_ranks), tell)
            host_bytes = self._team.share.each_bytes
            purpose = budget if bound == "live" else f"{budget} {bound}"
            self._purpose = Purpose.of(models, device, purpose, host_bytes, self._team.seat)
            live = live_bytes_of(device)
            engine = make_engine(device)
            engine.room.limit_bytes = host_bytes
            engine.room.limited_by = "host budget" if disk_budget is None else "disk budget"
            verification = Verification(verify, lambda _, text: warn(text))
            remarks = Remarks(tell, warn)
            free: FreeMemory | ReservedMemory | None = None
            if is_free(budget):
                free = FreeMemory(device, live, remarks)
            elif size_bytes is not None and bound == "reserved":
                free = ReservedMemory(device, size_bytes, remarks)
            size_bytes = size_bytes if free is None else free.held.size_bytes
            shares = shares_memory(device)
            evictor = Evictor(size_bytes or 0, engine, live, device, 0 if shares else host_bytes, verification)
            times = LoopTimes(lambda: evictor.stats.host_stall_ms, device.type if has_streams(device) else "")
            library = Library(
                PlanOptions(host_budget=host_bytes, time_limit_s=PLANNING_TIME_LIMIT_S, region="step", explain=False),
                tell,
                costs_of(device, evictor.speed, self._team.gather),
                cache=None if cache is None else self._opened(cache, tell),
                holds_beneath=live.asks,
                counts_peaks=not isinstance(live, WalkedBytes),
                times=times,
            )
            evictor.silence = Silence(remarks.silence)
            held = HeldBudget(size_bytes, share, evictor, remarks, free)
            persistence = self._persistence = Persistence(evictor, optimizers, tell, times)
            if size_bytes is not None and live.now() > size_bytes:
                Garbage(live).collect(0)
                live.recount(if_less=True)
            if shares:
                persistence.refuse()
                remarks.shared_memory(device)
            self._before_bytes, self._before_peak_bytes = live.now(), 0
            if size_bytes is not None and not is_free(budget):
                remarks.before(self._before_bytes, size_bytes)
                if spills_silently(device):
                    remarks.spills(size_bytes, self._before_bytes + free_bytes(device))
            persistence.bring_in(models, device, size_bytes)
            persistence.states.meet(models)
            live.reset_peak()
            self._driver = StepDriver(governed, held, live, evictor, library, remarks, persistence, allow_recompute)
            self._is_removed = False

    def _opened(self, directory: str | Path, tell: Callable[[str], None]) -> PlanCache:
        cache = PlanCache(directory, self._purpose)
        if self._team.is_first and (text := cache.told_of_others()):
            tell(text)
        return cache

    @property
    def budget_bytes(self) -> int | None:
        """The budget, or None before the first step if it is a share of that step's in-core peak."""
        return self._driver.budget.told_bytes

    def add(self, model: torch.nn.Module) -> None:
        """Hold the budget over a further model too, such as the second network of a GAN.

        A part of a governed model, given on its own, is from now on also governed where it is called on its own.

        Args:
            model: The model. If parts of it were governed on their own, they belong to it from now on.

        Raises:
            UsageError: It is under a plan, or on another device, and none was given as `device`.
        """
        self.take_in(model)
        self._driver.add(model)
        self._persistence.joins(model)

    def begins_now(self) -> None:
        """Note that the first step begins at once, with what was counted just now."""
        self._driver.has_counted()

    def was_counted_before(self, peak_bytes: int) -> None:
        """Note the most bytes that were live before the budget was held."""
        self._before_peak_bytes = peak_bytes

    def take_in(self, model: torch.nn.Module) -> None:
        """Move what there is of a model elsewhere to the device that was given, if one was."""
        if self._moves_in:
            self._persistence.move_in([model], self._driver.governed.device, self._driver.budget.size_bytes)

    def release(self, model: torch.nn.Module) -> None:
        """Hold the budget no longer over a model and its parts.

        Args:
            model: The model.
        """
        self._driver.governed.release(model)

    def expect_uncalled(self) -> None:
        """Have steps begin where something is first saved for a backward pass, as long as no governed module is called.

        Without that, they do from the second backward pass on if there was no call before the end of the first.
        """
        self._driver.expect_uncalled()

    def is_within_call(self) -> bool:
        """Whether the calling thread is within a governed call."""
        return self._driver.is_within_call()

    def region(self) -> AbstractContextManager[None]:
        """Mark a region that computes for training without calling a governed module.

        Only needed where a framework calls parts of a model in ways that `pooch.auto` does not see.
        """
        return self._driver.region()

    @property
    def plans(self) -> dict[str, Plan]:
        """The plans that are in use, by the shapes of their steps."""
        return {key.text: plan for key, plan in self._driver.library.plans.items()}

    @property
    def planned(self) -> tuple[tuple[str, Profile, Plan], ...]:
        """The shapes, the profile and the plan of each kind of step that has one."""
        return tuple(self._driver.library.planned())

    @property
    def is_planning(self) -> bool:
        """Whether a plan is being made beside training."""
        return self._driver.library.is_planning

    def save_plans(self, directory: str | Path) -> None:
        """Keep the profiles and plans that there are so far, such as beside a checkpoint of the training.

        A run that resumes from there begins with them if it is given the directory as its `cache`. Ranks share the
        directory, and each keeps its own; all of them call this. With another number of ranks, plans are made anew.

        Args:
            directory: Where they are kept, made if it does not exist.

        Raises:
            UsageError: If the directory cannot be made.
        """
        cache = PlanCache(directory, self._purpose)
        for key, cached in self._driver.library.kept():
            cache.keep(key, cached)

    def status(self) -> Status:
        """Return how the last step ran, for a progress bar or a log: `bar.set_postfix_str(str(auto.status()))`.

        It takes next to no time. `status().as_dict()` has names such as "pooch/peak_mib" and "pooch/mode".
        """
        return self._driver.last.status(self._driver.counters.steps, self.budget_bytes)

    def summary(self, *, verbose: bool = False) -> AutoSummary:
        """Return what happened so far; `print()` shows it, with a verdict as its first line.

        Args:
            verbose: Whether it also says what Pooch did inside of the steps.
        """
        self._driver.look_after_last()
        library = self._driver.library
        share = self._team.share
        return self._driver.counters.summary(
            budget_bytes=self.budget_bytes,
            shapes=library.shapes(),
            events=tuple(library.events),
            tier_bytes=self._driver.evictor.engine.room.most_bytes,
            tier_limit_bytes=share.each_bytes,
            local_ranks=share.ranks,
            verified=self._driver.evictor.verification.verified,
            planning_s=library.planning_s,
            persistent=self._persistence.moved(),
            around_slices_ms=self._persistence.times.moving_in_optimizers_ms,
            staying=self._persistence.staying(),
            before_bytes=self._before_bytes,
            before_peak_bytes=self._before_peak_bytes,
            is_followed=self._driver.budget.is_followed,
            made_again=MadeAgain() if self._driver.graphs is None else self._driver.graphs.made_again,
            is_verbose=verbose,
        )

    def remove(self) -> None:
        """Hold the budget no longer. A step that is running ends under it.

        Raises:
            UsageError: If a step is running in another thread, which alone can end it.
        """
        self._driver.remove()
        if not self._is_removed:
            self._is_removed = True
            self._team.ended(self._driver.evictor.engine.room.most_bytes)

    def __repr__(self) -> str:
        counters, state = self._driver.counters, " (removed)" if self._is_removed else ""
        budget = "not known yet" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        name = one_line(self._driver.governed.name or "model is gone")
        return f"Auto({name}, budget {budget}, {counters.in_words}){state}"

    def __enter__(self) -> Auto:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def auto(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    budget: float | str,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    device: torch.device | str | None = None,
    host_budget: float | str | None = None,
    disk_budget: float | str | None = None,
    cache: str | Path | None = None,
    process_group: object = None,
    tell: Callable[[str], None] | None = None,
    verify: Verify = "first",
    bound: Bound = "live",
    allow_recompute: AllowRecompute = "exact",
    quiet: bool = False,
    replace: bool = False,
) -> Auto:
    """Hold a budget over any training loop, from its first step on: `pooch.auto(model, "16GiB")`.

    The loop stays as it is. A step that is not known runs under the online policy, which lets saved activations leave
    as live bytes would pass the budget, and is recorded. Steps that fit are left alone. For others a plan is made
    beside training, and taken when the next such step begins. Losses and gradients are bitwise those of plain training.

    Args:
        model: The model, or all models that are trained, which share the budget.
        budget: Device bytes of the process, such as "16GiB"; a share of the first step's in-core peak, such as "60%";
            or "auto": what is free on the device, less a margin that is told, looked at anew as steps begin. Fewer
            than 1024 bytes are refused: 16 is more likely to mean "16GiB".
        optimizer: Where parameters, gradients and its state do not fit into the budget beside a step's activations,
            they leave the device too, and the optimizer steps in slices. Several: all that step the models. None: they
            are looked for among the objects of the program when that happens.
        device: Where to compute, for models that are somewhere else because they do not fit there. Their parameters
            are moved one by one, and keep their identity. Where a model is called with tensors on the host alone, they
            are copied to the device, and what it returns is copied back. None: where the models are.
        host_budget: Most bytes that the swap tier may take on this machine. The ranks on it share them evenly. None: no
            limit for a single process; several ranks share the host memory that is left where that is the tier.
        disk_budget: The same where the swap tier is a file on disk, as for models on a CPU.
        cache: Directory in which plans are kept for the next run of the same model, or were by `Auto.save_plans()`.
            None: they are not kept.
        process_group: The ranks that train together. None: those of the default group, if there is one.
        tell: Called with one line for each new plan, and whatever else is to be said. None: lines go through the logger
            "pooch" (`logging.getLogger("pooch")`), which shows them on the standard error stream unless the program
            has handlers for them.
        verify: What is recomputed is compared, byte by byte, with what it replaces. "first": in full until that was
            shown to give the same, then by a sample in each step, and in full again in turns. "always": in full in each
            step. "off": not at all.
        bound: What the budget bounds: the bytes of "live" tensors, or on a CUDA device what PyTorch's allocator has
            "reserved" there, used and unused, which it does not pass from the second step on. Tensors get less of
            the budget then, by a margin that is told and grows where holes between tensors need more.
        allow_recompute: What may be made again. "exact": what gives the same bits, and so nothing inside of compiled
            graphs. "rounding": graphs that are compiled under the budget may also make values again, as much as they
            have to. Code that is fused in another way rounds in another way, so losses and gradients may differ in
            their last digits from those of the same compiled model without Pooch.
        quiet: Say nothing. `Auto.summary()` and `Auto.status()` still tell what happens.
        replace: Take the place of a budget that is held on this device already, as where a cell of a notebook is run
            again. Otherwise a second budget is refused.

    Returns:
        What holds the budget. `remove()`, or leaving it as a context manager, takes it off.

    Raises:
        InfeasibleTier: What has to leave before training begins does not fit into the swap tier.
        UsageError: The model or the optimizer is none, or the model is under a plan; the budget does not parse; there
            is no such device; `allow_recompute` is neither of both; `quiet` is given with `tell`; what is reserved
            cannot be bounded, or not by a share; or this rank is not in `process_group`.
    """
    if quiet and tell is not None:
        raise UsageError("quiet=True says nothing, and tell= is for what is said: give one of them")
    return Auto(
        models_of(model),
        budget,
        optimizer,
        device=device,
        host_budget=host_budget,
        disk_budget=disk_budget,
        cache=cache,
        process_group=process_group,
        tell=messages.be_silent if quiet else tell,
        verify=verify,
        bound=bound,
        allow_recompute=allow_recompute,
        replace=replace,
    )
