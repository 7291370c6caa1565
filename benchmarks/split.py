"""Smallest budgets with the loss whole and in slices, and which operators give the same bits in slices.

    python -m benchmarks.split [--workload NAME ...] [--steps 2] [--turns 4] [--only bits|budgets]
                               [--output benchmarks/results]

Each workload is profiled once; where a recorded profile exists, only the step in slices is. The plan for the smallest
budget in slices trains for some steps, which are compared bitwise with plain training, and then takes turns with plain
steps. Rows of workloads that are not measured this time stay.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.main_job import samples_under
from benchmarks.peers.workloads import llama
from benchmarks.samples import ratios, told
from benchmarks.tables import Row, earlier_results, markdown_table, tell, write_results
from pooch.api.measure.training import first_difference, train_steps
from pooch.api.planning import plan
from pooch.api.profiling import profile_workload
from pooch.api.smallest import smallest_budget
from pooch.api.split_profiling import with_split
from pooch.ground.units import format_bytes
from pooch.ir import Profile
from pooch.profiler import ProfileOptions
from pooch.workloads import Workload, load_workload

NAME, TITLE = "split", "Smallest budgets, with the loss whole and in slices"
BITS_NAME, BITS_TITLE = "split-bits", "Operators whole and in slices: in how many trials all bits are equal"
RECORDED = Path("profiles")
Result = Mapping[str, Any]


def llama_32k() -> Workload:
    """The Llama-like model that the peers are measured on, with a vocabulary of 32,000."""
    torch.manual_seed(0)
    made = llama(32000)
    return Workload(made.model, made.forward, None, "llama", 4)


WORKLOADS: Mapping[str, Callable[[], Workload]] = {
    "resnet50": partial(load_workload, "resnet50"),
    "gpt2": partial(load_workload, "gpt2"),
    "unet3d": partial(load_workload, "unet3d"),
    "lstm": partial(load_workload, "lstm"),
    "llama, vocabulary of 32,000": llama_32k,
    "nmt, length 100": partial(load_workload, "nmt", settings={"sequence_length": 100}),
}


# Smallest budgets -----------------------------------------------------------------------------------------------------


def measured(name: str, make: Callable[[], Workload], steps: int, turns: int) -> dict[str, Any]:
    """Profile a workload, find both smallest budgets, and train at the smaller one if it has slices."""
    tell(f"{name}: profiling")
    profile = profiled(name, make())
    gc.collect()
    whole = replace(profile, split=None)
    whole_bytes, bytes_ = (smallest_budget(each, region="step") for each in (whole, profile))
    tell(f"{name}: {format_bytes(whole_bytes)} whole, {format_bytes(bytes_)} with slices")
    found = {
        "workload": name,
        "in_core_bytes": profile.peak_bytes,
        "persistent_bytes": profile.persistent_bytes,
        "whole_bytes": whole_bytes,
        "smallest_bytes": bytes_,
        "notes": [note for note in profile.notes if "slices" in note],
        "splits": [],
    }
    chosen = plan(profile, bytes_, region="step")
    if not chosen.splits:  # nothing is new: the plan is as it was without the choice
        return found
    plain = train_steps(make(), None, steps, tell)
    gc.collect()
    planned = train_steps(make(), chosen, steps, tell)
    gc.collect()
    assert planned.stats is not None
    return {
        **found,
        "splits": [asdict(split) for split in chosen.splits],
        "steps": steps,
        "measured_bytes": planned.peak_bytes,
        "difference": first_difference(plain, planned),
        "mismatches": planned.stats.mismatches,
        "predicted_slowdown": chosen.predicted_step_ms / chosen.in_core_step_ms,
        "at_whole": _slowdowns(whole, profile, whole_bytes),
        "samples": samples_under(make(), chosen, turns) if turns else [],
    }


def profiled(name: str, workload: Workload) -> Profile:
    """Profile a workload; where it has a recorded profile, only the step in slices."""
    recorded = sorted(RECORDED.glob(f"{name}-*-cpu.json"))
    if not recorded:
        return profile_workload(workload, progress=tell)
    return with_split(Profile.load(recorded[0]), workload, ProfileOptions(), tell)


def _slowdowns(whole: Profile, profile: Profile, budget_bytes: int) -> dict[str, Any]:
    """Predicted slowdowns at the smallest budget of the step whole, with and without the choice."""
    plans = {"whole": plan(whole, budget_bytes, region="step"), "free": plan(profile, budget_bytes, region="step")}
    factors = {kind: made.predicted_step_ms / made.in_core_step_ms for kind, made in plans.items()}
    return {**factors, "split": bool(plans["free"].splits)}


def rows_of(results: Sequence[Result]) -> list[Row]:
    """The table of smallest budgets."""
    return [_row(result) for result in results]


def _row(result: Result) -> Row:
    whole, smallest, in_core = result["whole_bytes"], result["smallest_bytes"], result["in_core_bytes"]
    row: Row = {
        "workload": result["workload"],
        "in-core peak": format_bytes(in_core),
        "not movable": format_bytes(result["persistent_bytes"]),
        "smallest budget, whole": f"{format_bytes(whole)} ({whole / in_core:.1%})",
        "with split": f"{format_bytes(smallest)} ({smallest / in_core:.1%})",
    }
    if not result["splits"]:
        return {**row, **dict.fromkeys(_OF_SLICES, "-")}
    split, at, samples = result["splits"][0], result["at_whole"], result["samples"]
    cells = (
        format_bytes(split["input_bytes"]),
        format_bytes(result["measured_bytes"]),
        "yes" if result["measured_bytes"] <= smallest and not result["mismatches"] else "NO",
        "yes" if result["difference"] is None else f"NO: {result['difference']}",
        told(ratios(samples, "planned"), ".3f", half_form=".2f") if samples else "-",
        f"{result['predicted_slowdown']:.3f}",
        f"{split['time_ms'] / split['whole_ms']:.2f}",
        f"{at['whole']:.3f} whole, {at['free']:.3f} chosen",
    )
    return {**row, **dict(zip(_OF_SLICES, cells, strict=True))}


_OF_SLICES = (
    "logits",
    "measured peak",
    "within",
    "same bits",
    "slowdown",
    "predicted",
    "loss in slices over whole",
    "predicted at the whole's smallest",
)


# Bits -----------------------------------------------------------------------------------------------------------------


Trial = tuple[str, bool]


def bits(threads: int) -> dict[str, Any]:
    """Count, for each operator and type, in how many trials all bits are equal."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    counts: dict[tuple[str, str], list[int]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        trials = [*_loss_trials(dtype), *_matrix_trials(dtype)]
        for operator, is_equal in trials:
            count = counts.setdefault((operator, str(dtype).removeprefix("torch.")), [0, 0])
            count[0] += is_equal
            count[1] += 1
    found = [
        {"operator": name, "type": dtype, "equal": equal, "of": of} for (name, dtype), (equal, of) in counts.items()
    ]
    return {"workload": f"{threads} threads", "threads": threads, "counts": found}


