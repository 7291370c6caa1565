"""A search that starts from choices that were made elsewhere, such as for another shape of the same model."""

from __future__ import annotations

from ...ir.plan import Choice, Decisions
from ..candidates import Candidate
from .rules import Rule, fit_rule, rule_by_cost
from .trials import Trials

STEPS = 64  # where choices do not fit, as many more leave as are needed, to this fraction of the activations


def warm_start(trials: Trials, start: Decisions) -> None:
    """Try the choices as the request allows them; where they do not fit, let a few more activations leave.

    What fits is remembered in `trials`, so that the search gives nothing slower.
    """
    chosen = {item.value: _allowed(item, start.get(item.value, "keep")) for item in trials.candidates.items}
    if trials.run(chosen).fits:
        return
    leaving = [(value, choice) for value, choice in chosen.items() if choice != "keep"]
    others = [leave for leave in rule_by_cost(trials.candidates, 1.0).leaving if chosen[leave[0]] == "keep"]
    fit_rule(trials, Rule((*leaving, *others)), len(others) // STEPS, fewest=len(leaving))


def _allowed(item: Candidate, choice: Choice) -> Choice:
    """The choice, or where it is impossible for this activation, the other way for it to leave."""
    if choice in item.choices:
        return choice
    return item.leaving() if item.can_leave else "keep"
