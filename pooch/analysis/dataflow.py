"""What follows from a profile alone: what can be decided on, what a replay needs, and the bytes outside any decision.

Shared by the planner, the lowering, the simulator and the verifier, so that all agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy

from ..ir.plan import Region
from ..ir.profile import Profile, Value
from .gathering import Gathering
from .sharing import shared_values


@dataclass(frozen=True, slots=True)
class ReplayRecipe:
    """How one value is made again from saved and external values alone.

    Attributes:
        ops: forward ops to run, ascending; the last one writes the value.
        sources: values "made" by the step that the ops read and do not make themselves (they have to be resident),
            ascending. External values are always at hand and not listed.
        gathered: parameters that FSDP gathers and that the ops read, ascending: they have to be there.
    """

    ops: tuple[int, ...]
    sources: tuple[int, ...]
    gathered: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of the forward pass in which the program holds a value and nothing reads it.

    Attributes:
        first_slot: at whose entry it can be emptied at the earliest.
        need_slot: at whose entry it has to be there again.
    """

    first_slot: int
    need_slot: int


class Dataflow:
    """Derived facts of one profile, computed once.

    Args:
        profile: the measured step.
        region: "model": only values saved inside calls of the model alone are activations; "step": all of them.
    """

    def __init__(self, profile: Profile, region: Region = "step") -> None:
        self.profile = profile
        self.region = region
        self.end = len(profile.ops)
        self.activations: tuple[Value, ...] = tuple(v for v in profile.activations if self._in_region(v))
        self.activation_ids = frozenset(value.id for value in self.activations)
        self.anchors = self._anchors_of_region()
        self.anchor_slots: tuple[int, ...] = tuple(slot for slot, _ in self.anchors)
        self.forward_slots = range(profile.forward_ops)
        if region == "model":  # the runtime sees no op outside of calls of the model
            self.forward_slots = range(profile.model_begin, profile.model_end)
        self.gathering = Gathering(profile, self.anchor_slots)

    def _in_region(self, value: Value) -> bool:
        return self._made_in_region(value) and not (self.region == "model" and value.saved_outside_model)

    def _made_in_region(self, value: Value) -> bool:
        """The runtime sees only what is made inside the region, so it can replay and hold nothing else."""
        if self.region == "step":
            return True
        return self.profile.model_begin <= value.producer < self.profile.model_end

    def _anchors_of_region(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The anchors that the runtime sees: for the region "model", only unpacks of what it packed itself."""
        if self.region == "step":
            return self.profile.anchors
        values = self.profile.values
        seen = {v.id for v in values if v.saved and not v.saved_outside_model and self._made_in_region(v)}
        kept = ((slot, tuple(i for i in ids if i in seen)) for slot, ids in self.profile.anchors)
        return tuple((slot, ids) for slot, ids in kept if ids)

    def in_core_span(self, value: Value) -> tuple[int, int]:
        """First and last point (both included) at which the value takes device bytes in-core."""
        return 2 * value.producer + 1, self.span_end(value.death)

    def span_end(self, slot: int) -> int:
        """Last point of a life that ends in `slot` (clamped to the end of the step)."""
        return min(2 * slot + 1, 2 * self.end - 1)

    @cached_property
    def in_core_points(self) -> numpy.ndarray:
        """int64 array of shape (2 * ops,): live bytes at each point, in-core."""
        points = numpy.empty(2 * self.end, dtype=numpy.int64)
        points[0::2] = [op.entry_bytes for op in self.profile.ops]
        points[1::2] = [op.peak_bytes for op in self.profile.ops]
        return points

    @cached_property
    def missing_gradients(self) -> numpy.ndarray:
        """int64 array, by op: bytes of gradients that the first backward pass has yet to make, and later ones find."""
        return numpy.array(self.profile.missing_gradients(), dtype=numpy.int64)

    @cached_property
    def base_points(self) -> numpy.ndarray:
        """int64 array of shape (2 * ops,): live bytes at each point without any activation of the region."""
        change = numpy.zeros(2 * self.end + 1, dtype=numpy.int64)
        for value in self.activations:
            first, last = self.in_core_span(value)
            change[first] += value.allocated_bytes
            change[last + 1] -= value.allocated_bytes
        return self.in_core_points - numpy.cumsum(change[:-1])

    @cached_property
    def life_ends(self) -> list[int]:
        """By value: the first point at which it no longer lives in-core."""
        return [self.span_end(value.death) + 1 for value in self.profile.values]

    @cached_property
    def allocated_bytes(self) -> list[int]:
        """By value: the bytes that the allocator takes for it."""
        return [value.allocated_bytes for value in self.profile.values]

    @cached_property
    def op_times_ms(self) -> list[float]:
        """By op: its time."""
        return [op.time_ms for op in self.profile.ops]

    @cached_property
    def host_times_ms(self) -> list[float]:
        """By op: time of the host to issue it; 0 where the host computes."""
        return [op.host_ms for op in self.profile.ops]

    @cached_property
    def replay_times_ms(self) -> list[float]:
        """By op: time to run it again."""
        hook_ms = 0.0 if self.profile.device.has_streams else self.profile.hooks.replay_ms
        return [op.time_ms + hook_ms for op in self.profile.ops]

    @cached_property
    def replay_host_times_ms(self) -> list[float]:
        """By op: time of the host to issue it again; 0 where the host computes."""
        hook_ms = self.profile.hooks.replay_ms if self.profile.device.has_streams else 0.0
        return [op.host_ms + hook_ms for op in self.profile.ops]

    @cached_property
    def replay_room_bytes(self) -> list[int]:
        """By forward op: bytes that a replay takes at its peak when it reuses no storage: what it writes (an in-place
        op then writes to a fresh copy), and its workspace.
        """
        allocated = self.allocated_bytes
        forward = self.profile.ops[: self.profile.forward_ops]
        return [sum(allocated[i] for i in op.writes) + self.replay_extra_bytes(op.index) for op in forward]

    def replay_extra_bytes(self, op_index: int) -> int:
        """Workspace of a replay: bytes that the op takes at its peak beyond what is live and what it writes."""
        op = self.profile.ops[op_index]
        made = sum(self.profile.values[i].allocated_bytes for i in op.writes if self.profile.values[i].overwrites < 0)
        return max(0, op.peak_bytes - op.entry_bytes - made)

    def is_always_at_hand(self, value: Value) -> bool:
        """Existed before the step, outlives it, and is not overwritten: a replay may read it at any time."""
        existed = value.role not in ("made", "transient")
        return existed and value.release >= self.end and value.overwritten_at < 0

    def is_source(self, value: Value) -> bool:
        """A value made by the step that can be held for replays: autograd saved it (or the program
        never lets go of it, or many replays share it), and nothing overwrites it.
        """
        return value.id in self._shared or self._is_saved_source(value)

    def _is_saved_source(self, value: Value) -> bool:
        held = value.saved or value.release >= self.end
        return value.role == "made" and held and value.overwritten_at < 0 and self._made_in_region(value)

    @cached_property
    def _shared(self) -> set[int]:
        """Values that are not saved, and held for replays all the same."""
        ops = {value: recipe.ops for value, recipe in self.saved_recipes.items()}
        return shared_values(self.profile, self.activations, ops)

    def can_empty(self, value: Value) -> bool:
        """Whether its bytes can leave while the program holds it: every read is known, nothing overwrites it, and
        autograd has saved nothing that its storage held before.
        """
        if value.touches is None or not self.is_source(value):
            return False
        before = value.overwrites
        while before >= 0 and not self.profile.values[before].saved:
            before = self.profile.values[before].overwrites
        return before < 0

    def last_use(self, value: Value) -> int:
        """Last slot in which the forward pass needs the value to be there.

        The last look at it; where it cannot be emptied, or the program holds it when the region ends: its release.
        """
        if not self._is_watched(value):
            return max(value.release, value.producer)
        return max(self._looks(value), default=value.producer)

    def gaps(self, value: Value) -> tuple[Gap, ...]:
        """The stretches between two looks at the value, or its making and the first look, in order of time.

        What the program holds when the region ends is needed in the last slot of the region: later reads are not seen.
        """
        if not self.can_empty(value):
            return ()
        last = self.forward_slots.stop - 1
        needs = sorted(slot for slot in self._looks(value) if slot < last)
        if value.release >= last:
            needs.append(last)
        edges = [value.producer, *needs]
        return tuple(Gap(a + 1, b) for a, b in pairwise(edges) if a + 1 < b)

    def _is_watched(self, value: Value) -> bool:
        """Whether the value can be emptied, and the program lets go of it inside the region."""
        return self.can_empty(value) and value.release < self.forward_slots.stop - 1

    def _looks(self, value: Value) -> set[int]:
        """Slots in which the forward pass reads the value."""
        return {*self._readers.get(value.id, ()), *(value.touches or ())}

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        """By value: the forward ops that read it."""
        readers: dict[int, list[int]] = {}
        for op in self.profile.ops[: self.profile.forward_ops]:
            for value in op.reads:
                readers.setdefault(value, []).append(op.index)
        return readers

    def refusal(self, value_id: int) -> str | None:
        """Why the value cannot be recomputed, or None where it can."""
        recipe = self._recipes[value_id]
        return recipe if isinstance(recipe, str) else None

    def recipe(self, value_id: int) -> ReplayRecipe:
        """How to make the value again (only for values whose `refusal` is None)."""
        recipe = self._recipes[value_id]
        if isinstance(recipe, str):
            raise KeyError(f"value {value_id} cannot be recomputed: {recipe}")
        return recipe

    def replay_ms(self, value_id: int) -> float:
        """Time of the value's own recipe, its sources being at hand; nan where it cannot be recomputed."""
        if self.refusal(value_id) is not None:
            return float("nan")
        return sum(self.replay_times_ms[index] for index in self.recipe(value_id).ops)

    @cached_property
    def recipes_from_saved(self) -> dict[int, ReplayRecipe]:
        """By saved value that can be recomputed: how, from what autograd saves alone.

        For replays that nobody planned, so that nothing else was held for them, and parameters that FSDP gathers may
        not be there.
        """
        recipes = self._make_recipes(self._is_saved_source)
        known = ((value.id, recipes[value.id]) for value in self.profile.values if value.saved)
        return {v: recipe for v, recipe in known if isinstance(recipe, ReplayRecipe) and not recipe.gathered}

    @cached_property
    def saved_recipes(self) -> dict[int, ReplayRecipe]:
        """The same, by activation."""
        recipes = self.recipes_from_saved
        return {value.id: recipes[value.id] for value in self.activations if value.id in recipes}

    @cached_property
    def from_gathered(self) -> frozenset[int]:
        """Activations that cannot be made again at any time, since gathered parameters are read for them or for
        what they are made from.
        """
        found: set[int] = set()
        for value in self.activations:  # what is read comes before what reads it
            recipe = self._recipes[value.id]
            if isinstance(recipe, ReplayRecipe) and (recipe.gathered or not found.isdisjoint(recipe.sources)):
                found.add(value.id)
        return frozenset(found)

    @cached_property
    def _recipes(self) -> list[ReplayRecipe | str]:
        recipes = self._make_recipes(self.is_source)
        if self.profile.gathered:
            self._refuse_outside_of_windows(recipes)
        return recipes

    def _refuse_outside_of_windows(self, recipes: list[ReplayRecipe | str]) -> None:
        """Refuse values whose replay might be due while gathered parameters that it reads are not there.

        A value is replayed where the backward pass first reads it, or before, where a value is replayed that is made
        from it. So values are looked at from the last to the first, and whatever is decided on the others, each is
        replayed within the windows of its units.
        """
        due = {value.id: self.gathering.at(value.first_unpack) for value in self.activations}
        for value in reversed(self.activations):
            recipe = recipes[value.id]
            if isinstance(recipe, str):
                continue
            missing = next((g for g in recipe.gathered if not self.gathering.is_there(g, due[value.id])), None)
            if missing is not None:
                recipes[value.id] = self.gathering.why_missing(missing)
                continue
            for source in recipe.sources:
                if source in due:
                    due[source] |= due[value.id]

    def _make_recipes(self, is_source: Callable[[Value], bool]) -> list[ReplayRecipe | str]:
        recipes: list[ReplayRecipe | str] = []
        for value in self.profile.values:  # ids ascend in order of production, so sources come first
            recipes.append(self._make_recipe(value, recipes, is_source))
        return recipes

    def _make_recipe(
        self, value: Value, known: list[ReplayRecipe | str], is_source: Callable[[Value], bool]
    ) -> ReplayRecipe | str:
        if value.role != "made" or value.producer < 0:
            return "no recorded op made it"
        if not self._made_in_region(value):
            return "it is made outside of calls of the model"
        op = self.profile.ops[value.producer]
        if op.refusal is not None:
            return op.refusal
        ops: set[int] = {op.index}
        sources: set[int] = set()
        gathered: set[int] = set()
        for read in op.reads:
            read_value = self.profile.values[read]
            if self.is_always_at_hand(read_value):
                continue
            if self.gathering.is_gathered(read):
                gathered.add(read)
                continue
            if is_source(read_value):
                sources.add(read)
                continue
            if read_value.role != "made":
                return f"it reads {read_value.label or 'an input'}, which is gone or changed by then"
            deeper = known[read] if read < len(known) else "an op reads a value made later"
            if isinstance(deeper, str):
                return deeper
            ops.update(deeper.ops)
            sources.update(deeper.sources)
            gathered.update(deeper.gathered)
        return ReplayRecipe(tuple(sorted(ops)), tuple(sorted(sources)), tuple(sorted(gathered)))
