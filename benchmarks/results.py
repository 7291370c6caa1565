"""Writes docs/results.md from the recorded answers of `pooch reproduce`.

    python -m benchmarks.results [--folder benchmarks/results/reproduce] [--output docs/results.md]

Nothing is computed here. The answers come from

    pooch reproduce NAME -o benchmarks/results/reproduce [--part simulated|measured]

for NAME in pooch, tflms, unet3d, meng, char-rnn, policies. Rows without an answer are left out of the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.tables import markdown_table
from pooch.ir.files import replace_file
from pooch.published.experiments import EXPERIMENTS
from pooch.published.papers import published_figures
from pooch.published.running import Reproduced, reproduce
from pooch.published.tables import reproduction_tables

FOLDER = Path("benchmarks/results/reproduce")
OUTPUT = Path("docs/results.md")
TRACES = {
    "traces-minimalloc": """\
`python -m benchmarks.traces.minimalloc FOLDER` packs `benchmarks/challenging` of
[MiniMalloc](https://github.com/google/minimalloc), which has a capacity of 1 MiB for each instance. Published
seconds are those of `img/minimalloc.slides.pdf` there, slide 22, on another machine (ASPLOS 2023; TelaMalloc
and a mixed integer program took more than an hour for each). "Smallest" is what the search finds without a
capacity, in 30 CPU seconds or until it is at the bound ([packing.md](packing.md)).""",
    "traces-dtr": """\
`python -m benchmarks.traces.dtr LOGS --simulator FOLDER` reads the operator logs of [DTR's
authors](https://github.com/uwsampl/dtr-prototype) (`simrd/logs.zip`; Kirisame et al. 2021) as profiles. "DTR's
simulator" is theirs, run as in their experiments: the eager runtime with their heuristics h_DTR and h_DTR-eq,
time over in-core time. They drop any tensor, gradients too, and several times; our plans and rules let only go
of what the backward pass reads of the forward pass. "plan" is the integer program without a swap tier, 30
seconds each; "online" and "h_DTR on our machine" evict while the step runs, without a plan; "plan with swaps"
has a modelled link of 12 GB/s each way. In-core peaks agree with those of their simulator within 600 bytes.
Their tree-structured LSTM shows what that costs: what its backward pass holds beside the activations takes half of
the peak, which only they can drop. Plans for their LSTM without a tier need 54.6% of its peak, which a search of more
than 350 CPU seconds finds: it changes one of 1,149 activations at a time, and no time limit ends it. So that log has
no row at 30%, where their simulator takes 1.301 and 1.365, and where steps without a plan do not fit by our rule. Their
log of an unrolled GAN has several backward passes in a step, which a profile has not.""",
    "traces-knapsack": """\
`python -m benchmarks.traces.knapsack` runs the solvers that choose what a compiled graph saves under PyTorch's
`activation_memory_budget`: `dp` and its successor round memory to 1/10,000, so values that are rounded down
pass the room; `dp_knapsack_sliding_hirschberg` passes it with whole units too
([pytorch#197871](https://github.com/pytorch/pytorch/issues/197871)). Plans for steps with the same values hold
their budget, which is the room and the bytes of the largest value, since one that is just being made lies
beside those that are saved.""",
    "traces-sac-ilp": """\
`python -m benchmarks.traces.sac_ilp` models the transformer of PyTorch's test of
`torch.distributed._tools.sac_ilp` (fp32, batch 8, 1,024 tokens, an A100), whose program chooses what share of
each layer's activations is discarded. Its figures are those that the test expects: a baseline of 2,583,888,896
bytes, of which the model here takes 95%, and 6.97 ms of recompute on 97.97 ms. "The same on one" adds what the
other three of four ranks hold of parameters and gradients there. Plans decide for single activations, and their
times are modelled, as those of the test are.""",
}
HEAD = """# Published experiments, reproduced

`python -m benchmarks.results` generates this page from the answers that
`pooch reproduce NAME -o benchmarks/results/reproduce` records.

**What is modelled.** Figures for the papers' hardware are modelled, not measured: bytes and lifetimes come from a step
with fake tensors, op times from a device model (`pooch devices --all`), and step times from the simulator. For sizes
that do not fit, the in-core time is what the step would take with unlimited memory. Only tables marked "measured here"
come from training.

**The columns.** "paper" is the figure that the paper gives; `[abstract]` marks figures from an abstract whose full text
was not available. The methods follow, each as a policy in our simulator ([methods.md](methods.md) describes which parts
are the paper's), and `ilp`, the integer program. "needs" means that the method has no plan under the budget, and gives
the smallest budget known to suffice. "lower bound" is the smallest slowdown that any plan can have. A slowdown that was
measured is the median over turns of a plain and a planned step; brackets hold the middle half of the turns, where they
were stored, and the prediction.

**Why methods do better here than in their papers.** Our lowering carries out their decisions, and frees as late and
copies in as early as memory permits. Decisions are about single activations instead of whole layers, in-place
operators save bytes that other frameworks spend, and the simulator has no jitter. Compare the columns of one row with
one another.
"""


def section(reproduced: Reproduced) -> Iterator[str]:
    """Yield the section on one experiment."""
    experiment = reproduced.experiment
    yield f"## {experiment.title}\n"
    yield textwrap.fill(experiment.about, 118) + "\n"
    for table in reproduction_tables(reproduced):
        yield table.markdown()
    sources = [f"- {each.text}: {each.source} ({each.known})" for each in published_figures()
               if each.experiment == experiment.name]  # fmt: skip
    if sources:
        yield "The paper's figures:\n\n" + "\n".join(dict.fromkeys(sources)) + "\n"


def traces(folder: Path) -> Iterator[str]:
    """Yield the section on what others published as inputs."""
    known = {name: about for name, about in TRACES.items() if (folder / f"{name}.json").exists()}
    if known:
        yield "## Traces of others\n"
    for name, about in known.items():
        document = json.loads((folder / f"{name}.json").read_text())
        yield f"### {document['title']}\n\n{about}\n"
        yield markdown_table(document["rows"]) + "\n"


def answered(reproduced: Reproduced) -> Reproduced:
    """Leave out rows without an answer."""
    known = {answer.row for answer in reproduced.answers}
    simulated, measured = (
        tuple(row for row in rows if row.key in known) for rows in (reproduced.simulated, reproduced.measured)
    )
    judged = tuple(each for each in reproduced.verdicts if each.claim.row in known)
    return replace(reproduced, simulated=simulated, measured=measured, verdicts=judged)


def page(folder: Path) -> str:
    """Return the whole page."""
    parts = [HEAD]
    for experiment in EXPERIMENTS.values():
        found = answered(reproduce(experiment, folder=folder, only_recorded=True))
        if found.answers:
            parts += section(found)
    parts += traces(folder.parent)
    return "\n".join(parts)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    replace_file(arguments.output, page(arguments.folder).encode())
    sys.stdout.write(f"wrote {arguments.output}\n")


if __name__ == "__main__":
    main()
