"""What a part of a run is told, and how it ends."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.account import Status


@dataclass
class Job:
    """What a part is told, and where it puts what it finds.

    Attributes:
        name: of the part.
        device: "cuda" or "cpu".
        small: tiny workloads.
        deadline_s: on the clock of `time.monotonic`.
        profiles: folder for recorded profiles.
        out: the part's file.
        data: tables ("rows", "links" and so on: lists of dictionaries) and "notes".
    """

    name: str
    device: str
    small: bool
    deadline_s: float
    profiles: Path
    out: Path
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def add(self, table: str, row: object) -> None:
        """Append to a table, or to the notes, and keep it."""
        self.data.setdefault(table, []).append(row)
        self.write({"data": self.data})

    def write(self, document: dict[str, Any]) -> None:
        beside = self.out.with_name(self.out.name + ".part")
        beside.write_text(json.dumps(document))
        beside.replace(self.out)

    def tell(self, text: str) -> None:
        """To the log."""
        sys.stderr.write(f"{self.left_s:6.1f} s left: {text}\n")
        sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a part ended."""

    status: Status
    why: str = ""
