"""No replay is believed: each difference is noticed, named, survived with a copy, and refused without one."""

from __future__ import annotations

import ctypes
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import pooch
from pooch.executor import native_watch, planned_values, recording, step
from pooch.executor import verification as verification_module
from pooch.executor.engines.cpu import CpuEngine
from pooch.executor.verification import PERIOD, PROOFS, Difference, Verification, new_witness
from pooch.machine import Level
from pooch.torchtools import operators

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("watched_by")]

STEPS = 4
_counter = itertools.count()
_numbers = numpy.random.default_rng(1)
_on: dict[str, bool] = {"sabotage": False}


@torch.library.custom_op("pooch_test::counting", mutates_args=())
def counting(x: torch.Tensor) -> torch.Tensor:
    return x + (next(_counter) if _on["sabotage"] else 0.0)


@torch.library.custom_op("pooch_test::drawing", mutates_args=())
def drawing(x: torch.Tensor) -> torch.Tensor:
    return x * (float(_numbers.random()) if _on["sabotage"] else 1.0)


for each in (counting, drawing):
    each.register_autograd(lambda ctx, grad: grad)


@dataclass
class Forward:
    """What the network does besides its layers."""

    inside: Callable[[torch.Tensor], torch.Tensor] = lambda h: h
    after: Callable[[torch.Tensor], None] = lambda h: None


class Net(nn.Module):
    def __init__(self, doing: Forward) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.doing = doing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(2):
            self.norm.train(number == 1)
            h = self.doing.inside(self.norm(self.first(x)))
            y = functional.gelu(h)
            self.doing.after(h)
            x = torch.tanh(self.second(functional.dropout(y, 0.2)))
        return x.square().mean()


def train(
    doing: Forward, way: str, *, between: Callable[[Net], None] = lambda model: None, **options: Any
) -> tuple[list[torch.Tensor], Any]:
    """Train for a few steps; plainly, or with everything recomputed. Returns losses, gradients and the run."""
    torch.manual_seed(0)
    model, x = Net(doing), torch.randn(96, 64)
    run = None
    if way == "apply":
        profile = pooch.profile(lambda: model(x), model)
        # What cannot be recomputed at all is kept; the sources of the rest are there.
        can = {a.id for a in profile.activations if profile.ops[a.producer].refusal is None}
        plan = pooch.plan_from_decisions(profile, dict.fromkeys(can, "recompute"))
        run = pooch.apply(plan, model, **options)
    torch.manual_seed(1)
    _numbers.bit_generator.state = numpy.random.default_rng(1).bit_generator.state
    found: list[torch.Tensor] = []
    try:
        for _ in range(STEPS):
            loss = model(x)
            between(model)
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
    finally:
        if run is not None:
            run.remove()
    return found, run


# Causes: each tampers with what a replay depends on, or with what it gives --------------------------------------------


def tampered(change: Callable[[list[torch.UntypedStorage]], None]) -> Callable[[pytest.MonkeyPatch], Forward]:
    """What a replay of gelu gives is changed."""

    def install(patch: pytest.MonkeyPatch) -> Forward:
        original = planned_values.replay_call

        def replay(call: Any, resolve: Any) -> list[torch.UntypedStorage]:
            storages = original(call, resolve)
            if "gelu" in str(call.func):
                change(storages)
            return storages

        patch.setattr(planned_values, "replay_call", replay)
        patch.setattr(native_watch, "native_actions", lambda step: None)  # which would replay without that
        return Forward()

    return install


def recorded(change: Callable[[Any], Any], name: str) -> Callable[[pytest.MonkeyPatch], Forward]:
    """What is recorded of an op is changed."""

    def install(patch: pytest.MonkeyPatch) -> Forward:
        original = step.record_call

        def record(func: Any, *args: Any, **kwargs: Any) -> Any:
            call = original(func, *args, **kwargs)
            return change(call) if name in str(func) else call

        patch.setattr(step, "record_call", record)
        return Forward()

    return install


def floats(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0).set_(storage)


def flip_bit(storages: list[torch.UntypedStorage]) -> None:
    storages[0][17] = storages[0][17] ^ 1


def negative_zero(storages: list[torch.UntypedStorage]) -> None:
    view = floats(storages[0])
    view[view.abs().argmin()] *= -1


def permuted(storages: list[torch.UntypedStorage]) -> None:
    view = floats(storages[0])
    view.copy_(view.flip(0))


def other_randomness(call: Any) -> Any:
    state = torch.Generator().manual_seed(77).get_state().numpy().tobytes()
    return replace(call, draws=tuple((device, state) for device, _ in call.draws))


