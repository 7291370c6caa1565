"""How the time limit is shared out among the stages of a search.

Stages limit themselves by counts, so that the same inputs give the same plan; shares of time only matter where the
limit is short for the step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the time limit or, where said so, of the time that is left when the stage begins.

    Attributes:
        rules: once a plan fits and this is used, no further rule is tried.
        programs: the first local search leaves at least this.
        bound: of the time left: the program that gives the bound.
        round: of the time left: each later program.
        another_round: a further program is only begun with more than this left.
        stall_rule: what the classification by stalls takes at most.
        tightening: the bound is only tightened with more than this left.
        parts: restricted programs and smaller budgets are only tried with more than this left.
        solver: of the time left: when a solver that does not heed its own limit is abandoned.
    """

    rules: float = 0.25
    programs: float = 0.7
    bound: float = 0.35
    round: float = 0.2
    another_round: float = 0.1
    stall_rule: float = 0.15
    tightening: float = 0.2
    parts: float = 0.1
    solver: float = 0.9


SHARES = Shares()
