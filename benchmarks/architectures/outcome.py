"""What is concluded from the trainings of a network."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Trained = Mapping[str, Any]
Cell = dict[str, Any]


def peak_bytes(trained: Trained) -> int:
    """Highest live bytes of a training."""
    return max(step["peak_bytes"] for step in trained["steps"])


def stays_bytes(trained: Trained) -> int:
    """Live bytes between steps, once the optimizer has its state."""
    return max(step["live_bytes"] for step in trained["steps"])


def plain_cell(found: Trained) -> Cell:
    """What is stored of plain training."""
    if "failure" in found:
        return {"failure": found["failure"]}
    return {
        "failure": "",
        "size": found["size"],
        "parameters": found["parameters"],
        "modules": found["modules"],
        "need_bytes": found["need_bytes"],
        "need_operator": found["need_operator"],
        "peak_bytes": peak_bytes(found),
        "stays_bytes": stays_bytes(found),
        "step_ms": _later_half(found),
    }


def governed_cell(way: str, share: float, budget_bytes: int, plain: Trained, found: Trained) -> Cell:
    """What is stored of a training under a budget, compared with plain training."""
    cell: Cell = {"way": way, "share": share, "budget_bytes": budget_bytes, "failure": found.get("failure", "")}
    if cell["failure"]:
        return cell
    summary = found["pooch"]
    return {
        **cell,
        "peak_bytes": peak_bytes(found),
        "differences": differences(plain, found),
        "differences_afterwards": differences(plain, found["plain again"]),
        "step_ms": _later_half(found),
        "plain_step_ms": _later_half(found["plain again"]),
        "thread_ms": _median_of_later_half(found["thread_ms"]),
        "plain_thread_ms": _median_of_later_half(found["plain again"]["thread_ms"]),
        "pooch": summary,
        "told": [line for line in found["told"] if not line.startswith("planned for")],
    }


def differences(plain: Trained, other: Trained) -> list[str]:
    """What is not equal, as far as the shorter of two trainings goes; the state at the end only if none is shorter."""
    is_shorter = len(other["steps"]) < len(plain["steps"])
    found = []
    for name, values in plain["values"].items():
        others = other["values"].get(name, [])
        if is_shorter:
            if name == "loss":
                found += [name] if values[: len(others)] != others else []
        elif values != others:
            first = next((n for n, pair in enumerate(zip(values, others, strict=False)) if pair[0] != pair[1]), "end")
            found.append(f"{name} ({first})")
    return found


def is_same(cell: Cell) -> bool:
    return not cell["failure"] and not cell["differences"]


def is_within(cell: Cell) -> bool:
    return not cell["failure"] and cell["peak_bytes"] <= cell["budget_bytes"]


def is_told(cell: Cell) -> bool:
    """Whether Pooch said that the budget was passed."""
    verdict = cell["pooch"]["verdict"]
    excepted = ("but passed", "but exceeded", "live before")  # the first is in older rows
    return not verdict.startswith("pooch: Budget held") or any(each in verdict for each in excepted)


def slowdown(cell: Cell) -> float:
    """Step under the budget over plain step of the same process: processor time of the training thread."""
    return cell["thread_ms"] / cell["plain_thread_ms"]


def _later_half(trained: Trained) -> float:
    return _median_of_later_half([step["ms"] for step in trained["steps"]])


def _median_of_later_half(values: Sequence[float]) -> float:
    return statistics.median(values[len(values) // 2 :])
