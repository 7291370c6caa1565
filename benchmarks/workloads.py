"""Tabulates the built-in workloads, and the plans for additive attention and for an LSTM.

    python -m benchmarks.workloads [--docs docs] [--results benchmarks/results] [--only table|attention|picture]

Fills the marked parts of docs/workloads.md, draws docs/attention.png, and writes the raw figures as JSON. All figures
are bytes, counts and decisions, not times. The attention part is planned with a tier so slow that swapping never pays,
which shows what is recomputed.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch._subclasses import FakeTensorMode

from benchmarks.pages import fill
from benchmarks.tables import Row, tell, write_results
from pooch.api.measure.training import first_difference, train_steps
from pooch.api.planning import plan
from pooch.ground.units import format_bytes
from pooch.ir import Link, Plan, Profile
from pooch.profiler import ProfileOptions, profile_step
from pooch.report.figures import save_figure
from pooch.workloads import BuiltIn, built_in_workloads, load_workload

SMALL = "small"  # the presets for tests
SLOW_LINK = Link("a tier too slow to be worth it", 0.01, 0.01, 1e3, 1e3)
SHARES = {32: "50%", 64: "40%", 128: "30%"}  # of the in-core peak, by length
LSTM_SHARE, LSTM_LENGTH = "50%", 16
DRAWN = (64, LSTM_LENGTH)
STATES, GATES = "LSTM states", "LSTM gates"
SUMMED = "tanh(keys + query)"
CHOICES = {"keep": "#0072B2", "swap": "#009E73", "recompute": "#E69F00"}


def profile_of(name: str, settings: dict[str, int]) -> Profile:
    """Profile a workload for its bytes; times come from a single step."""
    workload = load_workload(name, settings=settings)
    options = ProfileOptions(warmup=0, repeats=1, mode="run")
    return profile_step(workload.forward, workload.model, workload.optimizer, SLOW_LINK, options).profile


# The table of workloads -----------------------------------------------------------------------------------------


def parameters_of(name: str) -> int:
    """Count parameters at the builder's default settings, with fake tensors, so that no size is too large."""
    with FakeTensorMode():
        model = load_workload(name, batch_size=1).model
    return sum(parameter.numel() for parameter in model.parameters())


def sizes_of(entry: BuiltIn) -> list[str]:
    """Return its named sizes except the small ones."""
    return [preset.name for preset in entry.presets if not preset.name.startswith(SMALL)]


def described(entry: BuiltIn) -> dict[str, Any]:
    """Return the entries of the table for a workload."""
    tell(entry.name)
    profile = profile_of(f"{entry.name}@{SMALL}", {})
    gc.collect()
    return {
        "workload": entry.name,
        "source": entry.source,
        "growths": [growth.setting for growth in entry.growths],
        "sizes": sizes_of(entry),
        "parameters": parameters_of(entry.name),
        "forward_ops": profile.forward_ops,
        "activations": len(profile.activations),
        "activation_bytes": sum(value.size_bytes for value in profile.activations),
        "peak_bytes": profile.peak_bytes,
    }


