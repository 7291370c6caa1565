"""The list of mutations of what moves parameters, gradients and states fits the sources that it is about."""

from __future__ import annotations

from pathlib import Path

import pytest

import pooch
from tests.executor.native_mutations import Mutation, mutated
from tests.executor.persistent_mutations import MUTATIONS, copied_package

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutation_changes_one_place_of_its_file(mutation: Mutation) -> None:
    text = (Path(pooch.__file__).parent / mutation.file).read_text()
    assert mutated(text, mutation) != text


def test_there_are_enough_and_none_has_the_name_of_another() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 30


def test_a_mutation_goes_into_a_copy_beside_the_tests() -> None:
    with copied_package(MUTATIONS[0]) as folder:
        assert MUTATIONS[0].new in (folder / "pooch" / MUTATIONS[0].file).read_text()
        assert MUTATIONS[0].old in (Path(pooch.__file__).parent / MUTATIONS[0].file).read_text()
        assert (folder / "tests/executor/test_persistent_memory.py").is_file()
