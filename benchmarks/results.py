"""Writes docs/results.md from the recorded answers of `pooch reproduce`.

    python -m benchmarks.results [--folder benchmarks/results/reproduce] [--output docs/results.md]

Nothing is computed here. The answers come from

    pooch reproduce NAME -o benchmarks/results/reproduce [--part simulated|measured]

for NAME in pooch, tflms, unet3d, meng, char-rnn, policies. Rows without an answer are left out of the page.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pooch.ir.files import replace_file
from pooch.published.experiments import EXPERIMENTS
from pooch.published.papers import published_figures
from pooch.published.running import Reproduced, reproduce
from pooch.published.tables import reproduction_tables

FOLDER = Path("benchmarks/results/reproduce")
OUTPUT = Path("docs/results.md")
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
