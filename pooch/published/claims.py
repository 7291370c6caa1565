"""Whether each claim holds, in one line that gives the figure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .methods import IN_SLICES
from .rows import Answer, Claim, Experiment


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim and whether it holds.

    Attributes:
        claim: what is claimed.
        title: of its row.
        reached: whether the claim holds. None: the row has no answer.
        result: the figure, for people.
    """

    claim: Claim
    title: str
    reached: bool | None
    result: str


def verdicts(experiment: Experiment, answers: Iterable[Answer]) -> tuple[Verdict, ...]:
    """Check every claim of an experiment: with losses whole, and if that is not enough, with losses in slices."""
    known = {(answer.row, answer.method): answer for answer in answers}
    titles = {row.key: row.title for row in experiment.rows}

    def verdict(claim: Claim) -> Verdict:
        whole = _verdict(claim, titles[claim.row], known.get((claim.row, "ilp")))
        other = known.get((claim.row, IN_SLICES))
        if whole.reached is not False or other is None:
            return whole
        sliced = _verdict(replace(claim, obstacle=""), titles[claim.row], other)
        result = f"{sliced.result} with the loss in slices of rows; with it whole, {whole.result}"
        return Verdict(claim, whole.title, sliced.reached, result)

    return tuple(verdict(claim) for claim in experiment.claims)


def claim_text(claim: Claim) -> str:
    """Return the claim as text."""
    with_speed = f" with at least {claim.throughput:.0%} of the in-core throughput" if claim.throughput else ""
    if claim.quantity == "slowdown":
        return f"at most {claim.limit:.0%} slower"
    if claim.quantity == "multiple":
        return f"at least {claim.limit:.2f} times the in-core size{with_speed}"
    return f"at least {claim.limit:g}{with_speed}"


def _verdict(claim: Claim, title: str, answer: Answer | None) -> Verdict:
    if answer is None:
        return Verdict(claim, title, None, "no answer yet")
    number = _number(claim, answer)
    if number is None:
        needs = f"; the smallest budget is {answer.needs_bytes / 2**30:.2f} GiB" if answer.needs_bytes else ""
        return Verdict(claim, title, False, f"no plan fits{needs}")
    reached = number <= claim.limit if claim.quantity == "slowdown" else number >= claim.limit
    because = f": {claim.obstacle}" if claim.obstacle and not reached else ""
    return Verdict(claim, title, reached, _result_text(claim, number) + because)


def _number(claim: Claim, answer: Answer) -> float | None:
    if claim.quantity == "slowdown":
        return answer.slowdown
    size = answer.largest_at(claim.throughput) if claim.throughput else answer.largest
    if size is None or claim.quantity == "largest":
        return size
    return size / answer.in_core_largest if answer.in_core_largest else None


def _result_text(claim: Claim, number: float) -> str:
    if claim.quantity == "slowdown":
        return f"{number:.1%}"
    if claim.quantity == "multiple":
        return f"{number:.2f} times"
    return f"{number:g}"