def workload_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of the table of workloads."""
    return [
        {
            "workload": result["workload"],
            "source": result["source"],
            "grows by": ", ".join(result["growths"]),
            "named sizes": ", ".join(result["sizes"]),
            "parameters": f"{result['parameters']:,}",
            "small: forward ops": result["forward_ops"],
            "small: activations": f"{result['activations']}, {format_bytes(result['activation_bytes'])}",
            "small: in-core peak": format_bytes(result["peak_bytes"]),
        }
        for result in results
    ]


# Attention and LSTM ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """The plan of one recurrent network. `kinds`: {kind: {choice: bytes}}."""

    name: str
    length: int
    share: str
    in_core_bytes: int
    budget_bytes: int
    measured_bytes: int
    same_bits: bool
    kinds: dict[str, dict[str, int]]
    recomputed: int
    of_kind: int
    replays: int
    keys_bytes: int
    keys_held: bool


def kind_of(label: str) -> str:
    """Return the kind of an activation, for people."""
    operator = label.rpartition(".")[2]
    if label.endswith("attention.tanh"):
        return SUMMED
    if operator in ("sigmoid", "tanh") and ".cell" in label:
        return GATES
    if operator in ("add", "mul") and ".cell" in label:
        return STATES
    return "other"


def finding(name: str, length: int, share: str, settings: dict[str, int], kind: str) -> Finding:
    """Profile, plan at a share of the peak, and train a plain and a planned step."""
    tell(f"{name} {length}")
    settings = settings | {"sequence_length": length}
    profile = profile_of(name, settings)
    chosen = plan(profile, share, region="step")
    gc.collect()
    plain = train_steps(load_workload(name, settings=settings), None, 1, tell)
    gc.collect()
    planned = train_steps(load_workload(name, settings=settings), chosen, 1, tell)
    of_kind = [value for value in profile.activations if kind_of(value.label) == kind]
    keys = [value for value in profile.values if value.label.endswith("decoder.keys.mm")]
    return Finding(
        name.partition("@")[0],
        length,
        share,
        plain.peak_bytes,
        chosen.budget_bytes,
        planned.peak_bytes,
        first_difference(plain, planned) is None,
        _bytes_by_choice(profile, chosen),
        sum(chosen.decisions[value.id] == "recompute" for value in of_kind),
        len(of_kind),
        planned.stats.recomputed_ops if planned.stats else 0,
        sum(value.size_bytes for value in keys),
        any(value.id in chosen.schedule.sources for value in keys),
    )


def _bytes_by_choice(profile: Profile, chosen: Plan) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for value, choice in chosen.decisions.items():
        found.setdefault(kind_of(profile.values[value].label), Counter())[choice] += profile.values[value].size_bytes
    return {kind: dict(counts) for kind, counts in found.items()}


def attention_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of the table of attention and LSTM."""
    return [_finding_row(Finding(**result)) for result in results]


def _finding_row(found: Finding) -> Row:
    saved = sum(sum(choices.values()) for kind, choices in found.kinds.items() if kind in (SUMMED, GATES))
    return {
        "network": found.name,
        "T": found.length,
        "saved for attention or gates": format_bytes(saved),
        "keys": format_bytes(found.keys_bytes) if found.keys_bytes else "",
        "recomputed": f"{found.recomputed} of {found.of_kind}",
        "keys held": ("yes" if found.keys_held else "no") if found.keys_bytes else "",
        "in-core peak": format_bytes(found.in_core_bytes),
        "budget": f"{found.share} = {format_bytes(found.budget_bytes)}",
        "measured peak": format_bytes(found.measured_bytes),
        "replayed ops": found.replays,
        "same bits": "yes" if found.same_bits else "NO",
    }


def draw(findings: list[Finding]) -> Figure:
    """Draw the bytes of each kind of activation, by the choice of the plan."""
    figure = Figure(figsize=(9.0, 2.2 + 0.32 * sum(len(found.kinds) for found in findings)), layout="constrained")
    heights = [max(1, len(found.kinds)) for found in findings]
    for axes, found in zip(figure.subplots(len(findings), 1, height_ratios=heights), findings, strict=True):
        kinds = sorted(found.kinds, key=lambda kind: sum(found.kinds[kind].values()))
        left = [0.0] * len(kinds)
        for choice, colour in CHOICES.items():
            widths = [found.kinds[kind].get(choice, 0) / 2**20 for kind in kinds]
            axes.barh(kinds, widths, left=left, color=colour, label=choice)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_title(
            f"{found.name}, T = {found.length}, budget {found.share} of the in-core peak", fontsize=9, loc="left"
        )
        axes.set_xlabel("MiB of activations", fontsize=8)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


# Output ---------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", choices=["table", "attention", "picture"])
    options = parser.parse_args()
    page = options.docs / "workloads.md"
    if options.only in (None, "table"):
        results = [described(entry) for entry in built_in_workloads().values()]
        write_results("workloads", "Built-in workloads", workload_rows(results), results, options.results)
        fill("docs/workloads.md", page, options.results, "workloads")
    if options.only in (None, "attention"):
        network = {"batch_size": 32}
        findings = [finding("nmt@small", length, share, network, SUMMED) for length, share in SHARES.items()]
        findings.append(finding("lstm@small", LSTM_LENGTH, LSTM_SHARE, {"layers": 1, "dropout": 0}, GATES))
        results = [asdict(found) for found in findings]
        write_results("attention", "Attention and LSTM", attention_rows(results), results, options.results)
        fill("docs/workloads.md", page, options.results, "attention")
    if options.only != "table":
        raw = json.loads((options.results / "attention.json").read_text())["results"]
        findings = [Finding(**found) for found in raw]
        save_figure(draw([found for found in findings if found.length in DRAWN]), options.docs / "attention.png")


if __name__ == "__main__":
    torch.set_num_threads(1)  # small tensors gain nothing from more
    main()
