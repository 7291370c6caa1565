"""Steps without a plan: within the budget or said not to be, and nothing read that is not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from pooch.analysis.dataflow import Dataflow
from pooch.analysis.online import Cheapest, Dtr, run_online
from pooch.analysis.online import step as step_module
from pooch.analysis.online.rules import Leaving, Makings, Rule
from pooch.analysis.online.step import OnlineStep, _Walk, makings_of
from pooch.ir import Link, Op, Profile
from tests.toys import DISK_LINK, FAST_LINK, SLOW_LINK, ToyStep, blocks, chain, ladder, profiles

NO_LINK = Link("nothing is copied", 1e9, 1e9, 1.0, 1.0)
RULES: dict[str, Callable[[Makings], Rule]] = {
    "ours": Cheapest,
    "dtr": Dtr,
    "dtr, eq": partial(Dtr, neighbourhood="eq"),
    "dtr, samples": partial(Dtr, samples=True),
}


class Recounting(_Walk):
    """Counts live bytes again from who is where, and looks at what every replay reads."""

    def _over_by(self, more_bytes: int) -> int:
        change_bytes = sum(self._allocated[value] for value in self._temporary)
        for value in self._profile.values:
            is_away = value.id in self._away
            if self._lives(value.id):
                change_bytes -= self._allocated[value.id] * is_away
            elif self._held[value.id] and not is_away and value.producer < self._slot:
                change_bytes += self._allocated[value.id]
        assert change_bytes == self._change_bytes
        dropped = (value for value, choice in self._away.items() if choice == "recompute")
        assert +self._held == Counter(source for value in dropped for source in self._recipes[value].sources)
        return super()._over_by(more_bytes)

    def _make_again(self, value: int) -> None:
        for source in self._recipes[value].sources:
            assert source not in self._away
            assert self._lives(source) or self._held[source] > 0
            assert self._ready_ms.get(source, 0.0) <= self._now_ms, "on its way"
        super()._make_again(value)
        assert not self._temporary

    def _evict(self, leaving: Leaving) -> None:
        assert self._ready_ms.get(leaving.value, 0.0) <= self._now_ms, "on its way"
        super()._evict(leaving)

    def _fetch_ahead(self) -> None:
        fetched, copies_in = len(self._fetched), self._copies_in
        super()._fetch_ahead()
        assert self._copies_in - copies_in == len(self._fetched) - fetched, "fetched ahead twice"

    def _run_op(self, op: Op) -> None:
        unpacked = dict(self._dataflow.anchors).get(self._slot, ())
        assert not {*unpacked, *op.reads} & self._away.keys()
        assert all(self._ready_ms.get(value, 0.0) <= self._now_ms for value in unpacked), "on its way"
        super()._run_op(op)


def recounted(dataflow: Dataflow, budget_bytes: int, rule: str, host_budget_bytes: int | None = None) -> OnlineStep:
    makings = makings_of(dataflow)
    return Recounting(dataflow, budget_bytes, makings, RULES[rule](makings), host_budget_bytes).run()


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    profile=profiles(24), region=st.sampled_from(["step", "model"]), rule=st.sampled_from(sorted(RULES)),
    share=st.floats(0.5, 1.1), host_bytes=st.sampled_from([None, None, 0, 60]),
)  # fmt: skip
def test_the_budget_holds_or_the_run_says_by_how_much_it_does_not(profile, region, rule, share, host_bytes) -> None:
    dataflow = Dataflow(profile, region)
    budget_bytes = int(share * profile.peak_bytes)
    run = recounted(dataflow, budget_bytes, rule, host_bytes)
    event(f"{rule}: feasible {run.feasible}, evicts {run.evictions > 0}")
    in_core_ms = sum(dataflow.op_times_ms)
    assert run.peak_bytes <= budget_bytes + run.over_bytes
    assert run.over_bytes == 0 or run.peak_bytes == budget_bytes + run.over_bytes
    assert run.step_ms >= in_core_ms - 1e-9
    assert run.lost_ms == pytest.approx(run.step_ms - in_core_ms, abs=1e-9)
    assert run.stall_ms + run.replay_ms <= run.lost_ms + 1e-9
    assert set(run.decisions) == dataflow.activation_ids
    assert (run.evictions == 0) == (set(run.decisions.values()) <= {"keep"})
    if rule != "ours" or host_bytes == 0:
        assert run.copies_out == run.copies_in == 0
    if share >= 1.0:
        assert (run.evictions, run.over_bytes, run.peak_bytes) == (0, 0, profile.peak_bytes)
        assert run.lost_ms == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("profile", "rule", "share"),
    [
        *((chain(12), rule, share) for rule in ("ours", "dtr", "dtr, eq") for share in (0.8, 0.6, 0.4)),
        *((ladder(5, link=SLOW_LINK), rule, 0.8) for rule in RULES),
        *((blocks(4, link=link), "ours", share) for link in (FAST_LINK, DISK_LINK) for share in (0.8, 0.6)),
    ],
)
def test_known_shapes_fit(profile: Profile, rule: str, share: float) -> None:
    run = recounted(Dataflow(profile), int(share * profile.peak_bytes), rule)
    assert run.feasible
    assert run.evictions > 0
    assert run.lost_ms > 0


def test_one_value_too_many_costs_one_replay() -> None:
    profile = chain(6, link=NO_LINK)
    for rule in RULES:
        run = recounted(Dataflow(profile), profile.peak_bytes - 8, rule)
        assert (run.evictions, run.replays, run.lost_ms, run.feasible) == (1, 1, 1.0, True)


def copied_chain(layers: int, link: Link) -> Profile:
    """Nothing can be made again; values of 8 bytes, ops of 1 ms, backward ops of 2 ms."""
    step = ToyStep()
    current = step.external(8)
    for _ in range(layers):
        (current,) = step.op([current], [8], saves=[current], refusal="a toy that cannot be replayed")
    return step.build(link)


def test_the_step_waits_for_copies_out_and_hides_copies_in_for_which_there_is_room() -> None:
    # GIVEN copies of 1 ms; two values leave, and room for them comes free one op before each is read
    profile = copied_chain(6, Link("toy tier", 0.0, 0.0, 8.0, 8.0))
    run = recounted(Dataflow(profile), profile.peak_bytes - 16, "ours")
    assert (run.copies_out, run.copies_in, run.stall_ms, run.lost_ms) == (2, 2, 2.0, 2.0)
    # WHEN a copy in takes longer than a backward op THEN the step waits for the rest of it
    slow = copied_chain(6, Link("toy tier", 0.0, 0.0, 8.0, 8 / 3))
    assert recounted(Dataflow(slow), slow.peak_bytes - 8, "ours").lost_ms == pytest.approx(1.0)
    assert recounted(Dataflow(slow), slow.peak_bytes - 24, "ours").lost_ms > 3.0


def test_a_step_that_cannot_keep_the_budget_says_by_how_many_bytes() -> None:
    profile = copied_chain(4, FAST_LINK)
    least = recounted(Dataflow(profile), profile.peak_bytes - 16, "ours")
    assert least.feasible
    assert recounted(Dataflow(profile), least.peak_bytes - 5, "ours").over_bytes == 5
    assert recounted(Dataflow(profile), profile.peak_bytes - 16, "dtr").over_bytes == 16, "nothing can be dropped"
    assert recounted(Dataflow(profile), profile.peak_bytes - 16, "ours", 8).over_bytes == 8, "room for one in the tier"


def test_a_source_that_autograd_lets_go_of_early_is_held_for_what_was_dropped() -> None:
    # GIVEN `late` made of `early`, which the backward pass reads before it reads `late`, and then lets go of
    step = ToyStep()
    (early,) = step.op([step.external(8)], [8], refusal="it is kept")
    (late,) = step.op([early], [64])
    (between,) = step.op([late], [4], saves=[late])
    (other,) = step.op([between], [64], saves=[early])
    step.op([other], [4], saves=[])
    profile = step.build(NO_LINK)
    values = profile.values
    assert values[early].death < values[late].first_unpack
    run = recounted(Dataflow(profile), profile.peak_bytes - 60, "dtr")
    assert run.feasible
    assert run.decisions[late] == "recompute"
    assert run.replays == 1


def test_what_is_on_its_way_leaves_again_once_it_is_there() -> None:
    # GIVEN a copy in that takes two backward ops, the second of which needs the room
    step = ToyStep()
    current = step.external(8)
    for gradient_bytes in (0, 0, 16, 0, 0):
        reads, refusal = [current], "a toy that cannot be replayed"
        (current,) = step.op(reads, [8], saves=reads, refusal=refusal, gradient_bytes=gradient_bytes)
    profile = step.build(Link("toy tier", 0.0, 0.0, 8.0, 2.0))
    run = recounted(Dataflow(profile), profile.peak_bytes - 16, "ours")
    assert run.feasible
    assert run.copies_in > run.copies_out


def test_dropped_values_that_nobody_reads_again_hold_nothing() -> None:
    # GIVEN a chain that autograd saves for a node that never runs, and lets go of after the forward pass
    step = ToyStep()
    (first,) = step.op([step.external(8)], [20], refusal="it is kept")
    (second,) = step.op([first], [20])
    (third,) = step.op([second], [20])
    (small,) = step.op([third], [4])
    step.op([small], [4], saves=[first, second, third], backward_ops=0)
    for value in (first, second, third):
        step.hold(value, until=step.values[value].producer + 1)
    (large,) = step.op([small], [40], saves_outputs=[0])
    for _ in range(3):
        (large,) = step.op([large], [40], saves_outputs=[0])
    profile = step.build(NO_LINK)
    run = recounted(Dataflow(profile), profile.peak_bytes - 40, "dtr")
    assert [run.decisions[value] for value in (first, second, third)] == ["keep", "recompute", "recompute"]
    assert run.replays == 0


def test_a_replay_in_place_takes_no_second_storage() -> None:
    step = ToyStep()
    (wide,) = step.op([step.external(8)], [100])
    (active,) = step.op([wide], [0], overwrites=wide, saves_outputs=[0])
    (small,) = step.op([active], [4])
    (large,) = step.op([small], [100], saves_outputs=[0])
    step.op([large], [4])
    profile = step.build(NO_LINK)
    run = recounted(Dataflow(profile), profile.peak_bytes - 60, "dtr")
    assert run.decisions[active] == "recompute"
    assert (run.feasible, run.replays) == (True, 2)


def test_a_run_that_gets_nowhere_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = chain(64, size_bytes=1, link=NO_LINK)
    budget_bytes = profile.persistent_bytes + 12
    assert run_online(Dataflow(profile), budget_bytes, Dtr).feasible
    monkeypatch.setattr(step_module, "GIVES_UP", 0.1)
    given_up = run_online(Dataflow(profile), budget_bytes, Dtr)
    assert not given_up.feasible
    assert given_up.replays < run_online(Dataflow(profile), budget_bytes - 4, Dtr).replays + 64


class WithoutNeighbourhood(Dtr):
    """DTR's local score."""

    def _neighbourhood_ms(self, value: int) -> float:
        return 0.0


@pytest.mark.parametrize("layers", [64, 144, 400])
def test_a_chain_in_the_root_of_its_memory_runs_about_one_more_op_per_layer(layers: int) -> None:
    # The DTR paper proves O(n) ops for n layers in O(sqrt(n)) bytes; it takes the neighbourhood in the score
    profile = chain(layers, size_bytes=1, link=NO_LINK)
    budget_bytes = profile.persistent_bytes + 2 * int(layers**0.5) + 2
    for rule in ("ours", "dtr", "dtr, eq"):
        run = run_online(Dataflow(profile), budget_bytes, RULES[rule])
        assert run.feasible
        assert run.replays <= layers
    local = run_online(Dataflow(profile), budget_bytes, WithoutNeighbourhood)
    assert local.replays > 0.15 * layers**1.5, "the bound tells rules apart"


def test_the_same_run_twice_is_the_same() -> None:
    dataflow = Dataflow(blocks(6))
    for rule in RULES.values():
        first, second = (run_online(dataflow, int(0.7 * dataflow.profile.peak_bytes), rule) for _ in range(2))
        assert first == second
