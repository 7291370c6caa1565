"""Steps without a plan: within the budget or said not to be, and nothing read that is not there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from pooch.analysis.dataflow import Dataflow
from pooch.ir import Link, OnlineStep, Op, Profile
from pooch.machine import Value
from pooch.planner import MakeRule
from pooch.published.policies.dtr import DynamicRematerialization
from pooch.published.policies.dtr_rule import Dtr, makings_of
from pooch.simulator import online as online_module
from pooch.simulator import run_online
from pooch.simulator.online import ProfiledStep
from tests.toys import DISK_LINK, FAST_LINK, SLOW_LINK, ToyStep, blocks, chain, ladder, profiles

NO_LINK = Link("nothing is copied", 1e9, 1e9, 1e-9, 1e-9)
RULES: dict[str, MakeRule | None] = {
    "ours": None,
    "dtr": DynamicRematerialization().rule,
    "dtr, eq": DynamicRematerialization("eq").rule,
    "dtr, samples": DynamicRematerialization(samples=1).rule,
}


class Recounting(ProfiledStep):
    """Counts live bytes again from who is where, and looks at who stays while the budget is passed."""

    def run(self) -> OnlineStep:
        take = self.memory.take

        def counted(more_bytes: int) -> None:
            take(more_bytes)
            if more_bytes > 0 and self.memory.budget_bytes is not None:
                self.look_at_who_stays()

        self.memory.take = counted  # type: ignore[method-assign]
        found = super().run()
        del self.memory.take
        assert found.over_bytes <= self.pressure.missing_bytes or self.memory.budget_bytes is None
        assert self.tier.in_use == sum(value.place is not None for value in self.saved.values())
        return found

    def stored_bytes(self) -> int:
        return sum(value.storage._taken_bytes for value in self.saved.values() if value.storage is not None)

    def look_at_who_stays(self) -> None:
        if self.memory.live_bytes <= self._budget_bytes:
            return
        for value in filter(self.pressure._can_leave, self.pressure._values):
            assert not self.can_leave(value), f"value {value.number} stays although the budget is passed"

    def can_leave(self, value: Value) -> bool:
        has_room = self.tier.in_use_bytes + value.size_bytes <= (self.tier._most_bytes or 0)
        may_copy = self.rule.policy.may_copy and (self.tier._most_bytes is None or has_room)
        return value.is_copied or may_copy or self.recipes.replay_ms(value.number) < float("inf")

    def _run_op(self, op: Op) -> None:
        assert self.memory.live_bytes == self._beside_bytes[2 * op.index] + self.stored_bytes()
        for number in dict(self._dataflow.anchors).get(op.index, ()):
            value = self.saved[number]
            assert value.state in ("here", "clean", "leaving"), f"value {number} is read and {value.state}"
        super()._run_op(op)


def recounted(dataflow: Dataflow, budget_bytes: int, rule: str, host_budget_bytes: int | None = None) -> OnlineStep:
    return Recounting(dataflow, budget_bytes, host_budget_bytes, RULES[rule]).run()


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
    assert run.over_bytes == max(0, run.peak_bytes - budget_bytes)
    assert run.step_ms >= in_core_ms - 1e-9
    assert run.lost_ms == pytest.approx(run.step_ms - in_core_ms, abs=1e-9)
    assert run.stall_ms + run.replay_ms <= run.lost_ms + 1e-9
    assert set(run.decisions) == dataflow.activation_ids
    assert run.evictions >= sum(choice != "keep" for choice in run.decisions.values())
    if rule != "ours" or host_bytes == 0:
        assert run.copies_out == run.copies_in == 0
    if share >= 1.0:
        assert (run.evictions, run.over_bytes, run.peak_bytes) == (0, 0, profile.peak_bytes)
        assert run.copies_in == run.replays == 0
        assert run.copies_out or run.lost_ms == pytest.approx(0.0, abs=1e-9)


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


def test_copies_begin_ahead_of_need_and_the_step_waits_for_what_is_left_of_them() -> None:
    # GIVEN copies of 1 ms, as long as a forward op
    profile = copied_chain(12, Link("toy tier", 0.0, 0.0, 8.0, 8.0))
    run = recounted(Dataflow(profile), profile.peak_bytes - 24, "ours")
    assert (run.evictions, run.copies_in, run.copies_out) == (3, 3, 6), "what is copied ahead need not leave"
    assert (run.stall_ms, run.lost_ms) == (1.0, 1.0), "for the first copy out; all others are hidden"
    # WHEN copies in take longer than backward ops THEN they begin as soon as there is room for them
    slow = copied_chain(12, Link("toy tier", 0.0, 0.0, 8.0, 2.0))
    assert recounted(Dataflow(slow), slow.peak_bytes - 24, "ours").lost_ms == 1.0
    # WHEN all of the backward pass is too short for them THEN the step waits for the rest
    slower = copied_chain(12, Link("toy tier", 0.0, 0.0, 8.0, 1.0))
    assert recounted(Dataflow(slower), slower.peak_bytes - 24, "ours").lost_ms == 9.0


def test_a_step_that_cannot_keep_the_budget_says_by_how_many_bytes() -> None:
    profile = copied_chain(4, FAST_LINK)
    least = recounted(Dataflow(profile), profile.peak_bytes - 16, "ours")
    assert least.feasible
    assert recounted(Dataflow(profile), least.peak_bytes - 5, "ours").over_bytes == 5
    assert recounted(Dataflow(profile), profile.peak_bytes - 16, "dtr").over_bytes == 16, "nothing can be dropped"
    assert recounted(Dataflow(profile), profile.peak_bytes - 16, "ours", 8).over_bytes == 8, "room for one in the tier"


@pytest.mark.parametrize(("refusal", "over_bytes", "replays"), [(None, 0, 2), ("it is kept", 60, 0)])
def test_what_is_made_from_what_autograd_lets_go_of_early(refusal: str | None, over_bytes: int, replays: int) -> None:
    # GIVEN `late` made of `early`, which the backward pass reads before it reads `late`, and then lets go of
    step = ToyStep()
    (early,) = step.op([step.external(8)], [8], refusal=refusal)
    (late,) = step.op([early], [64])
    (between,) = step.op([late], [4], saves=[late])
    (other,) = step.op([between], [64], saves=[early])
    step.op([other], [4], saves=[])
    profile = step.build(NO_LINK)
    values = profile.values
    assert values[early].death < values[late].first_unpack
    # THEN `late` is dropped only if `early` can be made again as well, since nothing holds it
    run = recounted(Dataflow(profile), profile.peak_bytes - 60, "dtr")
    assert (run.over_bytes, run.replays) == (over_bytes, replays)
    assert run.decisions[late] == ("keep" if refusal else "recompute")


def test_what_is_on_its_way_leaves_again_once_it_is_there() -> None:
    # GIVEN a copy in that takes two backward ops, the second of which needs the room
    step = ToyStep()
    current = step.external(8)
    for gradient_bytes in (0, 0, 0, 0, 48, 0, 0, 0):
        reads, refusal = [current], "a toy that cannot be replayed"
        (current,) = step.op(reads, [8], saves=reads, refusal=refusal, gradient_bytes=gradient_bytes)
    profile = step.build(Link("toy tier", 0.0, 0.0, 8.0, 2.0))
    run = recounted(Dataflow(profile), profile.peak_bytes - 32, "ours")
    assert run.feasible
    assert run.copies_in > sum(choice == "swap" for choice in run.decisions.values())


def test_dropped_values_that_nobody_reads_again_are_not_made_again() -> None:
    # GIVEN a chain that autograd saves for a node that never runs, and lets go of after the forward pass
    step = ToyStep()
    (first,) = step.op([step.external(8)], [20])
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
    assert [run.decisions[value] for value in (first, second, third)] == ["recompute", "keep", "recompute"]
    assert (run.feasible, run.replays) == (True, 0)


def test_a_replay_in_place_works_on_a_copy() -> None:
    step = ToyStep()
    (wide,) = step.op([step.external(8)], [100])
    (active,) = step.op([wide], [0], overwrites=wide, saves_outputs=[0])
    (small,) = step.op([active], [4])
    (large,) = step.op([small], [100], saves_outputs=[0])
    step.op([large], [4])
    profile = step.build(NO_LINK)
    run = recounted(Dataflow(profile), profile.peak_bytes - 60, "dtr")
    assert run.decisions[active] == "recompute"
    assert run.replays == 2
    assert run.peak_bytes == profile.persistent_bytes + 2 * 100, "`wide`, and a copy to write over"


def test_a_run_that_gets_nowhere_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, rule = chain(64, size_bytes=1, link=NO_LINK), RULES["dtr"]
    budget_bytes = profile.persistent_bytes + 12
    assert run_online(Dataflow(profile), budget_bytes, None, rule).feasible
    monkeypatch.setattr(online_module, "GIVES_UP", 0.1)
    given_up = run_online(Dataflow(profile), budget_bytes, None, rule)
    assert not given_up.feasible
    assert given_up.replays < run_online(Dataflow(profile), budget_bytes - 4, None, rule).replays + 64


class WithoutNeighbourhood(Dtr):
    """DTR's local score."""

    @classmethod
    def of(cls, dataflow: Dataflow, now_ms: Callable[[], float]) -> WithoutNeighbourhood:
        return cls(makings_of(dataflow), now_ms)

    def _neighbourhood_ms(self, value: int) -> float:
        return 0.0


@pytest.mark.parametrize("layers", [64, 144, 400])
def test_a_chain_in_the_root_of_its_memory_runs_about_one_more_op_per_layer(layers: int) -> None:
    # The DTR paper proves O(n) ops for n layers in O(sqrt(n)) bytes; it takes the neighbourhood in the score
    profile = chain(layers, size_bytes=1, link=NO_LINK)
    budget_bytes = profile.persistent_bytes + 2 * int(layers**0.5) + 2
    for rule in ("ours", "dtr", "dtr, eq"):
        run = run_online(Dataflow(profile), budget_bytes, None, RULES[rule])
        assert run.feasible
        assert run.replays <= layers
    local = run_online(Dataflow(profile), budget_bytes, None, WithoutNeighbourhood.of)
    assert local.replays > 0.1 * layers**1.5, "the bound tells rules apart"


def test_the_same_run_twice_is_the_same() -> None:
    dataflow = Dataflow(blocks(6))
    for rule in RULES.values():
        first, second = (run_online(dataflow, int(0.7 * dataflow.profile.peak_bytes), None, rule) for _ in range(2))
        assert first == second
