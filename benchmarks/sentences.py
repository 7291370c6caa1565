"""Sentences of README.md and docs/ that tell measured figures, each made from the stored results.

What the results do not show is not said: a sentence whose claim does not hold is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.samples import of_kind, ratios, spread, told
from benchmarks.tables import Row
from pooch.ground.units import format_bytes, format_ms

Document = Mapping[str, Any]
Stored = Callable[[str], Document]
"""Gives the stored results of a name."""


def first_number(cell: object) -> float:
    """The figure that a cell begins with: 8.13 of "8.13 s (7.90-8.60)"."""
    return float(str(cell).split()[0].rstrip("%").replace(",", ""))


def main_job_times(stored: Stored) -> str:
    """What the times in the table are, how far they vary, and where page faults explain a faster step."""
    document = stored("main-job-cpu")
    slowdowns = [first_number(row["slowdown"]) for row in document["rows"] if row["budget"].startswith("100%")]
    parts = [_what_times_are(document["results"])]
    if slowdowns:
        parts.append(
            f"At 100%, where nothing is installed, the slowdown is {min(slowdowns):.3f} to {max(slowdowns):.3f}: "
            "that is how much times vary on this virtual machine."
        )
    return " ".join([*parts, *page_faults(document["results"])])


def _what_times_are(results: Sequence[Mapping[str, Any]]) -> str:
    if not all("samples" in result for result in results):
        return "Times are medians of plain and planned steps that took turns."
    turns = sorted({len(of_kind(result["samples"], "planned")) for result in results})
    number = str(turns[0]) if len(turns) == 1 else f"{turns[0]} to {turns[-1]}"
    return (
        f"Times are medians of {number} turns of a plain and a planned step, with the middle half of the turns in "
        "brackets; the slowdown is that of the two steps of a turn."
    )


def page_faults(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence on each workload whose planned step is faster and takes fewer page faults and less system time.

    Of its budgets the one under which it is fastest. "Faster" and "less": the middle halves do not overlap.
    """
    found = []
    for workload in dict.fromkeys(result["workload"] for result in results):
        shown = [result for result in results if result["workload"] == workload and _faults_explain(result)]
        if shown:
            fastest = min(shown, key=lambda result: spread(ratios(result["samples"], "planned")).median)  # type: ignore[union-attr]
            found.append(_page_fault_sentence(fastest))
    return found


def _faults_explain(result: Mapping[str, Any]) -> bool:
    samples = result.get("samples", [])
    slowdown = spread(ratios(samples, "planned"))
    return (
        slowdown is not None
        and slowdown.upper < 1
        and all(_is_less(samples, what) for what in ("minor_faults", "system_s"))
    )


def _is_less(samples: Sequence[Mapping[str, Any]], what: str) -> bool:
    planned, plain = (spread(of_kind(samples, kind, what)) for kind in ("planned", "plain"))
    return planned is not None and plain is not None and planned.upper < plain.lower


def _page_fault_sentence(result: Mapping[str, Any]) -> str:
    samples = result["samples"]
    faults, system, user = (
        [told(of_kind(samples, kind, what), form, unit=unit) for kind in ("planned", "plain")]
        for what, form, unit in (("minor_faults", ",.0f", ""), ("system_s", ".2f", " s"), ("user_s", ".2f", " s"))
    )
    return (
        f"{result['workload']} is faster under its plan at {result['budget']}: such a step has {faults[0]} minor page "
        f"faults instead of {faults[1]}, and takes {system[0]} of system time instead of {system[1]}; its user time is "
        f"{user[0]} instead of {user[1]}."
    )


def checkpoint_peaks(stored: Stored) -> str:
    """Which workloads end at the same memory with both."""
    document = stored("against-checkpoint-cpu")
    shares = {(row["workload"], row["method"]): row["peak / plain"] for row in document["rows"]}
    methods = ("torch.utils.checkpoint, each block", "Pooch")
    same = [name for name, method in shares if method == "Pooch" and len({shares[name, one] for one in methods}) == 1]
    if "gpt2" not in same:
        return ""
    return (
        "On GPT-2 both end at the memory of one op that no decision makes smaller (it adds the two gradients of the "
        f"tied embedding), so there the peaks are the same to three digits: {shares['gpt2', 'Pooch']} of the plain one."
    )


def _cost_us(rows: Sequence[Row], what: str) -> float:
    return next(first_number(row["us an op"]) for row in rows if row["what"] == what)


def hook_costs(stored: Stored) -> str:
    """What an op, a swapped and a replayed tensor cost, each above the one before."""
    rows = stored("hook-cost-cpu")["rows"]
    kept, swapped, replayed = (
        _cost_us(rows, f"native watch and hooks, all {rest}")
        for rest in ("but one tensor kept", "tensors swapped", "tensors replayed")
    )
    return (
        f"some {kept:.0f} us for each op, {swapped - kept:.0f} more for each tensor that is swapped out and in, "
        f"{replayed - kept:.0f} more for each that is replayed"
    )


def plain_op(stored: Stored) -> str:
    """What an op of the benchmark's chain takes."""
    return f"{_cost_us(stored('hook-cost-cpu')['rows'], 'plain'):.0f} us"


