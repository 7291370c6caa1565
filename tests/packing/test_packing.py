"""Every policy's layout holds and is not below the bound; the search repeats itself."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.packing_instances import cut_rectangle, even_blocks, random_blocks, training_step
from pooch.errors import InvalidLayout, UsageError
from pooch.ground.native import BuildError, built_library
from pooch.packing import POLICIES, Block, Layout, bound_of, pack, policies, verify
from pooch.packing.fallback import best_of_rules, skyline
from pooch.packing.first_fit import TooLate, first_fit
from pooch.packing.instance import arena_of, instance_of
from pooch.packing.kernels import RANKINGS, SOURCE, Kernels, kernels
from tests.packing.strategies import any_blocks

SHORT_S = 1e-4  # of CPU: the eight orders end first, or nearly
ROOMY_S = 1e6  # never used up: rounds or the bound end the search


@pytest.fixture(scope="module")
def compiled() -> Kernels:
    found = kernels()
    if found is None:
        pytest.skip("there is no C++ compiler")
    return found


def overlapping(blocks: list[Block], layout: Layout) -> list[tuple[int, int]]:
    """Pairs that overlap in time and place: by comparing all pairs, as the verifier does not."""

    def meet(i: int, j: int) -> bool:
        a, b, low, high = blocks[i], blocks[j], layout.offsets[i], layout.offsets[j]
        in_time = a.lower < b.upper and b.lower < a.upper
        return in_time and low < high + b.size_bytes and high < low + a.size_bytes and bool(a.size_bytes * b.size_bytes)

    return [(i, j) for i, j in combinations(range(len(blocks)), 2) if meet(i, j)]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(blocks=any_blocks)
def test_every_layout_holds(policy: str, blocks: list[Block]) -> None:
    layout = pack(blocks, policy=policy, max_rounds=2, time_limit_s=ROOMY_S)
    verify(blocks, layout)
    assert overlapping(blocks, layout) == []
    assert layout.arena_bytes >= layout.bound_bytes == bound_of(blocks)


@settings(max_examples=60, deadline=None)
@given(blocks=any_blocks, offsets=st.lists(st.integers(0, 60), min_size=24, max_size=24))
def test_the_verifier_agrees_with_comparing_all_pairs(blocks: list[Block], offsets: list[int]) -> None:
    blocks = [replace(block, alignment_bytes=1) for block in blocks]
    used = tuple(offsets[: len(blocks)])
    arena = max((offset + block.size_bytes for offset, block in zip(used, blocks, strict=True)), default=0)
    layout = Layout(used, arena, bound_of(blocks), "drawn")
    if overlapping(blocks, layout):
        with pytest.raises(InvalidLayout, match="overlap at time"):
            verify(blocks, layout)
    else:
        verify(blocks, layout)


def test_the_verifier_names_a_planted_overlap() -> None:
    blocks = [replace(block, name=f"b{k}") for k, block in enumerate(training_step(10))]
    layout = pack(blocks, time_limit_s=SHORT_S)
    verify(blocks, layout)
    first, second = next(
        (i, j) for i, j in combinations(range(len(blocks)), 2)
        if blocks[i].lower < blocks[j].upper and blocks[j].lower < blocks[i].upper
    )  # fmt: skip
    offsets = list(layout.offsets)
    offsets[second] = offsets[first]
    arena = max(offset + block.size_bytes for offset, block in zip(offsets, blocks, strict=True))
    with pytest.raises(InvalidLayout, match="overlap at time") as raised:
        verify(blocks, replace(layout, offsets=tuple(offsets), arena_bytes=arena))
    assert f"b{first} " in str(raised.value) or f"b{second} " in str(raised.value)


def test_the_verifier_checks_more_than_overlaps() -> None:
    blocks = [Block(0, 2, 8, 4), Block(1, 3, 8, 4)]
    good = Layout((0, 8), 16, 16, "by hand")
    verify(blocks, good)
    for changed, message in (
        ({"offsets": (0, 9), "arena_bytes": 17}, "not aligned"),
        ({"offsets": (-4, 8)}, "not aligned"),
        ({"arena_bytes": 20}, "arena at 20"),
        ({"bound_bytes": 12}, "not 12"),
        ({"offsets": (0,)}, "1 offsets"),
    ):
        with pytest.raises(InvalidLayout, match=message):
            verify(blocks, replace(good, **changed))


def test_lifetimes_are_half_open() -> None:
    blocks = [Block(0, 5, 7), Block(5, 9, 7)]
    layout = pack(blocks)
    assert layout.offsets == (0, 0)
    assert layout.arena_bytes == layout.bound_bytes == 7


def test_sekiyama_is_as_published() -> None:
    """The longest lifetime first, in the lowest segment; one that nothing fits is lifted to its lower neighbour."""
    blocks = [Block(0, 4, 2), Block(3, 6, 5), Block(4, 8, 4), Block(0, 3, 1), Block(6, 8, 3)]
    # [0, 4) at 0, then [4, 8) at 0; the lowest segment is now [0, 4) at 2 and takes [0, 3); [3, 4) at 2 is lifted to 3,
    # then with [0, 3) to 4, where all is level: [3, 6) lies at 4, and [6, 8) beside it.
    assert pack(blocks, policy="sekiyama").offsets == (0, 4, 0, 2, 4)


def test_first_fit_fills_the_lowest_gap() -> None:
    blocks = [Block(0, 9, 10), Block(0, 3, 8), Block(0, 9, 6), Block(5, 9, 5), Block(4, 9, 3)]
    assert pack(blocks, policy="greedy_by_size").offsets == (0, 10, 18, 10, 15)


def test_ours_is_at_least_as_good_as_sekiyama_and_reaches_the_bound_of_a_step() -> None:
    for seed in range(5):
        blocks = random_blocks(80, seed=seed)
        ours = pack(blocks, max_rounds=2, time_limit_s=ROOMY_S)
        assert ours.arena_bytes <= pack(blocks, policy="sekiyama").arena_bytes
    step = training_step(60)
    assert pack(step, max_rounds=20, time_limit_s=ROOMY_S).ratio == 1.0


@pytest.mark.usefixtures("compiled")
def test_the_search_improves_on_its_first_layout() -> None:
    blocks = random_blocks(150, seed=3)
    first, later = (pack(blocks, max_rounds=rounds, time_limit_s=ROOMY_S) for rounds in (0, 30))
    assert first.rounds == 0
    assert later.arena_bytes < first.arena_bytes
    verify(blocks, later)


@pytest.mark.usefixtures("compiled")
def test_the_same_seed_gives_the_same_layout() -> None:
    blocks = random_blocks(150, seed=4)
    layouts = [pack(blocks, max_rounds=4, seed=seed, time_limit_s=ROOMY_S) for seed in (1, 1, 2)]
    assert layouts[0] == layouts[1]
    assert layouts[0].offsets != layouts[2].offsets


def test_a_search_stops_with_its_time_limit() -> None:
    blocks = random_blocks(400, seed=1)
    layout = pack(blocks, time_limit_s=SHORT_S)
    verify(blocks, layout)
    assert layout.rounds <= 1


class Clock:
    """CPU time that passes with each look at it."""

    def __init__(self, per_look_s: float) -> None:
        self.now_s, self._per_look_s = 0.0, per_look_s

    def __call__(self) -> float:
        self.now_s += self._per_look_s
        return self.now_s


def test_first_fit_of_many_blocks_ends_with_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = instance_of(random_blocks(4500, seed=1))
    order = np.arange(4500)
    for limit_s, most_looks in (
        (5.0, 12),
        (60.0, 60),
    ):  # far too little is seen after an eighth, a little too little later
        clock = Clock(1.0)
        monkeypatch.setattr("pooch.packing.first_fit.time.thread_time", clock)
        with pytest.raises(TooLate):
            first_fit(instance, order, limit_s)
        assert clock.now_s <= most_looks + 3
    monkeypatch.setattr("pooch.packing.first_fit.time.thread_time", Clock(0.0))
    first_fit(instance, order, 1.0)


def test_bad_blocks_are_told_in_one_line() -> None:
    for block, message in (
        (Block(3, 3, 1, name="x"), "block x lives from 3 to 3"),
        (Block(0, 1, -1), "negative size"),
        (Block(0, 1, 1, 0), "alignment of 0"),
        (Block(0, 1, 2**61), "2\\*\\*60"),
        (Block(0, 2**63, 1), "time beyond"),
    ):
        with pytest.raises(UsageError, match=message):
            pack([block])
    with pytest.raises(UsageError, match="unknown packing policy 'best': choose from ours"):
        pack([], policy="best")
    with pytest.raises(UsageError, match="more than 0 seconds"):
        pack([], time_limit_s=0)


def test_no_blocks_and_no_bytes_make_an_empty_arena() -> None:
    for blocks in ([], [Block(0, 3, 0), Block(1, 2, 0, 8)]):
        for policy in POLICIES:
            layout = pack(blocks, policy=policy)
            verify(blocks, layout)
            assert (layout.arena_bytes, layout.ratio) == (0, 1.0)


def packed_without_compiler(blocks: list[Block], policy: str, time_limit_s: float = ROOMY_S) -> Layout:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "kernels", lambda: None)
        return pack(blocks, policy=policy, time_limit_s=time_limit_s)


@settings(max_examples=60, deadline=None)
@given(blocks=any_blocks)
def test_without_a_compiler_every_layout_holds_and_ours_is_the_lowest(blocks: list[Block]) -> None:
    layouts = {policy: packed_without_compiler(blocks, policy) for policy in POLICIES}
    for policy, layout in layouts.items():
        verify(blocks, layout)
        assert overlapping(blocks, layout) == []
        assert layout.arena_bytes >= layout.bound_bytes == bound_of(blocks)
        assert (layout.policy, layout.rounds, layout.is_native) == (policy, 0, False)
        assert layout == packed_without_compiler(blocks, policy), "the same each time"
    instance = instance_of(blocks)
    arenas = {
        policy: arena_of(instance, np.array(layout.offsets, dtype=np.int64)[instance.places])
        for policy, layout in layouts.items()
    }
    assert arenas["ours"] == min(arenas.values())
    assert layouts["ours"].is_proven == (arenas["ours"] == instance.bound_bytes)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("policy", ["sekiyama", "greedy_by_size"])
@pytest.mark.parametrize("aligned", [False, True])
def test_rules_give_the_same_layout_without_a_compiler(policy: str, aligned: bool) -> None:
    for seed in range(8):
        blocks = random_blocks(60, seed=seed, times=25, aligned=aligned)
        with_compiler = pack(blocks, policy=policy)
        assert with_compiler.is_native
        assert replace(with_compiler, is_native=False) == packed_without_compiler(blocks, policy)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("seed", range(4))
def test_without_a_compiler_ours_is_at_most_the_best_of_the_first_layouts(seed: int) -> None:
    blocks = random_blocks(150, seed=seed)
    first = pack(blocks, max_rounds=0)
    ours = packed_without_compiler(blocks, "ours")
    assert ours.arena_bytes == min(first.arena_bytes, pack(blocks, policy="greedy_by_size").arena_bytes)


def test_without_a_compiler_the_time_limit_leaves_at_least_one_skyline() -> None:
    blocks = random_blocks(400, seed=1)
    one, all_rules = (packed_without_compiler(blocks, "ours", limit_s) for limit_s in (1e-6, ROOMY_S))
    verify(blocks, one)
    assert one.offsets == packed_without_compiler(blocks, "sekiyama").offsets
    assert all_rules.arena_bytes < one.arena_bytes


def test_a_skyline_is_given_up_in_the_middle_once_it_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1.0)
    monkeypatch.setattr("pooch.packing.fallback.time.thread_time", clock)
    instance = instance_of(random_blocks(1200, seed=1))
    orders = policies.starting_orders(instance)
    looks_of_one = 1 + 1200 // 256
    first = skyline(instance, orders[0])
    assert clock.now_s == looks_of_one
    clock.now_s = 0.0
    assert (best_of_rules(instance, orders, looks_of_one + 3.5) == first).all()
    assert clock.now_s == looks_of_one + 6, "the third look within the second skyline is the last"
    with pytest.raises(TooLate):
        skyline(instance, orders[1], 2.5)


def test_without_a_compiler_python_packs(tmp_path: Path) -> None:
    code = (
        "from pooch.packing import Block, pack; import sys; "
        "layout = pack([Block(0, 2, 5), Block(1, 3, 6), Block(2, 4, 5)]); "
        "print(layout.is_native, layout.arena_bytes, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "CXX": "/bin/false", "POOCH_CACHE_DIRECTORY": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["False", "11", "False"]


@pytest.mark.usefixtures("compiled")
def test_a_build_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOCH_CACHE_DIRECTORY", str(tmp_path))
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main( {")
    with pytest.raises(BuildError, match=r"failed: .*error"):
        built_library("broken", broken)
    library = built_library("packing", SOURCE)
    written = library.stat().st_mtime_ns
    assert built_library("packing", SOURCE) == library
    assert library.stat().st_mtime_ns == written, "it was built twice"


@pytest.mark.usefixtures("compiled")
def test_a_library_that_cannot_be_loaded_is_built_again(tmp_path: Path) -> None:
    library = tmp_path / "native" / built_library("packing", SOURCE).name
    library.parent.mkdir(mode=0o700)
    library.write_bytes(b"not a library")
    code = "from pooch.packing import Block, pack; print(pack([Block(0, 2, 5)]).is_native)"
    environment = {**os.environ, "POOCH_CACHE_DIRECTORY": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "True"


def smallest_arena(blocks: list[Block]) -> int:
    """By first fit in every order, of which one gives the smallest arena."""
    return min(_first_fit_arena(order) for order in permutations(blocks))


def _first_fit_arena(order: tuple[Block, ...]) -> int:
    placed: list[tuple[int, Block]] = []
    for block in order:
        beside = [(low, each) for low, each in placed if each.lower < block.upper and block.lower < each.upper]
        starts = sorted(
            -(-end // block.alignment_bytes) * block.alignment_bytes
            for end in (0, *(low + each.size_bytes for low, each in beside))
        )
        fits = (
            start
            for start in starts
            if all(start + block.size_bytes <= low or low + each.size_bytes <= start for low, each in beside)
        )
        placed.append((next(fits), block))
    return max(low + block.size_bytes for low, block in placed)


few_blocks = st.lists(
    st.builds(
        lambda lower, length, size, alignment: Block(lower, lower + length, size, alignment),
        st.integers(0, 5), st.integers(1, 4), st.integers(1, 12), st.sampled_from([1, 1, 1, 2, 3]),
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(blocks=few_blocks)
def test_trying_all_layouts_finds_the_smallest_arena_and_proves_it(compiled: Kernels, blocks: list[Block]) -> None:
    instance = instance_of(blocks)
    padded = [replace(b, size_bytes=size) for b, size in zip(blocks, instance.sizes.tolist(), strict=True)]
    smallest = smallest_arena(padded)
    for ranking in range(RANKINGS):
        found = compiled.exhaust(instance, smallest, 10**6, ranking)
        assert isinstance(found, np.ndarray)
        assert arena_of(instance, found) == smallest
        assert compiled.exhaust(instance, smallest - 1, 10**6, ranking) is False
    assert compiled.exhaust(instance, smallest, 0) is None
    layout = pack(blocks, max_rounds=0, time_limit_s=ROOMY_S)
    assert layout.is_proven
    assert arena_of(instance, np.array(layout.offsets)) == smallest


ABOVE_ITS_BOUND = [  # five bytes at most live at once, and no arena has less than six
    Block(4, 6, 2), Block(2, 4, 3), Block(3, 5, 1), Block(3, 6, 1), Block(0, 3, 2), Block(6, 7, 3), Block(5, 7, 2)
]  # fmt: skip


@pytest.mark.usefixtures("compiled")
def test_an_arena_above_the_bound_can_be_proven_to_be_the_smallest() -> None:
    layout = pack(ABOVE_ITS_BOUND, max_rounds=0, time_limit_s=ROOMY_S)
    assert layout.is_proven
    assert layout.arena_bytes == smallest_arena(ABOVE_ITS_BOUND) > layout.bound_bytes


def repeated(blocks: list[Block], times: int, period: int) -> list[Block]:
    """The blocks again and again, each time once those before have died."""
    shifts = [k * period for k in range(times)]
    return [replace(each, lower=each.lower + shift, upper=each.upper + shift) for shift in shifts for each in blocks]


@pytest.mark.usefixtures("compiled")
def test_the_search_proves_what_too_many_blocks_keep_the_proof_from() -> None:
    blocks = repeated(ABOVE_ITS_BOUND, 10, period=7)
    assert len(blocks) > policies._MOST_PROVEN
    layout = pack(blocks, max_rounds=3, time_limit_s=ROOMY_S)
    assert (layout.arena_bytes, layout.bound_bytes) == (6, 5)
    assert layout.is_proven
    assert not pack(blocks, max_rounds=0, time_limit_s=ROOMY_S).is_proven


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_rectangle_that_was_cut_in_pieces_is_put_together_again(seed: int) -> None:
    blocks = cut_rectangle(80, times=80, size_bytes=64, seed=seed)
    layout = pack(blocks, max_rounds=40, time_limit_s=ROOMY_S)
    verify(blocks, layout)
    assert layout.arena_bytes == layout.bound_bytes == 64


@pytest.mark.usefixtures("compiled")
def test_a_search_ends_at_a_capacity() -> None:
    blocks = even_blocks(200, times=100)
    first = pack(blocks, max_rounds=0, time_limit_s=ROOMY_S)
    assert not first.is_proven
    same = pack(blocks, max_rounds=8, time_limit_s=ROOMY_S, capacity_bytes=first.arena_bytes)
    assert (same.offsets, same.rounds, same.is_proven) == (first.offsets, 0, False)
    smaller = pack(blocks, max_rounds=8, time_limit_s=ROOMY_S, capacity_bytes=first.arena_bytes - 1)
    assert smaller.bound_bytes < smaller.arena_bytes < first.arena_bytes
    verify(blocks, smaller)


@pytest.mark.usefixtures("compiled")
def test_a_capacity_below_the_bound_changes_nothing() -> None:
    blocks = random_blocks(40, seed=3)
    free = pack(blocks, max_rounds=3, time_limit_s=ROOMY_S)
    assert pack(blocks, max_rounds=3, time_limit_s=ROOMY_S, capacity_bytes=1) == free


def test_a_proof_that_was_given_up_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_LOOKS", 10)
    assert not pack(ABOVE_ITS_BOUND, max_rounds=0, time_limit_s=ROOMY_S).is_proven


def test_layouts_of_the_rules_are_proven_only_at_the_bound() -> None:
    for policy in ("sekiyama", "greedy_by_size"):
        layout = pack(ABOVE_ITS_BOUND, policy=policy)
        assert layout.is_proven == (layout.arena_bytes == layout.bound_bytes)


def test_large_blocks_are_searched_first_and_small_ones_fill_the_rest() -> None:
    blocks = [*training_step(40), *(replace(block, size_bytes=1) for block in random_blocks(300, times=120))]
    layout = pack(blocks, max_rounds=3, time_limit_s=ROOMY_S)
    verify(blocks, layout)
    assert layout == pack(blocks, max_rounds=3, time_limit_s=ROOMY_S)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("seed", [1, 2])
def test_weighing_times_halves_what_skylines_leave_of_many_blocks(seed: int) -> None:
    blocks = random_blocks(1500, seed=seed, times=400)
    first, later = (pack(blocks, max_rounds=rounds, time_limit_s=ROOMY_S) for rounds in (0, 1))
    verify(blocks, later)
    assert later.ratio - 1 < 0.65 * (first.ratio - 1)