def _loss_trials(dtype: torch.dtype) -> Iterator[Trial]:
    aten = torch.ops.aten
    for rows, classes in ((64, 1000), (511, 4001), (64, 32000), (32, 50257)):
        logits, target = (torch.randn(rows, classes) * 3).to(dtype), torch.randint(0, classes, (rows,))
        target[::5] = -100
        whole = torch.log_softmax(logits, 1)
        for size in (1, 3, 16):
            parts = _slices(rows, size)
            yield "log_softmax, rows", torch.equal(whole, torch.cat([torch.log_softmax(logits[p], 1) for p in parts]))
            picked = whole.gather(1, target.clamp(min=0)[:, None])
            column = torch.where(target == -100, -100, 0)
            for reduction in (0, 1, 2):
                loss, total = aten.nll_loss_forward(whole, target, None, reduction, -100)
                one, _ = aten.nll_loss_forward(picked, column, None, reduction, -100)
                yield "nll_loss of one number a row", torch.equal(loss, one)
                grad = torch.full_like(loss, 0.37)
                gradient = aten.nll_loss_backward(grad, whole, target, None, reduction, -100, total)
                of_rows = [
                    aten.nll_loss_backward(grad[p] if reduction == 0 else grad, whole[p], target[p], None, reduction,
                                           -100, total)
                    for p in parts
                ]  # fmt: skip
                yield "nll_loss backward, rows", torch.equal(gradient, torch.cat(of_rows))
                made = aten._log_softmax_backward_data(gradient, whole, 1, dtype)
                again = [aten._log_softmax_backward_data(gradient[p], whole[p], 1, dtype) for p in parts]
                yield "log_softmax backward, rows", torch.equal(made, torch.cat(again))
            yield (
                "label smoothing: sum of a row",
                torch.equal(whole.sum(1), torch.cat([whole[p].sum(1) for p in parts])),
            )


