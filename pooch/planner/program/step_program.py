"""The integer program: keep, swap or recompute for each activation, so that the step is short and memory suffices.

Every row holds for every schedule of the simulator's model (`docs/planner.md` argues why, row by row, under the names
used here), so what the solver proves about the program is a lower bound for all plans. It follows the design of
HiRemate and OffMate (2024: a step is as long as its slowest stream, transfers may be cut into fractions) and
Checkmate's "a replay finds its sources" (2019), but copies are summed up by rate classes, so the program grows with
activations + marks and not with their product.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...analysis.persistence import Cycle
from ...ir.plan import Choice, Decisions
from ..candidates import NEVER, Candidates
from .classes import ActivationClass, make_classes, share_replays
from .copies import CopyStreams
from .marks import Marks
from .persistent import PersistentFamilies
from .residency import Residency
from .solver import Expression, Problem, Variable, weighted

UNITS = 2048  # of memory in a budget: solvers like numbers near one, whatever the budget


class StepProgram:
    """The program for one budget and one choice of marks, as a PuLP problem.

    Args:
        candidates: all activations.
        marks: where memory is checked.
        budget_bytes: of device memory.
        host_budget_bytes: size of the swap tier; None: unlimited.
        reserve_bytes: for each slot, bytes that the simulator was seen to take beyond what the program models (such
            as workspace of replays). With a reserve the program is no longer a relaxation.
        least_bytes: activations smaller than this are left out, which can only lower the optimum.
        merge: take together activations that appear in the same rows, as repeated blocks make them.
        cycle: the step with what outlives it, which may leave as well; the candidates are then those of the step
            without it. None: it stays.
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
        cycle: Cycle | None = None,
    ) -> None:
        self.candidates, self.marks, self.budget_bytes = candidates, marks, budget_bytes
        self.unit_bytes = max(1.0, budget_bytes / UNITS)
        large = [item for item in candidates.items if item.memory_bytes >= least_bytes]
        self.classes = make_classes(candidates, marks, large, merge=merge)
        self.problem = Problem("pooch")
        self.swap: dict[int, Variable] = {}
        self.recompute: dict[int, Variable] = {}
        self._add_choices()
        self.residency = Residency(self.problem, self.classes, marks, self.swap, self.recompute)
        self.copies = CopyStreams(self.problem, candidates, self.swap, self.residency, self.unit_bytes)
        self.duration = [self.problem.new(f"duration_{t}") for t in range(marks.count)]
        self.replays = [self.problem.new(f"replays_{t}") for t in range(marks.count)]
        self.persistent: PersistentFamilies | None = None
        if cycle is not None:
            profile = candidates.dataflow.profile
            self.persistent = PersistentFamilies(self.problem, cycle, marks, profile, self.unit_bytes)
        self._add_replays()
        self._add_durations()
        self._add_memory(reserve_bytes or {})
        self._add_host(host_budget_bytes)
        if self.persistent is not None:
            self._add_optimizer(self.persistent)
        step_ms = weighted(dict.fromkeys(self.duration, 1.0))
        self._add_work(step_ms)
        self.problem += step_ms, "step_ms"

    def decisions(self, values: Mapping[str, float]) -> dict[int, Choice]:
        """What a solution says, for all activations (those left out are kept)."""
        chosen: dict[int, Choice] = {item.value: "keep" for item in self.candidates.items}
        for i in self.classes:
            swapped = round(values.get(f"swap_{i}", 0.0))
            recomputed = round(values.get(f"recompute_{i}", 0.0))
            chosen |= i.expand({"swap": swapped, "recompute": recomputed, "keep": i.count - swapped - recomputed})
        return chosen

    def values_of(self, decisions: Decisions) -> dict[Variable, float]:
        """Values of the choice variables that say the same as `decisions`."""
        known = {self.swap[i.id]: i.count_of("swap", decisions) for i in self.classes if i.id in self.swap}
        known |= {
            self.recompute[i.id]: i.count_of("recompute", decisions) for i in self.classes if i.id in self.recompute
        }
        return {variable: float(count) for variable, count in known.items()}

    def _add_choices(self) -> None:
        """Variables swap_i, recompute_i: how many of class i; keep_i is what is left."""
        for i in self.classes:
            if i.first.can_swap:
                self.swap[i.id] = self.problem.new(f"swap_{i}", i.count, whole=True)
            if i.first.can_recompute:
                self.recompute[i.id] = self.problem.new(f"recompute_{i}", i.count, whole=True)
            if i.first.can_swap and i.first.can_recompute:
                self.problem += self.swap[i.id] + self.recompute[i.id] <= i.count, f"choice_{i}"

    def _add_replays(self) -> None:
        """Each op that a replay needs runs again at least once, before something made by it is back, and not after.

        Variables again_o: how many ops of kind o, which several recipes need, run again.
        """
        shared = share_replays(self.candidates, self.classes)
        again = [self.problem.new(f"again_{o}", float(count)) for o, (count, _) in enumerate(shared.kinds)]
        for place, (i, kinds) in enumerate(shared.users):
            serving = weighted({again[o]: float(times) for o, times in kinds.items()})
            self.problem += self.recompute[i.id] <= serving, f"again_for_{i}_{place}"
        own = {self.recompute[i]: time_ms for i, time_ms in shared.own_ms.items()}
        common = {variable: time_ms for variable, (_, time_ms) in zip(again, shared.kinds, strict=True)}
        self.problem += self.replays[-1] >= weighted(own | common), "replays_all"
        replayed = [i for i in self.classes if i.id in self.recompute]
        recipe_ms = {i.id: i.replay_ms for i in replayed}
        for t, replays in enumerate(self.replays):
            back = replayed if t == self.marks.count - 1 or not self._is_forward(t) else []
            if t > 0:
                self.problem += replays >= self.replays[t - 1], f"replays_stay_{t}"
            most = {self.residency.restored_at_most(i, t): recipe_ms[i.id] for i in back}
            self.problem += replays <= weighted(most), f"replays_most_{t}"
            surely = ((self.residency.restored_at_least(i, t), shared.own_ms.get(i.id)) for i in back)
            least = {variable: own_ms for variable, own_ms in surely if variable is not None and own_ms}
            if least and t < self.marks.count - 1:
                self.problem += replays >= weighted(least), f"replays_least_{t}"

    def _is_forward(self, t: int) -> bool:
        return self.marks.slots[t] < self.candidates.dataflow.profile.forward_ops

    def _add_durations(self) -> None:
        """An interval lasts as long as its compute, replays and what copies displace included, and as each of its copy
        streams is busy. All of them last as long as all compute and all that copies displace.
        """
        for t, duration in enumerate(self.duration):
            out_ms, in_ms = self.copies.out_ms(t), self.copies.in_ms(t)
            if self.persistent is not None:
                out_ms, in_ms = out_ms + self.persistent.out_ms(t), in_ms + self.persistent.in_ms(t)
            work = self.replays[t] + self.marks.compute_ms[t]
            if t > 0:
                work -= self.replays[t - 1]
            self.problem += duration >= work, f"compute_{t}"
            if self.copies.rate_classes:
                self.problem += duration >= work + self.copies.displaced_within_ms(t), f"displaced_{t}"
            if self.copies.rate_classes or self.persistent is not None:
                self._add_copying(duration, out_ms, in_ms, t)

    def _add_copying(self, duration: Variable, out_ms: Expression, in_ms: Expression, t: int) -> None:
        """Each stream makes one copy at a time; over a link that is half duplex there is one."""
        if self.candidates.dataflow.profile.link.full_duplex:
            self.problem += duration >= out_ms, f"copying_out_{t}"
            self.problem += duration >= in_ms, f"copying_in_{t}"
        else:
            self.problem += duration >= out_ms + in_ms, f"copying_{t}"

    def _add_work(self, step_ms: Expression) -> None:
        """The step lasts as long as all compute, and all that copies displace of it."""
        work = self.replays[-1] + sum(self.marks.compute_ms) + self.copies.displaced_ms()
        if self.persistent is not None:
            work += self.persistent.displaced_ms()
        self.problem += step_ms >= work, "work"

    def _add_optimizer(self, persistent: PersistentFamilies) -> None:
        """The optimizer's step lasts as long as its copies do, and what is there of what outlives it fits."""
        beside_bytes = int(self.candidates.dataflow.base_points[-2])
        for place in range(persistent.slice_marks + 1):
            t = self.marks.count + place
            self.duration.append(self.problem.new(f"duration_{t}"))
            self._add_copying(self.duration[-1], persistent.out_ms(t), persistent.in_ms(t), t)
        for place in range(persistent.slice_marks):
            mark = len(self.marks.slots) + place
            taken_bytes = beside_bytes + persistent.present_bytes(mark) + persistent.temporary_bytes(mark)
            over = (taken_bytes - self.budget_bytes) / self.unit_bytes
            self.problem += weighted(persistent.absent(mark)) >= over, f"memory_{mark + 1}"

    def _add_memory(self, reserve_bytes: Mapping[int, int]) -> None:
        """At the op of each mark, fixed bytes and the activations that are there are within the budget."""
        base = self.candidates.dataflow.base_points
        for t, slot in enumerate(self.marks.slots):
            point = 2 * slot + 1
            present_bytes = int(base[point]) + reserve_bytes.get(slot, 0)
            absent = self.copies.away(t)
            if self.persistent is not None:
                present_bytes += self.persistent.present_bytes(t)
                absent |= self.persistent.absent(t)
            self._let_others_leave(absent)
            for i in self.classes:
                memory = i.first.memory_bytes / self.unit_bytes
                if self._is_alive(i, point):
                    present_bytes += i.first.memory_bytes * i.count
                    for variable, less in self._not_restored(i, t, memory).items():
                        absent[variable] = absent.get(variable, 0.0) + less
                elif i.first.born < slot and i.first.need == NEVER and i.id in self.swap:
                    dead = absent.get(self.swap[i.id], 0.0) - memory  # it no longer counts as freed
                    absent[self.swap[i.id]] = dead
            over = (present_bytes - self.budget_bytes) / self.unit_bytes
            self.problem += weighted(absent) >= over, f"memory_{t}"

    def _let_others_leave(self, absent: dict[Variable, float]) -> None:
        """What leaves in this microbatch leaves in the others as well, which are between their passes all the time."""
        if not self.candidates.others:
            return
        for i in self.classes:
            if not any(self.candidates.others_hold(member) for member in i.members):
                continue
            memory = self.candidates.others * i.first.memory_bytes / self.unit_bytes
            for choice in (self.swap, self.recompute):
                if i.id in choice:
                    absent[choice[i.id]] = absent.get(choice[i.id], 0.0) + memory

    def _is_alive(self, i: ActivationClass, point: int) -> bool:
        return 2 * i.first.born + 1 <= point <= self.candidates.dataflow.span_end(i.first.death)

    def _not_restored(self, i: ActivationClass, t: int, memory: float) -> dict[Variable, float]:
        """Memory that is absent because values will be recomputed (for swapped ones the streams are asked)."""
        slot = self.marks.slots[t]
        is_needed = i.first.need != NEVER and i.first.need <= slot
        if i.id not in self.recompute or i.first.release >= slot or is_needed:
            return {}
        restored = self.residency.restored_at_least(i, t)
        return {self.recompute[i.id]: memory} | ({restored: -memory} if restored is not None else {})

    def _add_host(self, host_budget_bytes: int | None) -> None:
        """Swapped values are in the tier together when the forward pass ends.

        Those that can be away in it may be back by then and leave their room to others: they are left out.
        """
        if host_budget_bytes is None:
            return
        tier = {
            self.swap[i.id]: i.first.size_bytes / self.unit_bytes
            for i in self.classes
            if i.id in self.swap and not any(member.gaps for member in i.members)
        }
        self.problem += weighted(tier) <= host_budget_bytes / self.unit_bytes, "host"
