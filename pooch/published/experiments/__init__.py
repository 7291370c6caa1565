"""The experiments by name, a TOML file each: rows, and claims about the answers of `ilp`.

A row is what the file says of every row and what it says of this one; its title ends with its hardware. The budgets on
the hardware of a paper leave one GiB for the context, the libraries' own workspaces and fragmentation. This is an
assumption, the same for every method.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...ground.errors import FileFormatError, UsageError
from ...ground.reading import packaged_tables
from ...ground.wording import did_you_mean
from ...ir.validation import checked_entry
from ...planner import policy_names
from ...workloads import built_in
from ..methods import VARIANTS
from ..papers import published_figure
from ..rows import Experiment

NAMES = ("pooch", "tflms", "unet3d", "meng", "char-rnn", "policies")  # as in `pooch reproduce --help`


def read_experiment(name: str, tables: dict[str, Any]) -> Experiment:
    """Make an experiment of the tables of its file.

    Raises:
        FileFormatError: a field is not as it should be, or a row names what there is not.
    """
    fields = dict(tables)
    of_each = {"methods": [each for each in policy_names() if each != "keep_all"], **fields.pop("every_row", {})}
    for part in ("rows", "measured"):
        fields[part] = [of_each | row for row in fields.get(part, ())]
    fields["claims"] = [{"limit": _multiple(name, claim.get("row")), **claim} for claim in fields.get("claims", ())]
    read = checked_entry(Experiment, {"name": name, **fields}, f"{name}.toml")
    _check_names(read)
    rows = tuple(replace(row, title=f"{row.title}, {row.hardware}") for row in read.rows)
    return replace(read, rows=rows)


def _multiple(name: str, row: str) -> float | None:
    """The multiple that the paper reaches in a row, which a claim without a limit is about."""
    figure = published_figure(name, row)
    return None if figure is None else figure.multiple


def _check_names(experiment: Experiment) -> None:
    keys = [row.key for row in (*experiment.rows, *experiment.measured)]
    methods = {*VARIANTS, *policy_names()}
    unknown = [key for key in keys if keys.count(key) > 1]
    for row in (*experiment.rows, *experiment.measured):
        unknown += [each for each in row.methods if each not in methods]
        unknown += [row.workload] if built_in(row.workload) is None else []
    told_of = [*(claim.row for claim in experiment.claims), *(course.row for course in experiment.courses)]
    unknown += [key for key in told_of if key not in keys]
    if unknown:
        raise FileFormatError(f"{experiment.name}.toml: {unknown[0]!r} is unknown, or there twice: correct it")


EXPERIMENTS = {name: read_experiment(name, packaged_tables(__package__, f"{name}.toml")) for name in NAMES}


def find_experiment(name: str) -> Experiment:
    """Return the experiment with a name.

    Raises:
        UsageError: there is none.
    """
    if name not in EXPERIMENTS:
        raise UsageError(f"there is no published experiment {name!r}: {did_you_mean(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]