def other_settings(call: Any) -> Any:
    settings = list(call.settings)
    settings[0] = torch.float64  # the default dtype
    return replace(call, settings=tuple(settings), args=(call.args[0], call.args[1] * 0.5, *call.args[2:]))


def other_argument(call: Any) -> Any:
    return replace(call, kwargs={**call.kwargs, "approximate": "tanh"})


def by_numpy(h: torch.Tensor) -> None:
    h.detach().numpy()[:, 0] = 0


def by_address(h: torch.Tensor) -> None:
    ctypes.memset(h.data_ptr(), 0, 16)


def by_dlpack(h: torch.Tensor) -> None:
    torch.from_dlpack(h.detach())[:, 0] = 0


def by_thread(h: torch.Tensor) -> None:
    thread = threading.Thread(target=lambda: h.detach().numpy().fill(0.25))
    thread.start()
    thread.join()


def by_data(h: torch.Tensor) -> None:
    h.data.mul_(0.5)


def doing(**pieces: Any) -> Callable[[pytest.MonkeyPatch], Forward]:
    return lambda patch: Forward(**pieces)


def inside(change: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(h: torch.Tensor) -> torch.Tensor:
        change(h)
        return h

    return changed


def foreign(op: Any) -> Callable[[pytest.MonkeyPatch], Forward]:
    def install(patch: pytest.MonkeyPatch) -> Forward:
        patch.setitem(_on, "sabotage", True)
        return Forward(inside=op)

    return install


def unpreserved(patch: pytest.MonkeyPatch) -> Forward:
    """Running statistics move after an op has read them, and nobody has copied them."""
    patch.setattr(recording, "preserve", lambda readers: None)
    return Forward()


# Those of which even the copy or the value itself is all that is needed do not differ: the cause is mended.
TAMPERED = {
    "a flipped bit": tampered(flip_bit),
    "the sign of zero": tampered(negative_zero),
    "values in another order": tampered(permuted),
    "zeros": tampered(lambda storages: floats(storages[0]).zero_()),
    "a lost end": tampered(lambda storages: floats(storages[0])[-3:].zero_()),
    "not a number": tampered(lambda storages: floats(storages[0])[5:6].fill_(float("nan"))),
    "one unit in the last place": tampered(lambda s: floats(s[0])[7:8].mul_(1 + 2**-23)),
    "another random state": recorded(other_randomness, "bernoulli"),
    "another argument": recorded(other_argument, "gelu"),
    "statistics that moved": unpreserved,
}
MENDED = {
    "numpy, before it is saved": doing(inside=inside(by_numpy)),
    "numpy, after it was saved": doing(after=by_numpy),
    "an address": doing(after=by_address),
    "DLPack": doing(inside=inside(by_dlpack)),
    "another thread": doing(after=by_thread),
    "another thread, before it is saved": doing(inside=inside(by_thread)),
    "a write through .data": doing(after=by_data),
    "a counting operator": foreign(counting),
    "an operator that draws with numpy": foreign(drawing),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def assert_same(plain: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(plain) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize("name", TAMPERED)
def test_a_difference_is_noticed_named_and_survived(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = train(Forward(), "plain")
    what = TAMPERED[name](monkeypatch)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        planned, run = train(what, "apply")
    assert_same(plain, planned)
    assert run.verified.differences
    assert all(each.was_survived for each in run.verified.differences)
    lines = [str(each.message) for each in told if "gave other bits" in str(each.message)]
    assert lines
    assert all("aten." in line and "likely cause" in line and "\n" not in line for line in lines)
    assert run.plan.banned
    assert run.stats.recomputed_ops > 0  # the rest is recomputed as before
    assert f"{len(run.verified.differences)} banned" in str(run.verified)


@pytest.mark.parametrize("name", TAMPERED)
def test_without_a_copy_the_step_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    what = TAMPERED[name](monkeypatch)
    original = CpuEngine.open_arena

    def without_room(engine: CpuEngine, size_bytes: int, purpose: Any = "step") -> Any:
        if purpose == "copies":
            raise pooch.TierError("no room")
        return original(engine, size_bytes, purpose)

    monkeypatch.setattr(CpuEngine, "open_arena", without_room)
    with pytest.raises(pooch.ReplayDiffers, match="there was no copy") as raised:
        train(what, "apply")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", MENDED)
def test_what_would_differ_is_mended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    what = MENDED[name](monkeypatch)
    global _counter
    _counter = itertools.count()
    plain, _ = train(what, "plain")
    _counter = itertools.count()
    planned, run = train(what, "apply")
    if "operator" in name:
        return  # profiling runs it too, and it counts; `test_foreign_operators...` looks at it
    assert_same(plain, planned)
    assert run.stats.recomputed_ops > 0


def test_foreign_operators_are_not_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain, _ = train(Forward(inside=counting), "plain")
    monkeypatch.setitem(_on, "sabotage", False)
    original = counting._init_fn

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return original(x)

    monkeypatch.setattr(counting, "_init_fn", counted)
    model = Net(Forward(inside=counting))
    profile = pooch.profile(lambda: model(torch.randn(96, 64)), model)
    refused = [op for op in profile.ops if "counting" in op.name]
    assert refused
    assert all("allow_replay" in (op.refusal or "") for op in refused)
    assert len(plain) > 0


def test_an_allowed_operator_that_counts_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_REPLAYABLE", {"pooch_test::counting"})
    operators.forget_facts()
    try:
        monkeypatch.setitem(_on, "sabotage", True)
        _, run = train(Forward(inside=counting), "apply")
        assert any("counting" in each.operator for each in run.verified.differences)
        assert any("not PyTorch's own" in each.cause for each in run.verified.differences)
    finally:
        operators.forget_facts()


def test_a_plan_remembers_what_was_banned(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    _, run = train(TAMPERED["a flipped bit"](monkeypatch), "apply")
    run.plan.save(tmp_path / "plan.json")
    loaded = pooch.Plan.load(tmp_path / "plan.json")
    assert loaded.banned == run.plan.banned
    torch.manual_seed(0)
    model, x = Net(Forward()), torch.randn(96, 64)
    with pooch.apply(loaded, model) as again:
        model(x).backward()
    assert not again.verified.differences
    assert again.stats.swapped_in_bytes > 0  # what is banned was copied


@pytest.mark.usefixtures("copied_in_python")
def test_a_copy_that_lies_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay differs, and the copy is not what was written: neither is a right number."""
    what = TAMPERED["zeros"](monkeypatch)
    monkeypatch.setattr(
        "pooch.executor.engines.spill_file.Mover.read",
        lambda self, storage, offset_bytes, buffer: floats(storage).fill_(1.0),
    )
    with pytest.raises(pooch.ReplayDiffers):
        train(what, "apply")


def test_later_differences_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that was proven is compared by samples, and there is no copy of it."""
    state = {"step": 0}

    def late(storages: list[torch.UntypedStorage]) -> None:
        if state["step"] > PROOFS:
            floats(storages[0]).add_(1)

    what = tampered(late)(monkeypatch)
    with pytest.raises(pooch.ReplayDiffers):
        train(what, "apply", between=lambda model: state.update(step=state["step"] + 1))
    assert state["step"] == PROOFS + 1


def test_off_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = train(Forward(), "plain")
    planned, run = train(TAMPERED["zeros"](monkeypatch), "apply", verify="off")
    assert not all(map(torch.equal, plain, planned))  # the tampering is real
    assert run.verified == pooch.Verified()


def test_always_compares_every_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = train(Forward(), "plain")
    planned, run = train(Forward(), "apply", verify="always")
    _, first = train(Forward(), "apply")
    assert_same(plain, planned)
    assert run.verified.sampled == 0
    assert first.verified.sampled > 0
    assert run.verified.compared > first.verified.compared > 0
    assert run.verified.recipes == run.verified.proven
    assert str(run.verified).endswith("all proven")


def test_an_unknown_way_to_verify_is_refused() -> None:
    model = Net(Forward())
    profile = pooch.profile(lambda: model(torch.randn(8, 64)), model)
    with pytest.raises(pooch.UsageError, match="'always', 'first' or 'off'"):
        pooch.apply(pooch.plan(profile, "100%"), model, verify="sometimes")  # type: ignore[arg-type]


# What is looked at, and when ------------------------------------------------------------------------------------------


def levels(verification: Verification, model: nn.Module, key: object, count: int) -> list[Level]:
    found = []
    for _ in range(count):
        verification.begin_step([model])
        found.append(verification.level(key))
        if found[-1] >= Level.WHOLE:
            verification.matched(new_witness(key, found[-1]), 8)
    return found


def test_everything_is_compared_wholly_within_a_hundred_steps() -> None:
    model = nn.Linear(2, 2)
    verification = Verification("first", lambda topic, text: None)
    for key in range(10):
        found = levels(verification, model, key, 100 + PROOFS)
        assert found[:PROOFS] == [Level.COPIED] * PROOFS
        later = found[PROOFS:]
        assert 1 <= sum(level == Level.COPIED for level in later) <= 1 + 100 // PERIOD
        assert set(later) == {Level.SAMPLE, Level.COPIED}


@pytest.mark.parametrize("change", ["a parameter", "a mode", "a setting"])
def test_after_a_change_all_is_compared_again(change: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    verification = Verification("first", lambda topic, text: None)
    levels(verification, model, "recipe", PROOFS)
    assert levels(verification, model, "recipe", 1) == [Level.SAMPLE]
    if change == "a parameter":
        model[0].weight = nn.Parameter(torch.zeros(2, 2))
    elif change == "a mode":
        model.eval()
    else:
        torch.set_flush_denormal(True)
    try:
        assert levels(verification, model, "recipe", 1) == [Level.COPIED]
    finally:
        torch.set_flush_denormal(False)


def test_a_value_that_leaves_many_times_in_a_step_stays_unproven() -> None:
    """Near the smallest budget it leaves before each op. What changes it may come later in the backward pass."""
    verification = Verification("first", lambda topic, text: None)
    verification.begin_step([nn.Linear(2, 2)])
    assert {verification.level("recipe") for _ in range(100)} == {Level.COPIED}
    verification.begin_step([nn.Linear(2, 2)])
    assert verification.level("recipe") == Level.COPIED


@pytest.mark.parametrize("verify", ["first", "always", "off"])
def test_what_is_settled_is_what_is_not_looked_at(verify: Any) -> None:
    """The native watch asks for all copies of a step at once, in place of the level of each."""
    verification, model = Verification(verify, lambda topic, text: None), nn.Linear(2, 2)
    verification.ban([3])
    for number in range(2 * PERIOD):
        verification.begin_step([model])
        for key in range(min(number, 5)):  # one more recipe in each of the first steps
            is_settled = key in verification.settled(range(10))
            level = verification.level(key)
            assert is_settled == (level < Level.COPIED), (number, key)
            if level == Level.COPIED:
                witness = new_witness(key, level)
                (verification.copy_differed if key == 4 else verification.copy_matched)(witness)


def test_what_is_settled_is_not_forgotten_before_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification_module, "_MOST_RECIPES", 10)
    verification, model = Verification("first", lambda topic, text: None), nn.Linear(1, 1)
    levels(verification, model, "settled", PROOFS)
    for number in range(30):
        verification.level(number)
        assert verification.settled(["settled"]) == {"settled"}


def test_contexts_are_bounded() -> None:
    verification = Verification("first", lambda topic, text: None)
    for number in range(100):
        verification.begin_step([nn.Linear(1, 1) for _ in range(number % 7 + 1)])
        verification.level(number)
    assert len(verification._contexts) <= 16


def test_recipes_are_bounded_and_the_least_recent_one_is_unproven_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification_module, "_MOST_RECIPES", 100)
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    verification = Verification("first", lambda topic, text: None)
    levels(verification, other, "of another context", PROOFS)
    levels(verification, model, "often", PROOFS)
    levels(verification, model, "once", PROOFS)
    for number in range(300):
        verification.level(number)
        verification.level("often")
    kept = [list(proofs) for proofs in verification._contexts.values()]
    assert sum(map(len, kept)) == 100
    assert [keys for keys in kept if keys] == [[*range(201, 300), "often"]]
    numbers = [proof.number for proof in verification._proofs.values()]
    assert len(set(numbers)) == 100, "else all of them would be compared wholly in the same step"
    assert levels(verification, model, "often", 1) == [Level.SAMPLE]
    assert levels(verification, model, "once", 1) == [Level.COPIED]


def test_bans_and_differences_are_bounded() -> None:
    verification = Verification("first", lambda topic, text: None)
    verification._banned.most = 100
    for number in range(2000):
        verification.differed(new_witness(number, Level.SAMPLE), Difference("an op", "", "no cause", True))
        verification.level(0)
    assert len(verification._banned) == 100
    assert verification.is_banned(0), "its recipe is met all the time"
    assert verification.is_banned(1999)
    assert not verification.is_banned(1)
    assert len(verification.verified.differences) == 1000


def test_an_address_that_is_taken_after_many_steps_is_noticed_at_once() -> None:
    """The recipes are proven by then, and the value was saved before the program takes its address."""
    step_number = [0]

    def late(h: torch.Tensor) -> None:
        if step_number[0] == PROOFS + 1:
            by_numpy(h)

    def counted(model: Net) -> None:
        step_number[0] += 1

    plain, _ = train(Forward(after=late), "plain", between=counted)
    assert step_number[0] == STEPS > PROOFS + 1
    step_number[0] = 0
    planned, run = train(Forward(after=late), "apply", between=counted)
    assert_same(plain, planned)
    assert not run.verified.differences
    assert run.stats.recomputed_ops > 0
