"""docs/results.md from the recorded answers of `pooch reproduce`.

    python -m benchmarks.results [--folder benchmarks/results/reproduce] [--output docs/results.md]

Nothing is computed here. The answers come from

    pooch reproduce NAME -o benchmarks/results/reproduce [--part simulated|measured]

for NAME in pooch, tflms, unet3d, meng, char-rnn; rows that were not answered yet are left out of the page.
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

Made by `python -m benchmarks.results` from the answers recorded in `benchmarks/results/reproduce`; these are made by
`pooch reproduce NAME -o benchmarks/results/reproduce`.

**What is modelled.** Figures on the papers' hardware are modelled, not measured: bytes and lifetimes come from a step
of fake tensors, op times from a device model (`pooch devices --all`), the step from the simulator. In-core times of
sizes that do not fit are what the step would take with memory without end. Only tables that say "measured here" were
trained.

**The columns.** "paper": the paper's own figure; `[abstract]`: taken from the abstract, as the text was not at hand;
no mark: read. Then each method as a policy of ours in the simulator ([methods.md](methods.md) says what of each is
theirs), and `ilp`, the integer program. "needs": no plan of that method under the budget, and the smallest budget
known. "no plan loses less": the lower bound.

**Why methods do better here than in their papers.** Their decisions are carried out by our lowering, which frees as
late and copies in as early as memory permits, single activations are told apart where they moved whole layers,
in-place operators save bytes that other frameworks spend, and the simulator knows no jitter. What compares is the
columns of one row with one another.
"""


def section(reproduced: Reproduced) -> Iterator[str]:
    """The part of the page on one experiment."""
    experiment = reproduced.experiment
    yield f"## {experiment.title}\n"
    yield textwrap.fill(experiment.about, 118) + "\n"
    for table in reproduction_tables(reproduced):
        yield table.markdown()
    sources = [f"- {each.text}: {each.source} ({each.known})" for each in published_figures()
               if each.experiment == experiment.name]  # fmt: skip
    yield "The paper's figures:\n\n" + "\n".join(dict.fromkeys(sources)) + "\n"


def answered(reproduced: Reproduced) -> Reproduced:
    """Without rows that nobody answered yet."""
    known = {answer.row for answer in reproduced.answers}
    simulated, measured = (
        tuple(row for row in rows if row.key in known) for rows in (reproduced.simulated, reproduced.measured)
    )
    judged = tuple(each for each in reproduced.verdicts if each.claim.row in known)
    return replace(reproduced, simulated=simulated, measured=measured, verdicts=judged)


def page(folder: Path) -> str:
    """The whole page."""
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
