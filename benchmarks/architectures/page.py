"""The page docs/architectures.md, made from the stored lines alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.architectures import outcome
from benchmarks.tables import Row, markdown_table
from pooch.ground.units import format_bytes

Line = Mapping[str, Any]
CELL_WIDTH = 140
HEAD = """# Architectures of others

Made by `python -m benchmarks.architectures` from `benchmarks/results/architectures-cpu.jsonl`. Everything else that
Pooch is tested on was written for it. These networks were not: each is a class of a package of others, with random
weights, made small by its configuration alone, and trained for 12 steps of AdamW on random data.

- **Each training is a process of its own** with a time limit: plain training first, then under 75% or 50% of its
  peak, some networks under both. At one share `pooch.auto(model, budget, optimizer)` holds the budget; at the other
  the model is found as `pooch exec` finds it, which knows neither model nor optimizer beforehand. Which is which
  changes from network to network.
- **same bits**: the losses of all steps, the gradients of four of them, parameters, buffers, the optimizer's state
  and the random state at the end, compared with plain training, with deterministic algorithms and one thread, without
  TorchScript, whose formulas change after some calls, and with `torch.seed` drawing numbers that repeat.
- **peak**: of the whole training, counted below PyTorch, in the C library, without Pooch
  (`benchmarks/setups/counting.cpp`).
- **held**: the peak is within the budget. *told*: it is not, and Pooch has said so.
- **largest need**: what the operator of a step that needs most needs at once, beside the arguments of the call:
  storages that it reads, and what it adds while it runs (`benchmarks/architectures/floor.py`). No budget below it can
  be held, whatever leaves. Batches are chosen so that activations take most of the memory where a step stays short;
  in a network of few layers one operator alone may need more than half of the peak.
- **time**: processor time of the training thread, the median step under the budget over the median plain step of the
  same process.
- **plan/online/in-core**: steps that ran under a plan / under the online policy / without either. After three steps
  the script waits until there is a plan.

## How to run it

In an environment with Pooch's requirements, install what is to be tried; packages that are missing are left out:

```console
$ pip install transformers monai diffusers x-transformers vit-pytorch torch_geometric einops gpytorch torchdiffeq e3nn
$ pip install mlp-mixer-pytorch perceiver-pytorch soft-moe-pytorch vector-quantize-pytorch local-attention
$ pip install --no-deps timm neuraloperator   # and what they ask for besides torchvision
$ pip install reformer-pytorch linear-attention-transformer performer-pytorch sinkhorn-transformer routing-transformer
$ pip install memcnn revtorch axial-attention FrEIA nflows zuko snntorch torchsde torchdeq geoopt entmax mambapy
$ pip install pytorch-tabnet nystrom-attention conformer g-mlp-pytorch siren-pytorch rtdl-revisiting-models
$ pip install product-key-memory lambda-networks egnn-pytorch
$ python -m benchmarks.architectures --minutes 60
```