def _matrix_trials(dtype: torch.dtype) -> Iterator[Trial]:
    for rows, classes in ((64, 1000), (1024, 4000), (512, 8000)):
        for width in (64, 256):
            hidden, weight = torch.randn(rows, width).to(dtype), (torch.randn(classes, width) * 0.1).to(dtype)
            logits = hidden @ weight.t()
            back, of_weight = logits @ weight, logits.t() @ hidden
            for size in (16, 64, 128):
                if size < rows:
                    parts = _slices(rows, size)
                    made = torch.cat([hidden[p] @ weight.t() for p in parts])
                    yield "logits = hidden @ weight, rows", torch.equal(logits, made)
                    made = torch.cat([logits[p] @ weight for p in parts])
                    yield "gradient of hidden, rows", torch.equal(back, made)
            for share in (4, 8, 16):
                columns = _slices(classes, classes // share // 16 * 16)
                made = torch.cat([logits[:, p].t() @ hidden for p in columns])
                yield "gradient of weight, columns", torch.equal(of_weight, made)


def _slices(length: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, length)) for first in range(0, length, size)]


def bits_rows(results: Sequence[Result]) -> list[Row]:
    """The table of bits: one row for each operator and type."""
    rows: dict[tuple[str, str], Row] = {}
    for result in results:
        for count in result["counts"]:
            row = rows.setdefault(
                (count["operator"], count["type"]), {"operator": count["operator"], "type": count["type"]}
            )
            row[result["workload"]] = f"{count['equal']} of {count['of']}"
    return list(rows.values())


def main() -> None:
    """Measure what was asked for; print the tables; write the results after each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=2, help="compared bitwise")
    parser.add_argument("--turns", type=int, default=4, help="timed pairs of a plain and a planned step")
    parser.add_argument("--only", choices=["bits", "budgets"])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    if arguments.only in (None, "bits"):
        before = torch.get_num_threads()
        counted = [bits(threads) for threads in (1, 2)]
        torch.set_num_threads(before)
        write_results(BITS_NAME, BITS_TITLE, bits_rows(counted), counted, arguments.output)
        sys.stdout.write(markdown_table(bits_rows(counted)) + "\n")
    if arguments.only in (None, "budgets"):
        names = arguments.workload or list(WORKLOADS)
        results = earlier_results(NAME, arguments.output, names)
        for name in names:
            results.append(measured(name, WORKLOADS[name], arguments.steps, arguments.turns))
            results.sort(key=lambda result: list(WORKLOADS).index(result["workload"]))
            write_results(NAME, TITLE, rows_of(results), results, arguments.output)
            gc.collect()
        sys.stdout.write(markdown_table(rows_of(results)) + "\n")


if __name__ == "__main__":
    main()
