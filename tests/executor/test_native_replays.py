"""Values that a plan has made again natively: as in Python, which does what is not simple about them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pooch.executor import Run, apply_plan, native_watch
from pooch.executor.plan_guide import PlanGuide
from pooch.executor.verification import PROOFS
from pooch.ground.errors import PlanMismatch, ReplayDiffers
from pooch.ir import Action, Plan, Profile
from pooch.torchtools import watch
from pooch.torchtools.cpu_allocator.counting import CountingAllocator, counting_allocator
from tests.executor.support import all_of, mixed, planned_replays, quick_profile, tight_plan, without_reads

pytestmark = [pytest.mark.cpu]
ROWS, WIDTH = 16, 32
SETTLING_STEPS = PROOFS + 2  # what an op looks like is learnt in the first one, and what replays give is proven
LARGE = 2**19  # elements: a sample of them is not all of them


@pytest.fixture(autouse=True)
def _native() -> None:
    if watch.LIBRARY.get() is None:
        pytest.skip(f"no native watch: {watch.LIBRARY.why_not}")


def _forgotten(shown: Tensor) -> None:
    """Is shown what a net makes, and does not hold it."""


def _nothing() -> None:
    """Is called after the ops of a net, unless the test has something else called."""


class Net(nn.Module):
    """A layer, ops in the middle, and ops that save what those give."""

    outside: Tensor
    after: Callable[[], object]

    def __init__(self, inside: Callable[[Net, Tensor], Tensor], size: int = WIDTH) -> None:
        super().__init__()
        self.first, self.inside = nn.Linear(WIDTH, WIDTH), inside
        self.register_buffer("outside", torch.rand(size) + 1)
        self.changed, self.after = torch.rand(size), _nothing

    def forward(self, rows: Tensor) -> Tensor:
        made = self.inside(self, self.first(rows).tanh()).sin().exp().cos()
        self.after()
        return made.square().mean()


def chained(net: Net, hidden: Tensor) -> Tensor:
    return (hidden * net.outside).sigmoid()


def stacked(net: Net, hidden: Tensor) -> Tensor:
    return torch.stack([hidden.exp(), hidden.sin()]).logsumexp(0)


def written_over(net: Net, hidden: Tensor) -> Tensor:
    """A replay may write into what it has made itself, and into a copy of all else."""
    sine = hidden.sin()
    return (sine + 1).mul_(2).add_(sine).tanh()


def written_over_twice(net: Net, hidden: Tensor) -> Tensor:
    """The contents before the write are read by another replay as well."""
    first = hidden.exp()
    second = first.cos()
    with torch.no_grad():
        third = first.detach().clone().add_(second)
    return third * second.sin()


def normalised(net: Net, hidden: Tensor) -> Tensor:
    return functional.layer_norm(hidden, (WIDTH,), net.outside[:WIDTH])


def several(net: Net, hidden: Tensor) -> Tensor:
    values, places = hidden.sort(-1)
    return values.exp() + places


def viewed(net: Net, hidden: Tensor) -> Tensor:
    return (hidden.t().exp().t()[:, 1:].sin() * 2).sigmoid()


def unsaved(net: Net, hidden: Tensor) -> Tensor:
    """What autograd saves is made from what it does not save."""
    return (-(hidden.sin() * 2 + 1)).exp() * 2


def forked(net: Net, hidden: Tensor) -> Tensor:
    """A value is read by a replay before autograd reads it for the last time."""
    doubled = hidden.sin() * 2
    left = doubled.sin()
    return left + (doubled + 1).cos()


KINDS = (unsaved, forked, chained, stacked, written_over, written_over_twice, normalised, several, viewed)


def trained(model: nn.Module, rows: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(rows)
    loss.backward()
    return [loss.detach().clone(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def plan_of(model: nn.Module, rows: Tensor, decide: Any = None) -> Plan:
    profile = quick_profile(lambda: model(rows), model)
    decisions = all_of(profile, "recompute", "model") if decide is None else decide(profile, "model")
    return tight_plan(profile, decisions, "model")


def swapped(profile: Profile, region: Any) -> Any:
    return all_of(profile, "swap", region)


def replays_of_emptied(plan: Plan) -> list[Action]:
    """The replays that give what is emptied while the program holds it, which is left to Python."""
    emptied = {action.target for action in plan.schedule.actions if action.kind == "empty"}
    return [action for action in plan.schedule.actions if action.kind == "replay" and emptied & set(action.outputs)]


@contextmanager
def settled(model: nn.Module, rows: Tensor, plan: Plan, **options: Any) -> Iterator[Run]:
    """A run whose replays are natively made from here on."""
    with apply_plan(plan, model, **options) as run:
        for _ in range(SETTLING_STEPS):
            trained(model, rows)
        yield run


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net(chained)


@pytest.fixture
def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("decide", [None, mixed], ids=["all of them", "some, and others are copied"])
@pytest.mark.parametrize("kind", KINDS)
def test_replays_have_the_bits_of_the_first_run_without_python(
    kind: Any, decide: Any, rows: Tensor, in_python: Counter[str]
) -> None:
    torch.manual_seed(0)
    model = Net(kind)
    expected, plan = trained(model, rows), plan_of(model, rows, decide)
    with settled(model, rows, plan) as run:
        in_python.clear()
        for _ in range(3):
            assert_alike(trained(model, rows), expected)
            assert run.stats.mismatches == 0
            assert run.stats.recomputed_ops == planned_replays(plan) > 0
    assert in_python["replay"] == 3 * len(replays_of_emptied(plan))
    assert in_python["read"] == 0
    assert not run.verified.differences


def test_what_is_counted_is_what_python_counts(model: Net, rows: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, found = plan_of(model, rows), []
    for moves in (native_watch.native_actions, lambda step: None):
        monkeypatch.setattr(native_watch, "native_actions", moves)
        with settled(model, rows, plan) as run:
            for _ in range(3):
                trained(model, rows)
        found.append((run.verified, run.stats.recomputed_ops))
    assert found[0] == found[1]
    assert found[0][0].sampled >= 3


def test_nothing_is_compared_where_that_is_off(model: Net, rows: Tensor, in_python: Counter[str]) -> None:
    expected, plan = trained(model, rows), plan_of(model, rows)
    with settled(model, rows, plan, verify="off") as run:
        in_python.clear()
        assert_alike(trained(model, rows), expected)
    assert run.verified.sampled == 0
    assert "replay" not in in_python
    assert run.stats.recomputed_ops == planned_replays(plan)


def test_all_is_compared_in_python_where_that_is_asked_for(model: Net, rows: Tensor, in_python: Counter[str]) -> None:
    expected, plan = trained(model, rows), plan_of(model, rows)
    with settled(model, rows, plan, verify="always") as run:
        compared = run.verified.compared
        in_python.clear()
        assert_alike(trained(model, rows), expected)
        assert run.verified.compared > compared
    assert in_python["replay"] > 0


@pytest.mark.parametrize("size", [WIDTH, LARGE], ids=["small", "large"])
def test_what_comes_out_otherwise_is_found_and_copied_from_then_on(size: int, rows: Tensor) -> None:
    """The program writes to a buffer by an address that it has kept, so that nothing tells."""
    torch.manual_seed(0)
    model = Net(lambda net, hidden: (net.outside * hidden[0, 0]).exp(), size)
    plain = Net(model.inside, size)
    plain.load_state_dict(model.state_dict())
    address, other = model.outside.numpy(), plain.outside.numpy()
    plan = plan_of(model, rows)
    with settled(model, rows, plan) as run:

        def write() -> None:
            address[:] = 0.5

        model.after = write
        with pytest.raises(ReplayDiffers, match="gave other bits than the op had"):
            trained(model, rows)
        assert len(run.verified.differences) == 1
        model.after, address[:] = _nothing, 2.0
        other[:] = 2.0
        for _ in range(2):
            assert_alike(trained(model, rows), trained(plain, rows))


def adding(net: Net, hidden: Tensor) -> Tensor:
    """Adds a buffer, and changes a tensor after that: one which nothing has read, until it is told otherwise."""
    added = hidden + net.outside
    with torch.no_grad():
        net.changed.mul_(0.5)
    return added.sigmoid()


def test_a_buffer_that_an_op_has_changed_is_read_as_it_was(rows: Tensor, in_python: Counter[str]) -> None:
    torch.manual_seed(0)
    model, plain = Net(adding), Net(adding)
    plain.load_state_dict(model.state_dict())
    plan = plan_of(model, rows)
    with settled(model, rows, plan) as run:
        model.changed, plain.changed = model.outside, plain.outside
        for _ in range(2):
            in_python.clear()
            assert_alike(trained(model, rows), trained(plain, rows))
            assert run.stats.mismatches == 0
            assert in_python["replay"] == len(replays_of_emptied(plan)) < run.stats.recomputed_ops


def test_a_parameter_that_has_changed_is_refused(model: Net, rows: Tensor) -> None:
    with settled(model, rows, plan_of(model, rows)):
        loss = model(rows)
        with torch.no_grad():
            model.first.weight.mul_(2)
        with pytest.raises(ReplayDiffers, match="modified by an inplace operation"):
            loss.backward()


def test_settings_are_those_of_the_first_run(rows: Tensor, in_python: Counter[str]) -> None:
    """Another precision of products, say."""
    torch.manual_seed(0)
    model = Net(lambda net, hidden: (hidden @ hidden.t()).exp() @ hidden)
    expected, plan = trained(model, rows), plan_of(model, rows)
    before = torch.get_float32_matmul_precision()
    with settled(model, rows, plan) as run:
        try:
            loss = model(rows)
            torch.set_float32_matmul_precision("medium")
            in_python.clear()
            model.zero_grad()
            loss.backward()
        finally:
            torch.set_float32_matmul_precision(before)
        assert in_python["replay"] == run.stats.recomputed_ops > 0
    assert_alike([loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)], expected)


def test_what_the_program_has_the_address_of_is_not_made_again(
    model: Net, rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change, and nothing tells: it leaves by copy in this step, as what is made of it does."""
    addresses: list[int] | None = None

    def looked_at(net: Net, hidden: Tensor) -> Tensor:
        made = hidden * 2
        if addresses is not None:
            addresses.append(made.data_ptr())
        return made.sin().exp()

    model.inside = looked_at
    expected, plan, found = trained(model, rows), plan_of(model, rows), []
    for actions in (native_watch.native_actions, lambda step: None):
        monkeypatch.setattr(native_watch, "native_actions", actions)
        with settled(model, rows, plan) as run:
            replays = run.stats.recomputed_ops
            addresses = []
            assert_alike(trained(model, rows), expected)
            assert len(addresses) == 1
            found.append(run.stats.recomputed_ops)
        addresses = None
    assert found[0] == found[1] < replays