Let pip not replace torch: give it the version that is installed as a constraint. A wheel of torchvision fits one
build of torch alone; where none is installed, stand-ins take its place, since these networks import it only for
loading pictures. What is stored is not measured again, so a run goes on where the last one stopped; `--budgets 1`
tries more networks in the same time, at one of their two budgets. Needs a C++ compiler.
"""


def page(lines: Sequence[Line], found: str) -> str:
    """The page.

    Args:
        lines: what is stored, one for each network.
        found: what the sweep has found, as told by hand.
    """
    trained = [line for line in lines if line["governed"]]
    plainly_failed = [line for line in lines if line["plain"]["failure"]]
    parts = [
        HEAD,
        "## What came of it\n",
        in_words(lines) + "\n",
        markdown_table(by_package(lines)),
        "",
        found,
        "## Every network\n",
        markdown_table([row for line in sorted(trained, key=_by_name) for row in rows_of(line)]),
    ]
    if any(not _is_good(cell) for line in trained for cell in line["governed"]):
        parts += ["", "## What falls short, and why\n", *_reasons(trained)]
    if plainly_failed:
        parts += ["", "## Not trained plainly\n", "From its configuration and random inputs alone, as made here:\n"]
        parts += [f"- {line['name']}: {line['plain']['failure'][:CELL_WIDTH]}" for line in
                  sorted(plainly_failed, key=_by_name)]  # fmt: skip
    return "\n".join(parts) + "\n"


def in_words(lines: Sequence[Line]) -> str:
    """How many there are of each kind."""
    cells = [cell for line in lines for cell in line["governed"]]
    trained = [line for line in lines if not line["plain"]["failure"]]
    done = [cell for cell in cells if not cell["failure"]]
    times = sorted(outcome.slowdown(cell) for cell in done)
    middle = f"{statistics.median(times):.2f}; {sum(time > 3 for time in times)} over 3" if times else ""
    return (
        f"{len(lines)} networks were tried, {len(trained)} of which train plainly. Of their {len(cells)} trainings "
        f"under a budget, {len(done)} ended, {_count(cells, outcome.is_same)} of them with the same bits, "
        f"{_count(cells, outcome.is_within)} within the budget; "
        f"{_count(done, lambda cell: not outcome.is_within(cell) and outcome.is_told(cell))} passed it and said so, "
        f"{_count(done, lambda cell: not outcome.is_within(cell) and not outcome.is_told(cell))} without saying so; "
        f"{sum(_is_impossible(line, cell) for line in lines for cell in line['governed'])} of these budgets are below "
        "the largest need. "
        f"Median time {middle}."
    )


def by_package(lines: Sequence[Line]) -> list[Row]:
    """A row for each package."""
    rows: list[Row] = []
    for package in dict.fromkeys(line["name"].partition("/")[0] for line in lines):
        own = [line for line in lines if line["name"].startswith(f"{package}/")]
        cells = [cell for line in own for cell in line["governed"]]
        times = [outcome.slowdown(cell) for cell in cells if not cell["failure"]]
        rows.append(
            {
                "package": package,
                "tried": len(own),
                "trained plainly": sum(not line["plain"]["failure"] for line in own),
                "trainings under a budget": len(cells),
                "same bits": _count(cells, outcome.is_same),
                "held": _count(cells, outcome.is_within),
                "time": f"{statistics.median(times):.2f}" if times else "",
            }
        )
    return rows


def rows_of(line: Line) -> list[Row]:
    """A row for each training of a network under a budget."""
    return [
        {
            "network": line["name"],
            "plain peak": format_bytes(line["plain"]["peak_bytes"]),
            "largest need": format_bytes(line["plain"]["need_bytes"]) if "need_bytes" in line["plain"] else "",
            "budget": f"{cell['way']} {cell['share']:.0%}",
            **_result(cell),
        }
        for cell in line["governed"]
    ]


def _result(cell: outcome.Cell) -> Row:
    if cell["failure"]:
        return {"peak": "", "held": "no", "same bits": "no", "plan/online/in-core": "", "time": ""}
    return {
        "peak": format_bytes(cell["peak_bytes"]),
        "held": "yes" if outcome.is_within(cell) else "told" if outcome.is_told(cell) else "no",
        "same bits": "yes" if outcome.is_same(cell) else "no",
        "plan/online/in-core": "/".join(
            str(cell["pooch"][f"steps_{kind}"]) for kind in ("on_plan", "online", "in_core")
        ),
        "time": f"{outcome.slowdown(cell):.2f}",
    }


def _is_impossible(line: Line, cell: outcome.Cell) -> bool:
    return not outcome.is_within(cell) and cell["budget_bytes"] < line["plain"].get("need_bytes", 0)


def _is_good(cell: outcome.Cell) -> bool:
    return outcome.is_same(cell) and outcome.is_within(cell)


def _reasons(lines: Iterable[Line]) -> Iterable[str]:
    for line in sorted(lines, key=_by_name):
        for cell in line["governed"]:
            if not _is_good(cell):
                yield f"- {line['name']}, {cell['way']} {cell['share']:.0%}: {_reason(line, cell)}"


def _reason(line: Line, cell: outcome.Cell) -> str:
    if cell["failure"]:
        return str(cell["failure"])
    parts = [f"not equal: {', '.join(cell['differences'])}"] if cell["differences"] else []
    if not outcome.is_within(cell):
        smallest = [text for text in cell["told"] if "smallest feasible budget" in text]
        told = smallest or [text for text in cell["told"] if "over the budget" in text]
        share = f"peak {cell['peak_bytes'] / cell['budget_bytes']:.3f} of the budget"
        if _is_impossible(line, cell):
            need = f"{format_bytes(line['plain']['need_bytes'])} of {line['plain']['need_operator']}"
            share += f" (nothing holds one below the {need})"
        parts.append(f"{share}; {told[0] if told else cell['pooch']['verdict'].removeprefix('pooch: ')}")
    return "; ".join(parts)


def _count(cells: Iterable[outcome.Cell], is_so: Callable[[outcome.Cell], bool]) -> int:
    return sum(is_so(cell) for cell in cells)


def _by_name(line: Line) -> str:
    return str(line["name"])
