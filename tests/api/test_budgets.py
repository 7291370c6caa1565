"""Budgets as people mean them, in Python and on the command line, which share one parser."""

from __future__ import annotations

import numpy
import pytest

import pooch
from pooch.api.budgets import check_budget, parse_budget
from pooch.autopilot.budget import budget_of
from pooch.errors import UsageError
from tests.toys import blocks

GIB, PEAK_BYTES = 2**30, 10**9


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("16GiB", 16 * GIB),
        ("16 GiB", 16 * GIB),
        (" 16gib ", 16 * GIB),
        ("16 GB", 16 * 10**9),
        ("16gb", 16 * 10**9),
        ("0.5GiB", GIB // 2),
        ("2048 bytes", 2048),
        ("1024", 1024),
        (1024, 1024),
        (numpy.int64(2048), 2048),
        (0.9 * GIB, int(0.9 * GIB)),
        ("60%", 6 * 10**8),
        ("250%", 25 * 10**8),
        ("0.00001%", 100),
    ],
)
def test_what_is_meant(written: float | str, meant: int) -> None:
    assert parse_budget(written, PEAK_BYTES) == meant


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (16, 'the budget 16 is 16 bytes: did you mean "16GiB" or "16%"?'),
        ("60", 'the budget 60 is 60 bytes: did you mean "60GiB" or "60%"?'),
        ("16 bytes", 'the budget 16 bytes is 16 bytes: did you mean "16GiB" or "16%"?'),
        (16.0, 'the budget 16.0 is 16 bytes: did you mean "16GiB" or "16%"?'),
        (1, 'the budget 1 is 1 byte: did you mean "1GiB" or "1%"?'),
        ("512", 'the budget 512 is 512 bytes: did you mean "512MiB"?'),
        (0.6, 'the budget 0.6 is less than a byte: write "60%"'),
        ("0.6", 'the budget 0.6 is less than a byte: write "60%"'),
        ("0.0001KiB", "the budget 0.0001KiB is less than a byte: give a budget such as 16GiB"),
        (float("nan"), "the budget nan is not positive"),
        (2**63, "the budget 9223372036854775808 is beyond all memory"),
        ("9" * 400, "the budget 9999999999999999999...999999999999999999 is beyond all memory"),
        (None, "the budget is of type NoneType, not a number or a text"),
        (["16GiB"], "the budget is of type list, not a number or a text"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_guess(written: object, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_budget(written, 10**12)
    assert str(caught.value).startswith(told)


def test_a_share_is_only_proposed_where_it_can_be_given() -> None:
    with pytest.raises(UsageError, match=r'did you mean "16GiB"\?$'):
        parse_budget(16, None, name="memory limit")
    with pytest.raises(UsageError, match='did you mean "16GiB" or "16%"'):
        budget_of(16)
    with pytest.raises(UsageError, match='write "60%"'):
        budget_of(0.6)


def test_a_step_of_a_few_bytes_may_have_a_budget_of_fewer() -> None:
    """What `InfeasibleBudget` names as the smallest budget is one that is taken, however small the step."""
    assert parse_budget(500, 700) == 500
    profile = blocks(3)
    smallest = pooch.smallest_budget(profile)
    assert pooch.plan(profile, smallest).predicted_peak_bytes <= smallest


@pytest.mark.parametrize("budget", [16, 0.6])
def test_python_refuses_them_wherever_a_budget_is_given(budget: float) -> None:
    profile = blocks(3)
    with pytest.raises(UsageError, match=r"write|did you mean"):
        pooch.plan(profile, budget)
    with pytest.raises(UsageError, match=r"write|did you mean"):
        pooch.plan_from_decisions(profile, {}, budget)
    with pytest.raises(UsageError, match=r"less than a byte|did you mean"):
        pooch.max_batch("lstm@small", budget)


def test_a_budget_is_looked_at_before_a_step_is_measured() -> None:
    check_budget("min")
    check_budget("60%")
    with pytest.raises(UsageError, match="did you mean"):
        check_budget("16")
