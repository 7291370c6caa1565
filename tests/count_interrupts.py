"""Interrupts training steps under `pooch.auto` many times, and counts what came of it.

    python -m tests.count_interrupts [--count 1000]

Half of the interrupts come in steps that follow a plan, half in steps without one, spread evenly over the byte codes
that such a step runs. After each, the next step is looked at: whether it raises, has other numbers than ever, leaves
something behind, or passes the budget. Exit code 1 if any does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pooch
from pooch.autopilot.autopilot import Auto
from pooch.autopilot.library import Library
from tests.autopilot.test_interrupts import ROOMS, Step, over_budget, small_step, state
from tests.interrupts import Interrupts

MODES = ("plan", "online")
_PATIENCE_S = 120


@contextmanager
def held(mode: str) -> Iterator[tuple[Auto, Step]]:
    """A model under a budget, all of whose steps run in one way."""
    model, step = small_step()
    with pooch.auto(model, "70%", tell=lambda _: None) as run:
        until = time.monotonic() + _PATIENCE_S
        while not run.plans and time.monotonic() < until:
            step()
            time.sleep(0.05)
        assert run.plans, "no plan was made"
        known = run._driver.library._known.values()[0]
        with mock.patch.object(Library, "choose", return_value=(mode, known)):
            yield run, step


def count(mode: str, most: int) -> Counter[str]:
    """Interrupt steps so many times, and count what came of it."""
    found: Counter[str] = Counter()
    with held(mode) as (run, step):
        reference = step()
        before = state(run)
        all_places = Interrupts(*ROOMS, every=2**60)
        all_places.next(step)
        interrupts = Interrupts(*ROOMS, every=max(1, all_places.count * 9 // (10 * most)))
        while found["interrupts"] < most and interrupts.next(step):
            found["interrupts"] += 1
            over = over_budget(run)
            try:
                is_right = step() == reference
            except Exception as error:  # noqa: BLE001  (counted)
                found["errors"] += 1
                sys.stdout.write(f"{mode}, after {interrupts.place}: {type(error).__name__}: {error}\n")
                continue
            found["other numbers"] += not is_right
            found["other state"] += state(run) != before
            if over_budget(run) > over:  # the end of the interrupted step may be that which was counted
                over = over_budget(run)
                step()
                found["steps over the budget"] += over_budget(run) > over
        found["byte codes"] = all_places.count
    return found


def main() -> int:
    """Count and print; exit code 1 if a step after an interrupt was not as ever."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    most = parser.parse_args().count // len(MODES)
    sys.unraisablehook = lambda _: None  # Python prints what is raised in a finalizer
    failures = 0
    for mode in MODES:
        found = count(mode, most)
        wrong = {name: found[name] for name in ("errors", "other numbers", "other state", "steps over the budget")}
        told = ", ".join(f"{number} {name}" for name, number in wrong.items())
        sys.stdout.write(f"{mode}: {found['interrupts']} interrupts over {found['byte codes']} byte codes: {told}\n")
        failures += sum(wrong.values())
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
