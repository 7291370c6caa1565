"""Timed steps take turns, every sample is kept, and a table says what the samples say."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import against_checkpoint, main_job
from benchmarks import samples as timed
from benchmarks.handmade import tight_plan, tiny_profile
from benchmarks.samples import StepCost, of_kind, ratios, spread, step_cost, step_rows, take_turns, timing_of, told
from pooch.analysis.dataflow import Dataflow
from pooch.api.measure.training import applied
from pooch.executor import Run
from pooch.ir import Plan
from pooch.workloads import Workload


def small_workload() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])
    data = torch.rand(64, 32)
    return Workload(model, lambda: model(data).square().mean())


def samples_of(**walls_ms: list[float]) -> list[dict[str, Any]]:
    """A turn for warming up that is far off, then one turn for each number."""
    slow = {"turn": 0, "wall_ms": 9e9, "user_s": 9e9, "system_s": 9e9, "minor_faults": 10**12}
    found: list[dict[str, Any]] = [{**slow, "kind": kind} for kind in walls_ms]
    for kind, numbers in walls_ms.items():
        for turn, wall_ms in enumerate(numbers, start=1):
            cost = StepCost(wall_ms, wall_ms / 2000, wall_ms / 4000, int(wall_ms) * 1000)
            found.append({"turn": turn, "kind": kind, "wall_ms": cost.wall_ms, "user_s": cost.user_s,
                          "system_s": cost.system_s, "minor_faults": cost.minor_faults})  # fmt: skip
    return found


def test_steps_take_turns_in_changing_order_and_every_one_is_kept() -> None:
    order: list[str] = []

    def way(name: str) -> Any:
        def cost() -> StepCost:
            order.append(name)
            return StepCost(float(len(order)), 0.0, 0.0, len(order))

        return cost

    samples = take_turns({name: way(name) for name in "abc"}, 3)
    assert order == [*"abc", *"bca", *"cab", *"abc"]
    assert [(sample["turn"], sample["kind"]) for sample in samples] == [(i // 3, name) for i, name in enumerate(order)]
    assert [sample["wall_ms"] for sample in samples] == [float(i) for i in range(1, 13)]


def test_the_turn_for_warming_up_counts_in_no_figure() -> None:
    samples = samples_of(plain=[8000.0, 9000.0, 10000.0], planned=[6000.0, 9000.0, 12000.0])
    assert of_kind(samples, "plain") == (8000.0, 9000.0, 10000.0)
    assert timing_of(samples).planned_samples_ms == (6000.0, 9000.0, 12000.0)
    assert ratios(samples, "planned") == (0.75, 1.0, 1.2)
    assert step_rows({"workload": "net"}, samples)[1] == {
        "workload": "net",
        "steps": "planned",
        "turns": 3,
        "wall time": "9.00 s (7.50-10.50)",
        "least to most": "6.00 to 12.00 s",
        "user time": "4.50 s (3.75-5.25)",
        "system time": "2.25 s (1.88-2.62)",
        "minor page faults": "9,000,000 (7,500,000-10,500,000)",
    }


def test_a_spread_is_median_quartiles_and_extremes() -> None:
    found = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert found is not None
    assert (found.median, found.lower, found.upper, found.least, found.most) == (3.0, 2.0, 4.0, 1.0, 5.0)
    assert told([0.5], ".3f", half_form=".1f") == "0.500 (0.5-0.5)"


def test_steps_that_were_not_measured_plainly_leave_their_cells_empty() -> None:
    samples = samples_of(planned=[1.0, 2.0])
    assert spread([]) is None
    assert told(of_kind(samples, "plain"), ".2f") == told(ratios(samples, "planned"), ".3f") == ""


def test_a_step_costs_what_the_system_counted_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = iter([(100, 1.0, 0.25), (107, 3.0, 0.75)])  # before the step and after it

    def getrusage(who: int) -> SimpleNamespace:
        faults, user_s, system_s = next(counted)
        return SimpleNamespace(ru_minflt=faults, ru_utime=user_s, ru_stime=system_s)

    monkeypatch.setattr(timed.resource, "getrusage", getrusage)
    workload = small_workload()
    cost = step_cost(workload, None)
    assert (cost.minor_faults, cost.user_s, cost.system_s) == (7, 2.0, 0.5)
    assert cost.wall_ms > 0
    assert all(parameter.grad is not None for parameter in workload.model.parameters())


def test_the_main_job_keeps_each_plain_and_each_planned_step(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = small_workload()
    profile = tiny_profile(workload.forward, workload.model)
    ids = [value.id for value in Dataflow(profile, "step").activations]
    chosen = tight_plan(profile, dict.fromkeys(ids, "swap"))
    runs: list[Run] = []

    @contextmanager
    def watched(plan: Plan, workload: Workload) -> Iterator[Run | None]:
        with applied(plan, workload) as run:
            assert run is not None
            runs.append(run)
            yield run

    monkeypatch.setattr(main_job, "applied", watched)
    samples = main_job.samples_under(workload, chosen, 3)
    assert runs[0].stats.swapped_in_bytes > 0
    assert runs[0].stats.mismatches == 0
    kinds = [sample["kind"] for sample in samples]
    assert kinds == ["plain", "planned", "planned", "plain", "plain", "planned", "planned", "plain"]
    assert all({"wall_ms", "user_s", "system_s", "minor_faults"} <= sample.keys() for sample in samples)


def main_job_result(**changes: Any) -> Mapping[str, Any]:
    return {
        "workload": "net", "budget": "60%", "budget_bytes": 600 << 20, "bitwise_equal": True, "first_difference": None,
        "plain_peak_bytes": 1 << 30, "predicted_peak_bytes": 600 << 20, "measured_peak_bytes": 600 << 20,
        "within_budget": True, "peak_error": 0.0, "predicted_slowdown": 1.048, "swapped_out_bytes": 0,
        "recomputed_ops": 7, "decisions": {"keep": 1, "swap": 2, "recompute": 3},
        "samples": samples_of(plain=[8000.0, 9000.0, 10000.0], planned=[6000.0, 9000.0, 12000.0]),
        **changes,
    }  # fmt: skip


def test_the_main_job_tells_medians_with_their_middle_half() -> None:
    (row,) = main_job.rows_of([main_job_result()])
    assert (row["plain step"], row["planned step"]) == ("9.00 s (8.50-9.50)", "9.00 s (7.50-10.50)")
    assert (row["slowdown"], row["predicted"]) == ("1.000 (0.88-1.10)", "1.048")
    assert (row["keep/swap/recompute"], row["replayed ops"]) == ("1/2/3", 7)


def test_other_bits_or_a_peak_over_the_budget_stand_in_the_table_of_the_main_job() -> None:
    wrong = main_job_result(bitwise_equal=False, first_difference="step 2: loss", within_budget=False)
    (row,) = main_job.rows_of([wrong])
    assert (row["same bits"], row["within"]) == ("NO: step 2: loss", "NO")


def test_checkpointing_is_told_beside_plain_and_planned_steps_of_the_same_turns() -> None:
    peaks = {"plain": 100 << 20, "checkpoint": 56 << 20, "pooch": 54 << 20}
    samples = samples_of(plain=[1000.0, 2000.0], checkpoint=[1500.0, 2240.0], pooch=[900.0, 2000.0])
    rows = against_checkpoint.rows_of([{"workload": "net", "peak_bytes": peaks, "samples": samples}])
    assert [row["step / plain"] for row in rows] == ["1", "1.310 (1.22-1.41)", "0.950 (0.93-0.97)"]
    assert [row["peak / plain"] for row in rows] == ["1.000", "0.560", "0.540"]
    assert rows[1]["step"] == "1.87 s (1.69-2.06)"


@pytest.mark.parametrize("text", ["100%", "100%=0", "100%=some", "=3"])
def test_turns_at_a_budget_want_a_budget_and_a_number(text: str) -> None:
    assert main_job.turns_at("100%=4") == ("100%", 4)
    with pytest.raises((ValueError, argparse.ArgumentTypeError)):
        main_job.turns_at(text)
