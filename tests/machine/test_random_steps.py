"""The machine that users run, on a modelled device: random steps, random faults, and changes that must be noticed."""

from __future__ import annotations

import os

import pytest

from tests.machine.mutations import MUTATIONS, PERSISTENT, Mutation, broken_by
from tests.machine.programs import KINDS, Broken, Faults, run

# In all kinds together at least 100,000. More, or others: POOCH_RANDOM_STEPS=50000 POOCH_RANDOM_SEED=7.
STEPS = int(os.environ.get("POOCH_RANDOM_STEPS", 100_000 // len(KINDS) + 1))
SEED = int(os.environ.get("POOCH_RANDOM_SEED", "1"))
PARTS = 4  # so that several processes share the work
NEEDED = 2500  # steps in which each mutation is noticed
STATES = {"here", "clean", "leaving", "returning", "away", "unmade"}


@pytest.mark.parametrize("faults", KINDS, ids=str)
def test_some_random_steps_read_what_plain_training_reads_within_the_budget(faults: Faults) -> None:
    _run_random_steps(SEED, STEPS // 20, faults)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("faults", KINDS, ids=str)
def test_random_steps_read_what_plain_training_reads_within_the_budget(faults: Faults, part: int) -> None:
    _run_random_steps(SEED + part, STEPS // PARTS + 1, faults)


def _run_random_steps(seed: int, steps: int, faults: Faults) -> None:
    seen = run(seed, steps, faults)
    assert seen["steps"] == steps
    assert seen.keys() >= STATES | {"overwritten", "dropped"}, seen
    assert bool(seen["KeyboardInterrupt"]) == (faults.interrupted > 0)
    assert bool(seen["OutOfMemory"]) == (faults.out_of_memory > 0)
    assert seen["ReplayDiffers"] or not faults.replay_differs


def test_the_same_seed_gives_the_same_steps() -> None:
    assert run(3, 50, KINDS[-1]) == run(3, 50, KINDS[-1])
    assert run(3, 50, KINDS[-1]) != run(4, 50, KINDS[-1])


def test_a_failure_names_what_runs_it_again() -> None:
    mutation = next(each for each in MUTATIONS if each.name == "no room is made")
    with broken_by(mutation) as programs, pytest.raises(AssertionError, match=r"run\(1, 1, Faults\(") as found:
        programs.run(1, 100, programs.KINDS[0])
    assert type(found.value).__name__ == Broken.__name__


def test_there_are_many_mutations_and_each_has_a_name_of_its_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 40


@pytest.mark.parametrize("mutation", [*MUTATIONS, *PERSISTENT], ids=lambda mutation: mutation.name)
def test_a_mutation_changes_what_is_there(mutation: Mutation) -> None:
    """Each is made in a sweep alone, which may come long after the code it changes."""
    compile(mutation.text, mutation.module, "exec")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_is_noticed(mutation: Mutation) -> None:
    with broken_by(mutation) as programs:
        for steps in (30, 300, NEEDED):
            for faults in programs.KINDS:
                try:
                    programs.run(SEED, steps, faults)
                except Exception:  # noqa: BLE001  (whatever notices it)
                    return
    pytest.fail(f"{NEEDED} steps of each kind pass although {mutation.name}")
