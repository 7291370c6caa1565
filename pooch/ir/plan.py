"""The plan: keep, swap or recompute for each activation, why, and what it will cost. Frozen data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pooch.ir.schedule import Schedule

if TYPE_CHECKING:
    import pandas

Choice = Literal["keep", "swap", "recompute"]
Region = Literal["model", "step"]
Decisions = Mapping[int, Choice]


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one activation, and why.

    Attributes:
        value: id of the value in the profile.
        choice: "keep", "swap" or "recompute".
        label, size_bytes: of the value, for people.
        copy_ms: time that copying it out and back would take on the link.
        replay_ms: time to replay it from the values kept or brought back (nan where it cannot be replayed).
        reason: one line for people, in numbers.
        keep_change_ms, swap_change_ms, recompute_change_ms: by how much the predicted step would change if this
            activation alone were kept, swapped or recomputed: 0 for the choice made, inf where that does not fit the
            budget, None where it is impossible or was not simulated.
    """

    value: int
    choice: Choice
    label: str
    size_bytes: int
    copy_ms: float
    replay_ms: float
    reason: str
    keep_change_ms: float | None = None
    swap_change_ms: float | None = None
    recompute_change_ms: float | None = None


@dataclass(frozen=True, slots=True)
class ExpectedOp:
    """What the runtime expects of one forward op.

    Attributes:
        name: of the operator. fingerprint: as in the profile.
        writes: ids of the values it makes, -1 for outputs that nothing is planned for.
    """

    name: str
    fingerprint: str
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Self-contained: carries its schedule and the fingerprints of the ops that it expects.

    Attributes:
        policy: which policy decided. region: "model": applied to calls of the model; "step": to `with run.step()`.
        budget_bytes: the budget that it keeps (0 = none was given).
        predicted_peak_bytes, predicted_step_ms: from the simulator.
        in_core_peak_bytes, in_core_step_ms: of the profile.
        lower_bound_ms: no plan under this budget is faster in the simulator's model.
        gap: (predicted_step_ms - lower_bound_ms) / predicted_step_ms.
        status: "optimal" (gap at most 1%), "feasible", "heuristic" (a cheap policy's plan), or "manual".
        notes: what happened on the way ("HiGHS is missing, CBC was used").
        choices: one `Decision` per activation, in forward order.
        schedule: what will be executed.
        expected: forward ops of the region, in order.
        anchors: (slot, value ids) as in the profile.
        first_slot: slot of the first op in `expected`.
        planning_ms: wall time spent on it.
        persistent_bytes: of the profile: what lived before the step (0 = unknown).
    """

    workload: str
    device_kind: str
    model_signature: str
    policy: str
    region: Region
    budget_bytes: int
    predicted_peak_bytes: int
    predicted_step_ms: float
    in_core_peak_bytes: int
    in_core_step_ms: float
    lower_bound_ms: float
    gap: float
    status: Literal["optimal", "feasible", "heuristic", "manual"]
    notes: tuple[str, ...]
    choices: tuple[Decision, ...]
    schedule: Schedule
    expected: tuple[ExpectedOp, ...]
    anchors: tuple[tuple[int, tuple[int, ...]], ...]
    first_slot: int
    planning_ms: float
    persistent_bytes: int = 0

    @property
    def decisions(self) -> dict[int, Choice]:
        """{activation id: "keep" | "swap" | "recompute"}."""
        return {decision.value: decision.choice for decision in self.choices}

    def save(self, path: str | Path) -> None:
        """Write validated JSON (beside the target first, then renamed)."""
        from pooch.ir.files import save_document

        save_document(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a saved plan.

        Raises:
            FileFormatError: missing, unreadable, truncated, foreign, of a newer version, or inconsistent.
        """
        from pooch.ir.files import load_document

        return load_document(cls, path)

    def to_frame(self) -> pandas.DataFrame:
        """One row per activation: the decision and its reason in numbers (pandas)."""
        from pooch.ir.frames import plan_frame

        return plan_frame(self)
