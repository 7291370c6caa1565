"""The list of mutations fits the sources that it is about."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated_cuda.engine_mutations import MUTATIONS, Mutation
from tests.simulated_cuda.environment import ROOT
from tests.simulated_cuda.mutations import Outcome, chosen, kept_of, mutated, path_of, report

ALL = [each for group in MUTATIONS.values() for each in group]


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)
def test_each_mutation_changes_one_place_of_its_file_and_leaves_it_python(mutation: Mutation) -> None:
    path = path_of(mutation, ROOT)
    text = path.read_text()
    changed = mutated(text, mutation)
    assert changed != text
    compile(changed, str(path), "exec")


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)
def test_tests_are_to_notice_it(mutation: Mutation) -> None:
    assert mutation.tests


def test_the_tests_that_are_to_notice_them_exist() -> None:
    wanted = {test for mutation in ALL for test in mutation.tests}
    files = sorted({test.partition("::")[0] for test in wanted})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", *files]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    found = set(collected.stdout.splitlines())
    found |= {name for each in found for name in (each.partition("::")[0], each.partition("[")[0])}
    assert wanted <= found


def test_names_are_unique() -> None:
    assert len({each.name for each in ALL}) == len(ALL) >= 24


def test_a_mutation_whose_text_is_gone_is_told() -> None:
    with pytest.raises(ValueError, match="0 times, not once"):
        mutated("nothing of it", ALL[0])


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(ValueError, match="no mutation 'nonsense'"):
        chosen(["nonsense"])


def test_the_report_says_which_went_unnoticed() -> None:
    first, second = ALL[:2]
    text = report({"Waits": [(first, Outcome("test_it", "a | b")), (second, Outcome())]})
    assert "**1 of 2 were noticed.**" in text
    assert "| `test_it` | a \\| b |" in text
    assert "| **nothing** |  |" in text


def test_the_table_of_another_command_stays(tmp_path: Path) -> None:
    file = tmp_path / "mutations.md"
    assert kept_of(file) == ""
    file.write_text("# Mutations\n\n| old |\n\n## The native watch\n\n| kept |\n")
    assert kept_of(file) == "\n## The native watch\n\n| kept |\n"
