"""What outlives steps, on a modelled device: random steps, faults, the order of leaving, changes to be noticed."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pooch.machine.eviction import online_score
from pooch.machine.persistent import Uses
from tests.machine.mutations import PERSISTENT, Mutation, broken_by
from tests.machine.persistent_programs import KINDS, Broken, Faults, World, look_at_order, run, stepped

# More, or others: POOCH_RANDOM_STEPS=50000 POOCH_RANDOM_SEED=7.
STEPS = int(os.environ.get("POOCH_RANDOM_STEPS", "300"))  # of each kind
SEED = int(os.environ.get("POOCH_RANDOM_SEED", "1"))
STEPS_OF_A_PROGRAM = 30
NEEDED = 40  # programs of each kind in which each mutation is noticed
SIZE = 128
STATES = {f"used {state}" for state in ("here", "clean", "leaving", "returning", "away")}


@pytest.mark.parametrize("faults", KINDS, ids=str)
def test_every_op_finds_what_plain_training_has_within_the_budget(faults: Faults) -> None:
    seen = sum(
        (run(SEED + n, STEPS_OF_A_PROGRAM, faults) for n in range(STEPS // STEPS_OF_A_PROGRAM)), start=run(0, 1, faults)
    )
    assert seen.keys() >= STATES | {"read ahead", "written ahead", "handed out", "undone"}, seen
    assert bool(seen["over"]) == faults.tier_is_sound
    assert bool(seen["KeyboardInterrupt"]) == (faults.interrupted > 0)
    assert bool(seen["OutOfMemory"]) == (faults.out_of_memory > 0)


def test_the_same_seed_gives_the_same_steps() -> None:
    assert run(3, 20, KINDS[-1]) == run(3, 20, KINDS[-1])
    assert run(3, 20, KINDS[-1]) != run(4, 20, KINDS[-1])


def test_a_failure_names_what_runs_it_again() -> None:
    mutation = next(each for each in PERSISTENT if each.name == "what was written to counts as copied")
    with broken_by(mutation, "persistent_programs") as programs:
        with pytest.raises(AssertionError) as found:
            programs.run(SEED, STEPS_OF_A_PROGRAM, programs.KINDS[0])
        text = str(found.value).partition(": ")[0]
        assert text.startswith("persistent_programs.run(")
        with pytest.raises(AssertionError) as again:
            eval(text.partition("persistent_programs.")[2], {"run": programs.run, "Faults": programs.Faults})
    assert str(again.value) == str(found.value)
    assert type(found.value).__name__ == Broken.__name__


@pytest.mark.parametrize("mutation", PERSISTENT, ids=lambda mutation: mutation.name)
def test_a_mutation_is_noticed(mutation: Mutation) -> None:
    with broken_by(mutation, "persistent_programs") as programs:
        for seed in range(SEED, SEED + NEEDED):
            try:
                programs.look_at_random_order(seed)
            except Exception:  # noqa: BLE001
                return
            for faults in programs.KINDS:
                try:
                    programs.run(seed, STEPS_OF_A_PROGRAM, faults)
                except Exception:  # noqa: BLE001  (whatever notices it)
                    return
    pytest.fail(f"{NEEDED * STEPS_OF_A_PROGRAM} steps of each kind pass although {mutation.name}")


# The order in which values leave --------------------------------------------------------------------------------------

ORDERS = st.lists(st.integers(0, 6), min_size=2, max_size=14)


@given(ORDERS, st.integers(0, 40), st.integers(0, 7))
def test_the_next_use_is_as_far_as_it_is_in_a_step_that_repeats(order: list[int], now: int, number: int) -> None:
    uses = Uses(order)
    ahead = [order[(now + after) % len(order)] for after in range(2 * len(order))]
    assert uses.distance(number, now) == (ahead.index(number) if number in order else 2 * len(order))
    following = list(uses.following(now, 5))
    assert [each for each, _ in following] == ahead[: min(5, len(order))]
    assert [is_in_next_step for _, is_in_next_step in following] == [
        now + n >= len(order) for n in range(len(following))
    ]


def test_without_a_step_before_nothing_is_known() -> None:
    assert not Uses().are_known
    assert Uses([1]).are_known
    assert list(Uses().following(0, 9)) == []


@settings(max_examples=60, deadline=None)
@given(ORDERS, st.integers(1, 6))
def test_at_equal_prices_what_is_used_last_from_now_on_leaves_first(order: list[int], most: int) -> None:
    look_at_order(order, most)


def test_in_the_first_step_what_was_used_first_leaves_first_whatever_was_used_before() -> None:
    """There may have been another memory in the process."""
    world = World(0, Faults(), sizes_bytes=[SIZE] * 5, has_temporaries=False)
    world.log._taken = 10_000
    world.pressure.relieve()
    for number in (2, 0, 4, 1, 3):
        with world.use([world.parameters[number]]):
            pass
    for left in (2, 0, 4):
        world.pressure.set_budget(world.memory.live_bytes)
        world.memory.ask_for(SIZE)
        assert not world.parameters[left].is_here
    assert [home.is_here for home in world.parameters] == [False, True, False, True, False]


def test_what_is_clean_leaves_before_what_has_to_be_copied() -> None:
    world = World(0, Faults(), sizes_bytes=[SIZE] * 4, has_temporaries=False)
    world.pressure.relieve()
    for number in range(4):
        with world.use([], [world.parameters[number]] if number < 3 else ()):
            pass
    with world.use([world.parameters[3]]):
        pass
    out_bytes = world.values.moved.out_bytes.total()
    world.pressure.set_budget(world.memory.live_bytes)
    world.memory.ask_for(SIZE)
    assert [home.is_here for home in world.parameters] == [True, True, True, False]
    assert world.values.moved.out_bytes.total() == out_bytes


def test_what_outlives_steps_and_what_autograd_has_saved_leave_in_one_order() -> None:
    world = World(0, Faults(), sizes_bytes=[SIZE, 2 * SIZE, 4 * SIZE], has_temporaries=False)
    stepped(world, [2, 0, 1])
    world._forget_gone()
    for _ in range(6):
        world._save()
    pressure = world.pressure
    found = list(pressure._next_to_leave())
    saved = {each.value for each in world.saved}
    scores = [
        pressure._score(value)
        if value in saved
        else online_score(pressure._costs.cheapest_ms(value), value.size_bytes, world.values._distance(value, 0))
        for value in found
    ]
    assert scores == sorted(scores)
    assert len(found) == 6 + 3 + 2
    assert [value in saved for value in found] not in ([True] * 6 + [False] * 5, [False] * 5 + [True] * 6)


def a_long_step() -> World:
    """64 values that are all there, in the step after one that used them one after the other."""
    world = World(0, Faults(), sizes_bytes=[SIZE] * 64, has_temporaries=False, reads_ahead=False)
    world.pressure.relieve()  # so that the tier has a copy of each
    stepped(world, range(64))
    world._forget_gone()
    return world


def test_the_order_of_a_moment_ago_serves_again_without_a_look_at_all_values() -> None:
    world, orders = a_long_step(), list[int]()
    order_now = world.values._in_order_now
    world.values._in_order_now = lambda cost_ms: (orders.append(1), order_now(cost_ms))[1]  # type: ignore[method-assign]
    for turn in range(24):
        world.pressure.set_budget(world.memory.live_bytes)
        world.memory.ask_for(SIZE)
        with world.use([world.parameters[turn % 2]]):
            pass
    assert sum(home.is_here for home in world.parameters) < 64 - 12
    assert len(orders) == 24 // (64 // 16)


@pytest.mark.parametrize("uses", [1, 60])
def test_what_has_arrived_since_the_order_was_made_leaves_as_well_and_nothing_twice(uses: int) -> None:
    """Whether that order still serves or is too old."""
    world = a_long_step()

    def used(numbers: list[int]) -> None:
        for number in numbers:
            with world.use([world.parameters[number]]):
                pass

    world.pressure.set_budget(world.memory.live_bytes)
    world.memory.ask_for(8 * SIZE)
    away = [number for number, home in enumerate(world.parameters) if not home.is_here]
    world.pressure.set_budget(world.memory.live_bytes)
    used([0, 1] * 8)
    world.memory.ask_for(SIZE)  # in an order anew
    world.pressure.set_budget(world.memory.live_bytes + 9 * SIZE)
    used([away[0], *[0, 1] * (uses // 2)])
    assert world.parameters[away[0]].is_here
    found = [value.number for _, value in world.values._in_order(world.pressure._costs.cheapest_ms)]
    assert sorted(found) == [number for number, home in enumerate(world.parameters) if home.is_here]


def test_what_is_used_next_is_told_if_it_is_away_the_nearest_first() -> None:
    world = World(0, Faults(), sizes_bytes=[SIZE] * 5, has_temporaries=False)
    stepped(world, [3, 1, 4, 0, 2])
    world.pressure.relieve()
    world._forget_gone()
    for number in (3, 4):
        world.bring_back([])
        with world.use([world.parameters[number]]):
            pass
    world.pressure.relieve()
    assert [value.number for value in world.values.used_next(4)] == [4, 0, 2, 3]
    with world.use([world.parameters[0]]):
        pass


# One value at a time --------------------------------------------------------------------------------------------------


def test_a_copy_that_failed_is_tried_again_in_the_next_step() -> None:
    world = World(0, Faults(copy_fails=1.0), sizes_bytes=[SIZE])
    home = world.parameters[0]
    world.pressure.relieve()
    assert home.is_here
    world.chance.is_calm = True
    world.pressure.relieve()
    assert home.is_here  # each try takes time
    world._forget_gone()
    world.pressure.relieve()
    assert not home.is_here


def test_what_was_written_to_while_it_was_copied_is_copied_again_and_leaves() -> None:
    world = World(0, Faults(), sizes_bytes=[SIZE], has_temporaries=False)
    home = world.parameters[0]
    value = world.value_of(home)
    assert value.place is not None
    world.pressure.store.start_out(value, value.place, world.counters)
    with world.use([], [home]):
        pass
    assert world.pressure.relieve() > 0
    assert not home.is_here
    with world.use([home]):  # looks at its contents
        pass


def test_what_the_program_releases_while_it_is_copied_is_free_then() -> None:
    world = World(0, Faults(), sizes_bytes=[SIZE] * 2, has_temporaries=False)
    world.backward()
    gradient = world.gradients[0]
    assert gradient is not None
    value = world.value_of(gradient)
    assert value.place is not None
    world.pressure.store.start_out(value, value.place, world.counters)
    world.gradients[0] = None
    gradient.release()
    before_bytes = world.memory.live_bytes
    assert world.pressure._evict(value) == SIZE == before_bytes - world.memory.live_bytes
    assert gradient.is_gone
    world.pressure.relieve()
    assert list(world.values.used_next(9)) == []
