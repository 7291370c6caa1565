"""Prints what becomes of each hostile case in each way.

    python -m tests.hostile [--cases NAME,...] [--ways WAY,...] [--wrong]

Exit code 1 if anything but the right numbers, a refusal in one line, or the error of plain training was found.
"""

from __future__ import annotations

import argparse
import sys

import torch

from tests.hostile.cases import CASES
from tests.hostile.governors import frozen_heap
from tests.hostile.harness import WAYS, Judge, NotReproducible, Outcome
from tests.hostile.process import outcomes_apart


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default="", help="names, separated by commas (default: all)")
    parser.add_argument("--ways", default=",".join(WAYS), help="ways, separated by commas")
    parser.add_argument("--wrong", action="store_true", help="show only cases that are not right in all ways")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ways = arguments.ways.split(",")
    names = [name for name in arguments.cases.split(",") if name] or list(CASES)
    _tell(f"| case | {' | '.join(ways)} | why |\n{'|---' * (len(ways) + 2)}|")
    alone = outcomes_apart([name for name in names if CASES[name].is_alone], ways)
    right = 0
    with frozen_heap():
        for name in names:
            case = CASES[name]
            found = [alone[name, way] for way in ways] if case.is_alone else _outcomes(name, ways)
            is_right = all(outcome.is_right(case) for outcome in found)
            right += is_right
            if not (is_right and arguments.wrong):
                _tell(f"| {name} | {' | '.join(map(_cell, found))} | {case.why} |")
    _tell(f"\n{right} of {len(names)} cases are right in all ways")
    return int(right < len(names))


def _outcomes(name: str, ways: list[str]) -> list[Outcome]:
    try:
        judge = Judge(CASES[name])
    except NotReproducible as error:
        return [Outcome("not reproducible", str(error))] * len(ways)
    return [judge.outcome(way) for way in ways]


def _cell(outcome: Outcome) -> str:
    if outcome.kind == "same":
        return f"same ({outcome.replayed_ops} ops, {outcome.moved_bytes} B)"
    return f"{outcome.kind}: {outcome.detail}" if outcome.detail else outcome.kind


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