@pytest.mark.parametrize("decide", [None, mixed], ids=["all of them", "some, and others are copied"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_bytes_are_held_as_by_python(
    kind: Any, decide: Any, rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, found = Net(kind), []
    plan = plan_of(model, rows, decide)
    for actions in (native_watch.native_actions, lambda step: None):
        monkeypatch.setattr(native_watch, "native_actions", actions)
        with settled(model, rows, plan):
            found.append(bytes_held(model, rows))
    assert found[0] == found[1]


def bytes_held(model: nn.Module, rows: Tensor) -> list[int]:
    """What a step holds as each node of its backward pass begins."""
    found: list[int] = []
    allocator = counting_allocator()
    assert isinstance(allocator, CountingAllocator)
    gc.collect()
    assert allocator.install("test", reads_peak=False)
    try:
        before = allocator.live_bytes()
        loss = model(rows)
        ahead, nodes = [loss.grad_fn], set[Any]()
        while ahead:
            node = ahead.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                node.register_prehook(lambda _: found.append(allocator.live_bytes() - before))
                ahead += [each for each, _ in node.next_functions]
        parameters = list(model.parameters())
        torch.autograd.grad(loss, parameters)
    finally:
        allocator.remove("test")
    assert len(found) == len(nodes) - len(parameters) > 6  # nothing is accumulated
    assert max(found) > 2 * rows.nbytes
    return found


class Holding(Net):
    """The program holds what ops make, and reads it once more, while the plan has its bytes leave in between."""

    def forward(self, rows: Tensor) -> Tensor:
        hidden, held = self.first(rows).tanh(), []
        for _ in range(4):
            held.append(hidden)
            hidden = self.inside(self, hidden)
        return torch.stack(held).square().mean() + hidden.exp().mean()


@pytest.mark.parametrize("decide", [swapped, mixed], ids=["all of them", "some"])
def test_what_is_emptied_while_the_program_holds_it_is_read_without_python(
    decide: Any, rows: Tensor, in_python: Counter[str]
) -> None:
    torch.manual_seed(0)
    model = Holding(chained)
    expected, plan = trained(model, rows), plan_of(model, rows, decide)
    emptied = {action.target for action in plan.schedule.actions if action.kind == "empty"}
    assert emptied
    with settled(model, rows, plan) as run:
        in_python.clear()
        for _ in range(3):
            assert_alike(trained(model, rows), expected)
            assert run.stats.mismatches == 0 < run.stats.emptied_bytes
    assert in_python["read"] == 0
    assert in_python["replay"] == 3 * len(replays_of_emptied(plan))
    assert not run.verified.differences


class Shown(Net):
    """Shows what its ops in the middle make, which nobody has held while it was profiled."""

    show: Callable[[Tensor], object]

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.inside(self, self.first(rows).tanh())
        self.show(hidden)
        return hidden.sin().exp().cos().square().mean()


def test_what_was_copied_and_the_program_still_holds_is_read_as_it_is_there(
    rows: Tensor, in_python: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Shown(chained)
    monkeypatch.setattr(model, "show", _forgotten, raising=False)

    def changed_after_forward() -> list[Tensor]:
        held: list[Tensor] = []
        monkeypatch.setattr(model, "show", held.append)
        model.zero_grad()
        loss = model(rows)
        held[0].data.mul_(2)  # as autograd does not notice, it reads what is there
        loss.backward()
        monkeypatch.setattr(model, "show", _forgotten)
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    expected, plan = changed_after_forward(), plan_of(model, rows, swapped)
    with settled(model, rows, plan):
        in_python.clear()
        assert_alike(changed_after_forward(), expected)
    assert in_python["read"] == 0


class TwoHeads(nn.Module):
    """Two branches over one trunk, each of which can be run backward alone; replays of both read what no one saves."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.trunk(rows).sin() * 2 + 1
        return (self.left(shared) + shared).tanh().exp().sum(), (self.right(shared) + shared).tanh().cos().sum()


@pytest.mark.parametrize("decide", [None, mixed], ids=["all of them", "some, and others are copied"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_slots_in_another_order_than_planned_find_what_they_read(
    order: tuple[int, int], decide: Any, rows: Tensor
) -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    parameters = list(model.parameters())

    def both() -> Tensor:
        left, right = model(rows)
        return left + right

    def gradients() -> list[Tensor]:
        losses = model(rows)
        found = [torch.autograd.grad(losses[head], parameters, retain_graph=True, allow_unused=True) for head in order]
        return [each for of_head in found for each in of_head if each is not None]

    expected = gradients()
    profile = quick_profile(both, model)
    decisions = all_of(profile, "recompute", "model") if decide is None else decide(profile, "model")
    with apply_plan(tight_plan(profile, decisions, "model"), model, on_mismatch="error") as run:
        for _ in range(SETTLING_STEPS + 2):
            assert_alike(gradients(), expected)
            assert run.stats.recomputed_ops > 0


class WritesIntoEither(nn.Module):
    """Writes into another tensor of the same shape when told to, which is then not saved: the ops stay the same.

    A replay reads that tensor before what is written is made again, and another one after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))
        self.other = False

    def forward(self, rows: Tensor) -> Tensor:
        hidden = (rows @ self.weight).sin()
        spare, value = hidden * 2, hidden.cos()
        read_first, read_last = value * 2, value * 3
        saved = (value.detach() if self.other else value).sin()
        last = read_last.exp()
        written = (value if self.other else spare).mul_(3).sin()
        return sum(each.sum() for each in (saved, last, written, read_first.exp()))  # type: ignore[return-value]


@pytest.mark.parametrize("other", [False, True])
def test_a_replay_writes_into_nothing_that_a_later_one_reads(
    other: bool, rows: Tensor, in_python: Counter[str]
) -> None:
    torch.manual_seed(0)
    model = WritesIntoEither()
    plan = plan_of(model, rows)
    if other:
        plan = without_reads(plan)
    model.other = other
    expected = trained(model, rows)
    with settled(model, rows, plan, on_mismatch="error") as run:
        in_python.clear()
        assert_alike(trained(model, rows), expected)
        assert in_python["replay"] == len(replays_of_emptied(plan)) < run.stats.recomputed_ops
    assert not run.verified.differences


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_can_be_read_twice(kind: Any, rows: Tensor) -> None:
    torch.manual_seed(0)
    model = Net(kind)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(rows), parameters)
    with settled(model, rows, plan_of(model, rows)) as run:
        loss = model(rows)
        for keeps in (True, False):
            found = torch.autograd.grad(loss, parameters, retain_graph=keeps)
            assert_alike(list(found), list(expected))
        assert run.stats.recomputed_ops > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_leaves_its_path_has_the_same_numbers(kind: Any, rows: Tensor) -> None:
    """What was remembered natively of values is compared in Python then."""
    torch.manual_seed(0)
    model = Net(kind)
    plain = Net(kind)
    plain.load_state_dict(model.state_dict())
    plan = plan_of(model, rows)
    with settled(model, rows, plan) as run:
        for net in (model, plain):
            net.inside = lambda net, hidden: kind(net, hidden).neg()
        assert_alike(trained(model, rows), trained(plain, rows))
        assert run.stats.mismatches == 1


def test_an_action_that_cannot_be_run_ends_the_plan_where_a_budget_is_held(
    model: Net, rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, plan = trained(model, rows), plan_of(model, rows)
    real, refused, recomputed = PlanGuide.run, list[Action](), []

    def refusing(guide: PlanGuide, action: Any) -> None:
        if action.kind == "replay" and not refused:
            refused.append(action)
            raise PlanMismatch("not now")
        real(guide, action)

    def reading_otherwise() -> None:
        torch.set_float32_matmul_precision("medium")  # so that replays are left to Python

    model.after = _nothing
    for actions in (native_watch.native_actions, lambda step: None):
        monkeypatch.setattr(native_watch, "native_actions", actions)
        with settled(model, rows, replace(plan, budget_bytes=2**40)) as run:
            model.after = reading_otherwise
            monkeypatch.setattr(PlanGuide, "run", refusing)
            try:
                assert_alike(trained(model, rows), expected)
            finally:
                torch.set_float32_matmul_precision("highest")
                monkeypatch.setattr(PlanGuide, "run", real)
                model.after = _nothing
            assert len(refused) == run.stats.mismatches == 1
            recomputed.append(run.stats.recomputed_ops)
        refused.clear()
    assert recomputed[0] == recomputed[1]


def test_a_sample_tells_one_byte_of_a_small_storage_and_many_of_a_large_one() -> None:
    module: Any = watch.LIBRARY.get()
    for size in (1, 7, 64, 65, 4096, 64 * 2**10, 2**20 + 5):
        tensor = torch.zeros(size, dtype=torch.uint8)
        before = module.sample_checksum(tensor.untyped_storage())
        assert module.sample_checksum(tensor.clone().untyped_storage()) == before
        if size <= 64 * 2**10:
            tensor[-1] = 1
        else:
            tensor[size // 2 :] = torch.randint(0, 256, (size - size // 2,), dtype=torch.uint8)
        assert module.sample_checksum(tensor.untyped_storage()) != before
    with pytest.raises(TypeError, match="that of a storage"):
        module.sample_checksum(3)