def character_rnn(stored: Stored) -> str:
    """What the integer program's plan for the small character RNN was predicted to lose, and lost."""
    answers = [each["answer"] for each in stored("reproduce/char-rnn")["answers"]]
    (one,) = [each for each in answers if (each["row"], each["method"]) == ("char-rnn-here", "ilp")]
    share = one["budget_bytes"] / one["in_core_peak_bytes"]
    predicted = one["step_ms"] / one["in_core_step_ms"] - 1
    lost = one["measured_step_ms"] / one["measured_plain_step_ms"] - 1
    return (
        f"a small character RNN (a step of {format_ms(one['measured_plain_step_ms'])}) at {share:.0%} of its memory "
        f"was predicted to lose {predicted:.0%} and lost {lost:.0%}"
    )


def less_than_reserved(stored: Stored) -> str:
    """How much less than PyTorch reserves on the simulated device the packed steps take."""

    def told(kind: str, way: str) -> str:
        chosen = [each for each in stored("simulated-arena")["results"] if each["kind"].startswith(kind)]
        less = [
            1 - (each["arena"]["staying_bytes"] + each["arena"]["arena"]["arena_bytes"]) / each[way]["rest"]["reserved"]
            for each in chosen
        ]
        return f"{min(less):.1%} to {max(less):.1%}"

    return (
        f"here, packed steps take {told('plain', 'default')} (plain) and {told('planned', 'default')} (planned) less "
        f"than PyTorch reserves with its default settings, and {told('plain', 'expandable segments')} and "
        f"{told('planned', 'expandable segments')} less than with expandable segments."
    )


def growth(stored: Stored) -> str:
    """Planning time, memory and gaps of the larger synthetic models, and of the smaller ones."""
    rows = stored("planner-growth")["rows"]
    large = [row for row in rows if row["activations"] > 1100]
    small = [first_number(row["seconds"]) for row in rows if row["activations"] <= 1100]
    gaps = [first_number(row["gap"]) for row in rows]
    sizes = "; ".join(
        f"{row['activations']:,} activations take {first_number(row['seconds']):.1f} s and "
        f"{first_number(row['memory_mib']):.0f} MiB"
        for row in large
    )
    told_small = small and (
        f" The sizes up to a thousand take {min(small):.0f} to {max(small):.0f} s: blocks are not merged into classes "
        "there, and restricted programs are solved as well."
    )
    return f"{sizes}. Gaps of all sizes are {min(gaps):.2%} to {max(gaps):.2%}.{told_small or ''}"


def time_limits(stored: Stored) -> str:
    """How many plans kept their limit, and those that did not."""
    rows = stored("time-limits")["rows"]
    limits = [first_number(row["limit, s"]) for row in rows]
    shares = [first_number(row["taken, s"]) / limit for row, limit in zip(rows, limits, strict=True)]
    kept = [share for row, share in zip(rows, shares, strict=True) if row["kept"] == "yes"]
    over = [
        f"{row['profile']} ({row['activations']:,} activations) took {first_number(row['taken, s']):.1f} s under a "
        f"limit of {row['limit, s']} s"
        for row in rows
        if row["kept"] != "yes"
    ]
    others = f" The others: {'; '.join(over)}." if over else ""
    return (
        f"Of {len(rows)} plans under limits of {min(limits):g} to {max(limits):g} s, {len(kept)} took at most a fifth "
        f"more (the largest {max(kept):.2f} times the limit).{others}"
    )


def fast_plans(stored: Stored) -> str:
    """Time and quality of fast plans, at the budgets asked for and at the smallest ones."""
    results, rows = stored("fast-plans")["results"], stored("fast-plans")["rows"]
    asked = [row for row, result in zip(rows, results, strict=True) if result["share"] is not None]
    smallest = [row for row, result in zip(rows, results, strict=True) if result["share"] is None]

    def told(cells: Sequence[Mapping[str, str]]) -> str:
        seconds = [first_number(row["fast, CPU s"]) for row in cells]
        ratios = [first_number(row["fast / best"]) for row in cells]
        return (
            f"{min(seconds):.2f} to {max(seconds):.2f} s of the processor, and steps at most {max(ratios) - 1:.1%} "
            "longer than the best one known"
        )

    full = [first_number(row["ordinary, CPU s"]) for row in asked]
    faster = sum(row["fast / in-core"] < row["ordinary / in-core"] for row in rows)
    missed = sum(bool(row["misses"]) for row in rows)
    return (
        f"{len(asked)} plans at 80, 60 and 45% of the in-core peak: {told(asked)} (the ordinary search takes "
        f"{min(full):.1f} to {max(full):.1f} s). At the smallest budget of each profile: {told(smallest)}. {faster} of "
        f"the {len(rows)} fast plans have a shorter step than the ordinary one, {missed} take more than a second or "
        "are more than a tenth slower than the best."
    )


def long_skips(stored: Stored) -> str:
    """What leaves while the program holds it, in memory."""
    curves = {curve["name"]: curve for curve in stored("long-skips")["curves"]}
    stay, leave = (curves[f"all swapped, held values {what}"] for what in ("stay", "leave"))
    bottom, forward = (
        f"{format_bytes(leave[what])} instead of {format_bytes(stay[what])}"
        for what in ("bottom_bytes", "forward_peak_bytes")
    )
    return f"at the bottom of the U {bottom}, in the forward pass {forward}"


def fake_step_error(stored: Stored) -> str:
    """How far off the step of fake profiles is at most."""
    errors = [abs(first_number(row["fake step"])) for row in stored("fake-against-run-cpu")["rows"]]
    return f"off by up to {max(errors):.0f}%"


def modelling_time(stored: Stored) -> str:
    """How long modelling a published size takes."""
    seconds = [first_number(row["modelled in"]) for row in stored("modelled-steps")["rows"]]
    return f"{min(seconds):.1f} to {max(seconds):.1f} s each"
