"""A search that starts from choices that were made elsewhere, such as for another shape of the same model."""

from __future__ import annotations

from ...ir.plan import Choice, Decisions
from ..candidates import Candidate
from .repair import repair
from .trials import Trial, Trials


def warm_start(trials: Trials, start: Decisions) -> Trial:
    """Try the choices as the request allows them; where they do not fit, let a few more activations leave.

    What fits is remembered in `trials`, so that the search gives nothing slower.
    """
    decisions = {item.value: _allowed(item, start.get(item.value, "keep")) for item in trials.candidates.items}
    trial = trials.run(decisions)
    if not trial.fits:
        repair(trials, trial.decisions)
    return trial


def _allowed(item: Candidate, choice: Choice) -> Choice:
    """The choice, or where it is impossible for this activation, the other way for it to leave."""
    if choice in item.choices:
        return choice
    return item.leaving() if item.can_leave else "keep"
