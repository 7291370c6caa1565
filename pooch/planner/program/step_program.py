"""The integer program: keep, swap or recompute for each activation, so that the step is short and memory suffices.

Every row holds for every schedule of the simulator's model (`docs/planner.md` argues why, row by row), so what the
solver proves about the program is a lower bound for all plans. It follows the design of HiRemate and OffMate (2024: a
step is as long as its slowest stream, transfers may be cut into fractions) and Checkmate's "a replay finds its
sources" (2019), but copies are summed up by size classes, so the program grows with activations + marks
and not with their product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pooch.ir.plan import Choice, Decisions
from pooch.planner.candidates import NEVER, Candidates
from pooch.planner.program.classes import ActivationClass, make_classes, share_replays
from pooch.planner.program.copies import CopyStreams
from pooch.planner.program.marks import Marks
from pooch.planner.program.residency import Residency
from pooch.planner.program.solver import LinearProgram, Terms, Variable

ORDER: tuple[Choice, ...] = ("swap", "recompute", "keep")


class StepProgram:
    """Builds the program for one budget and one choice of marks.

    Args:
        candidates: all activations. marks: where memory is checked.
        budget_bytes: of device memory. host_budget_bytes: of the tier, None = unlimited.
        reserve_bytes: for each slot, bytes that the simulator was seen to take beyond what the program
            models (workspace of replays, say). With a reserve the program is no relaxation any more.
        least_bytes: activations smaller than this are left out, which can only lower the optimum.
        merge: take activations together that stand in the same rows, as repeated blocks make them.
    """

    def __init__(
        self,
        candidates: Candidates,
        marks: Marks,
        budget_bytes: int,
        *,
        host_budget_bytes: int | None = None,
        reserve_bytes: Mapping[int, int] | None = None,
        least_bytes: int = 0,
        merge: bool = False,
    ) -> None:
        self.candidates = candidates
        self.marks = marks
        self.budget_bytes = budget_bytes
        self.unit_bytes = max(1.0, budget_bytes / 2048)  # solvers like numbers near one, whatever the budget
        self.reserve_bytes = reserve_bytes or {}
        large = [item for item in candidates.items if item.memory_bytes >= least_bytes]
        self.items = make_classes(candidates, marks, large, merge=merge)
        self.program = LinearProgram()
        # x_i: how many of a class make each choice (only variables for choices that it has)
        self.swap: dict[int, Variable] = {}
        self.recompute: dict[int, Variable] = {}
        self._add_choices()
        self.residency = Residency(self.program, candidates, self.items, marks, self.swap, self.recompute)
        self.copies = CopyStreams(
            self.program, candidates, self.items, marks, self.swap, self.residency, self.unit_bytes
        )
        # T_t: duration of interval t. P_t: time spent on replays until its end
        self.duration: list[Variable] = [self.program.variable() for _ in range(marks.count)]
        self.replayed: list[Variable] = [self.program.variable() for _ in range(marks.count)]
        self._add_replays()
        self._add_durations()
        self._add_memory()
        self._add_host_memory(host_budget_bytes)
        self.program.minimise(dict.fromkeys(self.duration, 1.0))

    def _add_choices(self) -> None:
        """swap_i + recompute_i <= 1 (as many as the class has); keep_i is what is left."""
        for item in self.items:
            if item.can_swap:
                self.swap[item.value] = self.program.whole(item.count)
            if item.can_recompute:
                self.recompute[item.value] = self.program.whole(item.count)
            if item.can_swap and item.can_recompute:
                both = {self.swap[item.value]: 1.0, self.recompute[item.value]: 1.0}
                self.program.at_most(both, float(item.count))

    def _add_replays(self) -> None:
        """Each op that some replay needs runs at least once; not before something is made by it, and not after."""
        shared = share_replays(self.candidates, self.items)
        once = [self.program.variable(float(count)) for count, _ in shared.kinds]  # replay_o: ops that run again
        total: Terms = {self.replayed[-1]: -1.0}
        total |= {variable: time_ms for variable, (_, time_ms) in zip(once, shared.kinds, strict=True)}
        for value, kinds in shared.users:
            serving = {once[kind]: -float(times) for kind, times in kinds.items()}
            self.program.at_most({self.recompute[value]: 1.0} | serving, 0.0)
        for value, time_ms in shared.own_ms.items():
            total[self.recompute[value]] = time_ms
        self.program.at_most(total, 0.0)
        for t in range(self.marks.count):
            self._add_replays_until(t, shared.own_ms)

    def _add_replays_until(self, t: int, own_ms: Mapping[int, float]) -> None:
        """P is monotone, at most the recipes of what is back by then, at least the ops that belong to it alone."""
        if t > 0:
            self.program.at_most({self.replayed[t - 1]: 1.0, self.replayed[t]: -1.0}, 0.0)
        most: Terms = {self.replayed[t]: 1.0}
        least: Terms = {self.replayed[t]: -1.0}
        in_forward = t < len(self.marks.slots) and self.marks.slots[t] < self.candidates.dataflow.profile.forward_ops
        for item in () if in_forward else self.items:
            back = self.residency.replayed_by(item, t)
            if back.at_most is not None:
                most[back.at_most] = -item.replay_ms
            if back.at_least is not None and own_ms.get(item.value):
                least[back.at_least] = own_ms[item.value]
        self.program.at_most(most, 0.0)
        if len(least) > 1 and t < self.marks.count - 1:
            self.program.at_most(least, 0.0)

    def _add_durations(self) -> None:
        """T_t >= compute + replays + what copies slow it down by; T_t >= busy time of each copy stream."""
        for t in range(self.marks.count):
            work: Terms = {self.duration[t]: -1.0, self.replayed[t]: 1.0}
            if t > 0:
                work[self.replayed[t - 1]] = -1.0
            work.update(self.copies.slowdown(t))
            self.program.at_most(work, -self.marks.compute_ms[t])
            for busy in self.copies.busy(t):
                self.program.at_most({**busy, self.duration[t]: -1.0}, 0.0)

    def _add_memory(self) -> None:
        """At the op of each mark: what nobody decides on, and what is there of the activations, within the budget."""
        base = self.candidates.dataflow.base_points
        for t, slot in enumerate(self.marks.slots):
            point = 2 * slot + 1
            free_bytes = self.budget_bytes - int(base[point]) - self.reserve_bytes.get(slot, 0)
            terms: Terms = {}
            for item in self.items:
                if self._is_alive(item, point):
                    free_bytes -= item.memory_bytes * item.count
                    terms.update(self._absence(item, t))
                elif item.born < slot and item.need == NEVER and item.value in self.swap:
                    terms[self.swap[item.value]] = (
                        item.memory_bytes / self.unit_bytes
                    )  # dead: it counts as freed no longer
            terms.update(self.copies.away(t))
            self.program.at_most(terms, free_bytes / self.unit_bytes)

    def _is_alive(self, item: ActivationClass, point: int) -> bool:
        return 2 * item.born + 1 <= point <= self.candidates.dataflow.span_end(item.death)

    def _absence(self, item: ActivationClass, t: int) -> Terms:
        """Memory that is not there because the value will be recomputed (swapped ones are counted by streams)."""
        slot = self.marks.slots[t]
        is_needed = item.need != NEVER and item.need <= slot
        if item.value not in self.recompute or item.release >= slot or is_needed:
            return {}
        terms: Terms = {self.recompute[item.value]: -item.memory_bytes / self.unit_bytes}
        back = self.residency.replayed_by(item, t)
        if back.at_least is not None:
            terms[back.at_least] = item.memory_bytes / self.unit_bytes
        return terms

    def _add_host_memory(self, host_budget_bytes: int | None) -> None:
        """Swapped values are in the tier together when the forward pass ends.

        Those that can be away in it may be back by then and leave their room to others: they are left out.
        """
        if host_budget_bytes is None:
            return
        terms: Terms = {
            self.swap[item.value]: item.size_bytes / self.unit_bytes
            for item in self.items
            if item.value in self.swap and not any(member.gaps for member in item.members)
        }
        self.program.at_most(terms, host_budget_bytes / self.unit_bytes)

    def decisions(self, values: tuple[float, ...], order: Sequence[Choice] = ORDER) -> dict[int, Choice]:
        """What a solution says, for all activations (those left out are kept).

        Args:
            order: of the choices that the members of a class get, the first made first.
        """
        chosen: dict[int, Choice] = {item.value: "keep" for item in self.candidates.items}
        for item in self.items:
            swapped = round(values[self.swap[item.value]]) if item.value in self.swap else 0
            replayed = round(values[self.recompute[item.value]]) if item.value in self.recompute else 0
            kept = item.count - swapped - replayed
            chosen |= item.expand({"keep": kept, "swap": swapped, "recompute": replayed}, order)
        return chosen

    def start(self, decisions: Decisions) -> dict[Variable, float]:
        """Values of the choice variables that say the same as `decisions`."""
        known: dict[Variable, float] = {}
        for item in self.items:
            counts = item.counts(decisions)
            if item.value in self.swap:
                known[self.swap[item.value]] = float(counts["swap"])
            if item.value in self.recompute:
                known[self.recompute[item.value]] = float(counts["recompute"])
        return known
