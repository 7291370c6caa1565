"""Fill the tables and figures of README.md and docs/ from the stored results.

    python -m benchmarks.pages

Between the marks `<!-- NAME: begin -->` and `<!-- NAME: end -->`, writes a table, a paragraph or a few words made from
the stored results. Tables have the columns that a reader needs; the files under benchmarks/results have all of them.
Nothing is measured here. A test compares the pages with the output of this command.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import sentences
from benchmarks.sentences import Document, Stored
from benchmarks.tables import markdown_table
from pooch.ir.files import replace_file

ROOT = Path(__file__).parent.parent
RESULTS = Path("benchmarks/results")
WIDTH = 118

Part = Callable[[Stored], str]


def table(results: str, *left_out: str) -> Part:
    """Make a part with the table of a result, without some of its columns."""

    def made(stored: Stored) -> str:
        rows = stored(results)["rows"]
        kept = [{key: cell for key, cell in row.items() if key not in left_out} for row in rows]
        return f"\n{markdown_table(kept)}\n"

    return made


def more_table(results: str, number: int) -> Part:
    """Make a part with one of the further tables of a result."""

    def made(stored: Stored) -> str:
        rows = list(stored(results)["more"].values())[number]
        return f"\n{markdown_table(rows)}\n"

    return made


def table_at(results: str, budget: str, *columns: str) -> Part:
    """Make a part with the rows of a table at one budget, such as "60%", and some of its columns."""

    def made(stored: Stored) -> str:
        rows = [row for row in stored(results)["rows"] if row["budget"].startswith(budget)]
        return f"\n{markdown_table([{column: row[column] for column in columns} for row in rows])}\n"

    return made


def paragraph(sentence: Part) -> Part:
    """Make a part with sentences on separate lines."""

    def made(stored: Stored) -> str:
        return f"\n{textwrap.fill(sentence(stored), WIDTH, break_long_words=False, break_on_hyphens=False)}\n"

    return made


PAGES: Mapping[str, Mapping[str, Part]] = {
    "docs/several_devices_sharded.md": {"sharded": table("sharded")},
    "docs/several_devices_pipelines.md": {"pipelines": table("pipelines", "kept")},
    "README.md": {
        "main job at 60%": table_at(
            "main-job-cpu",
            "60%",
            "workload",
            "in-core peak",
            "budget",
            "measured peak",
            "same bits",
            "slowdown",
            "predicted",
        ),
    },
    "docs/arena.md": {
        "arena memory": table("arena-cpu"),
        "arena faults": more_table("arena-cpu", 0),
        "arena times": more_table("arena-cpu", 1),
        "arena served": more_table("arena-cpu", 2),
        "arena limits": more_table("arena-cpu", 4),
        "arena drift": more_table("arena-cpu", 5),
        "arena slowdowns": more_table("arena-cpu", 6),
        "simulated arena": table("simulated-arena"),
        "simulated arena less": paragraph(sentences.less_than_reserved),
        "simulated arena served": more_table("simulated-arena", 0),
    },
    "docs/auto.md": {
        "random lengths": table("random-lengths"),
        "random lengths, parts": more_table("random-lengths", 0),
        "random lengths, own plans": more_table("random-lengths", 1),
        "random lengths, changes": more_table("random-lengths", 2),
        "auto beside switches": table("auto-against-switches"),
    },
    "docs/measurements.md": {
        "main job times": paragraph(sentences.main_job_times),
        "main job": table("main-job-cpu", "within", "peak error", "keep/swap/recompute"),
        "checkpoint peaks": paragraph(sentences.checkpoint_peaks),
        "checkpoint": table("against-checkpoint-cpu"),
    },
    "docs/limits.md": {
        "hook costs": sentences.hook_costs,
        "character RNN": sentences.character_rnn,
    },
    "docs/modelling.md": {
        "fake against run": table("fake-against-run-cpu"),
        "fake step error": sentences.fake_step_error,
        "modelling time": sentences.modelling_time,
    },
    "docs/online.md": {
        "decisions": table("decisions"),
        "online": table("online"),
    },
    "docs/packing.md": {
        "layouts": table("layouts"),
        "predicted arenas": table("predicted-arenas"),
        "layouts-inference": table("layouts-inference"),
        "packing": table("packing"),
    },
    "docs/persistent.md": {
        "planned with everything": table("whole-budget"),
        "moved bytes": table("moved-bytes-cpu"),
    },
    "docs/peers.md": {
        "peers": table("peers-cpu"),
        "peers methods": more_table("peers-cpu", 0),
        "peers compiler": more_table("peers-cpu", 1),
        "compiled budgets": table("compiled-budgets-cpu"),
        "persistent peers": table("persistent-peers-cpu"),
        "persistent peers methods": more_table("persistent-peers-cpu", 0),
    },
    "docs/planner.md": {
        "planner growth": paragraph(sentences.growth),
        "fast plans": paragraph(sentences.fast_plans),
        "time limits": paragraph(sentences.time_limits),
    },
    "docs/runtime.md": {
        "does not fit": table("does-not-fit-cpu"),
        "real memory": table("real-memory"),
        "plain op": sentences.plain_op,
        "hook cost": table("hook-cost-cpu"),
        "in-core overhead": table("in-core-overhead-cpu"),
        "far away": table("far-away-cpu"),
        "long skips": sentences.long_skips,
        "masks": table("masks-cpu"),
    },
    "docs/several_devices.md": {
        "ranks": table("ranks"),
    },
    "docs/split.md": {
        "split": table("split"),
    },
    "docs/verification.md": {
        "verification cost": table("verification-cost-cpu"),
    },
    "docs/workloads.md": {
        "workloads": table("workloads"),
        "attention": table("attention"),
    },
}
"""What makes each part, by page and name of the part."""


def stored_in(folder: Path) -> Stored:
    """Return a function that reads results by name, such as "main-job-cpu"."""

    def stored(name: str) -> Document:
        document: Document = json.loads((folder / f"{name}.json").read_text())
        return document

    return stored


def filled(text: str, name: str, content: str) -> str:
    """Return the text with new content between the marks of a name.

    Raises:
        ValueError: the text does not have these marks exactly once.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the page has no place for {name!r}: write {begin} and {end} once")
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: f"{begin}{content}{end}", text)


def up_to_date(text: str, page: str, stored: Stored, only: str | None = None) -> str:
    """Return the page with all parts filled from the results, or only one of them."""
    for name, part in PAGES[page].items():
        if only in (None, name):
            text = filled(text, name, part(stored))
    return text


def fill(page: str, path: Path, results: Path, only: str | None = None) -> None:
    """Fill the parts of a page.

    Args:
        page: its name in `PAGES`.
        path: path of its file.
        results: folder of the stored results.
        only: name of the only part to fill. None: all.
    """
    replace_file(path, up_to_date(path.read_text(), page, stored_in(results), only).encode())


def main() -> None:
    """Fill all pages."""
    for page in PAGES:
        fill(page, ROOT / page, ROOT / RESULTS)
        sys.stdout.write(f"{page} has the figures of {RESULTS}\n")


if __name__ == "__main__":
    main()
