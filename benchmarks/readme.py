"""Fill the tables of README.md from benchmarks/results.

    python -m benchmarks.readme

Between `<!-- NAME: begin -->` and `<!-- NAME: end -->` goes the table of that name's results, with the columns that a
reader of the README needs; the files under benchmarks/results have all of them.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from benchmarks.tables import markdown_table

ROOT = Path(__file__).parent.parent
TABLES = {
    "main job": ("main-job-cpu", ("within", "peak error", "keep/swap/recompute")),
    "checkpoint": ("against-checkpoint-cpu", ()),
}
"""The table's name in the README: the name of its results, and the columns left out."""


def filled(text: str, name: str, table: str) -> str:
    """The text with the table between the marks of that name.

    Raises:
        ValueError: the text does not have these marks once.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the page has no place for the table {name!r}: write {begin} and {end} once")
    pattern = re.compile(re.escape(begin) + ".*" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n{table}\n{end}", text)


def main() -> None:
    """Fill all tables."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    for name, (results, left_out) in TABLES.items():
        rows = json.loads((ROOT / "benchmarks" / "results" / f"{results}.json").read_text())["rows"]
        table = markdown_table([{key: cell for key, cell in row.items() if key not in left_out} for row in rows])
        text = filled(text, name, table)
    readme.write_text(text)
    sys.stdout.write("README.md has the tables of benchmarks/results\n")


if __name__ == "__main__":
    main()
