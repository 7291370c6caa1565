"""Seeds of failures, kept so that tests replay them.

A seed means the same file only as long as the changes are drawn in the same order. So a defect that is mended also gets
a test of its own, which says what was wrong.
"""

from __future__ import annotations

import json
from pathlib import Path

PATH = Path(__file__).with_name("past_failures.json")


def past_failures(path: Path = PATH) -> dict[str, list[int]]:
    """Return the seeds by kind.

    Args:
        path: Where they are kept.
    """
    found: dict[str, list[int]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def keep(kind: str, seed: int, path: Path = PATH) -> None:
    """Keep the seed of a failure.

    Args:
        kind: Name of the kind of file.
        seed: The seed.
        path: Where it is kept.
    """
    found = past_failures(path)
    found[kind] = sorted({*found.get(kind, []), seed})
    lines = [f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
