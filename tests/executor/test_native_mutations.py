"""The list of mutations of the native watch fits the sources that it is about."""

from __future__ import annotations

import pytest

from pooch.torchtools import watch
from tests.executor.native_mutations import MUTATIONS, Mutation, Outcome, chosen, mutated, row

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutation_changes_one_place_of_its_file(mutation: Mutation) -> None:
    text = next(each for each in (*watch.HEADERS, watch.SOURCE) if each.name == mutation.file).read_text()
    assert mutated(text, mutation) != text


def test_there_are_enough_and_none_has_the_name_of_another() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 20


def test_a_mutation_whose_text_is_gone_is_told() -> None:
    with pytest.raises(ValueError, match="0 times, not once"):
        mutated("nothing of it", MUTATIONS[0])


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(ValueError, match="no mutation 'nonsense'"):
        chosen(["nonsense"])


def test_the_table_says_which_went_unnoticed() -> None:
    assert "| `test_it` | a \\| b |" in row(MUTATIONS[0], Outcome("test_it", "a | b"))
    assert "| &lt;it> |" in row(MUTATIONS[0], Outcome("test_it", "<it object at 0x12ab>"))
    assert "| **nothing** |  |" in row(MUTATIONS[0], Outcome())
