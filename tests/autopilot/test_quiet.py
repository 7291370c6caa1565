"""Steps that are far away from the budget: nothing is prepared for them, and what changes is seen before it runs."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_torch
from torch.utils.checkpoint import checkpoint

import pooch
from pooch.autopilot import native_quiet
from pooch.autopilot.library import Library
from pooch.autopilot.requests import PlanRequests
from pooch.autopilot.signature import StepKey
from pooch.errors import UsageError
from pooch.torchtools.memory_trace import live_bytes
from pooch.torchtools.watch import LIBRARY
from tests.interrupts import Interrupts

pytestmark = pytest.mark.cpu
FAR = "1GiB"


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[StepKey]:
    """The keys of the steps for which it was chosen how they run. Nothing is planned."""
    monkeypatch.setattr(PlanRequests, "ask", lambda *_: None)
    monkeypatch.setattr(PlanRequests, "warm_up", lambda *_: None)
    keys: list[StepKey] = []
    choose = Library.choose

    def choosing(library: Library, key: StepKey, *args: Any, **kwargs: Any) -> Any:
        keys.append(key)
        return choose(library, key, *args, **kwargs)

    monkeypatch.setattr(Library, "choose", choosing)
    return keys


@pytest.fixture(autouse=True, params=[True, False], ids=["natively", "in Python"])
def natively(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether quiet steps begin and end natively."""
    if not request.param:
        monkeypatch.setattr(native_quiet, "LIBRARY", SimpleNamespace(get=lambda: None))
    elif LIBRARY.get() is None:
        pytest.skip("there is no native part")
    return bool(request.param)


class Net(nn.Module):
    """Linear layers, one of which is not trained."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.fails = False

    def forward(self, hidden: Tensor, doubled: bool = False, power: float = 1.0) -> Tensor:
        hidden = self.frozen(hidden)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        if self.fails:
            raise RuntimeError("in the middle of a step")
        return hidden * 2 if doubled else hidden


def batch(rows: int = 8, width: int = 32) -> Tensor:
    return torch.linspace(-1, 1, rows * width).reshape(rows, width)


def step(model: nn.Module, data: Tensor | None = None, **kwargs: Any) -> Tensor:
    loss: Tensor = model(batch() if data is None else data, **kwargs).square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, steps: int, data: Tensor | None = None) -> list[Tensor]:
    losses = []
    for _ in range(steps):
        losses.append(step(model, data))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return losses


def settle(model: nn.Module, keys: list[StepKey]) -> None:
    """Train until steps are quiet."""
    train(model, 10)
    keys.clear()
    train(model, 2)
    assert keys == []


def test_of_many_steps_few_are_looked_at_and_all_are_counted(chosen: list[StepKey]) -> None:
    plain = train(Net(), 120)
    model = Net()
    with pooch.auto(model, FAR, quiet=True) as auto:
        losses = train(model, 120)
        summary, status = auto.summary(), auto.status()
    assert all(torch.equal(one, other) for one, other in zip(plain, losses, strict=True))
    assert len(chosen) < 10
    assert (summary.steps, summary.steps_online, summary.steps_in_core) == (120, 2, 118)
    assert [shape.steps for shape in summary.shapes] == [120]
    assert (status.mode, status.steps) == ("in-core", 120)
    assert status.peak_mib == round(summary.peak_bytes / 2**20, 2) > 0
    assert summary.between_peak_bytes > 0
    assert summary.steps_ms > 0


def _code_of_ours(run: Callable[[], object]) -> list[str]:
    """The functions of Pooch's in Python that run meanwhile."""
    found: list[str] = []

    def seen(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("pooch"):
            found.append(frame.f_code.co_qualname)

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def test_no_code_of_ours_in_python_runs_in_a_native_step(chosen: list[StepKey], natively: bool) -> None:
    model = Net()
    with pooch.auto(model, FAR, quiet=True) as auto:
        settle(model, chosen)
        steps = auto.status().steps
        assert bool(_code_of_ours(lambda: train(model, 3))) is not natively
        assert auto.status().steps == steps + 3
        assert auto.summary().shapes[0].steps == steps + 3
        larger = torch.zeros(50_000)  # between two steps
        del larger
        train(model, 1)
        assert auto.summary().between_peak_bytes >= 200_000


def test_a_step_of_an_optimizer_between_native_ones_is_noted_if_room_was_missing(
    chosen: list[StepKey], natively: bool
) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget_bytes = live_bytes(torch.device("cpu")) + 10_000_000
    with pooch.auto(model, budget_bytes, optimizer, quiet=True) as auto:
        settle(model, chosen)
        step(model)
        optimizer.step()  # what an earlier test has left in place is looked at once
        assert bool(_code_of_ours(optimizer.step)) is not natively
        assert not auto._persistence._has_missed
        held = torch.zeros(5_000_000)  # nothing can leave for it
        optimizer.step()
        assert auto._persistence._has_missed
        del held


def test_each_kind_of_step_is_known_natively_by_all_that_tells_it(chosen: list[StepKey], natively: bool) -> None:
    model = Net()
    calls: list[tuple[Tensor, dict[str, Any]]] = [
        (batch(8), {}), (batch(9), {}), (batch(8), {"doubled": True}), (batch(8), {"power": 2.0}),
    ]  # fmt: skip

    def each() -> None:
        for data, kwargs in calls:
            step(model, data, **kwargs)
            model.zero_grad()

    with pooch.auto(model, FAR, quiet=True) as auto:
        for _ in range(6):
            each()
        chosen.clear()
        assert bool(_code_of_ours(each)) is not natively
        assert chosen == []
        assert sum(shape.steps for shape in auto.summary().shapes) == auto.summary().steps == 28


def test_a_model_that_is_called_within_a_backward_pass_belongs_to_its_step(chosen: list[StepKey]) -> None:
    def trained(governed: bool) -> list[Tensor]:
        model, losses = Net(), []
        with pooch.auto(model, FAR, quiet=True) if governed else nullcontext() as auto:
            for number in range(12):
                data = batch().requires_grad_()
                hidden = model(data)
                again = checkpoint(model, hidden, use_reentrant=number % 2 == 0)
                loss = again.square().mean()
                loss.backward()
                losses += [loss.detach(), *(each.grad for each in model.layers.parameters())]
                model.zero_grad()
            assert auto is None or auto.summary().steps == 12
        return losses

    assert all(torch.equal(one, other) for one, other in zip(trained(False), trained(True), strict=True))


def test_what_another_thread_does_in_the_middle_of_a_step_finds_it_running(chosen: list[StepKey]) -> None:
    found: list[object] = []

    class Asking(Net):
        asks: Callable[[], None] | None = None

        def forward(self, hidden: Tensor, doubled: bool = False, power: float = 1.0) -> Tensor:
            if self.asks is not None:
                other = threading.Thread(target=self.asks)
                other.start()
                other.join()
            return super().forward(hidden, doubled, power)

    model = Asking()
    with pooch.auto(model, FAR, quiet=True) as auto:
        settle(model, chosen)

        def asks() -> None:
            try:
                auto.remove()
            except UsageError as error:
                found.append(error)

        model.asks = asks
        steps = auto.summary().steps
        train(model, 1)
        assert "a step is running in another thread" in str(found[0])
        model.asks = None
        train(model, 2)
        assert auto.summary().steps == steps + 3


def test_a_model_that_is_added_in_the_middle_of_a_step_is_governed(chosen: list[StepKey]) -> None:
    model, second = Net(), Net()
    with pooch.auto(model, FAR, quiet=True) as auto:
        settle(model, chosen)
        steps = auto.summary().steps
        hidden = model(batch())
        auto.add(second)
        second(hidden).sum().backward()
        assert auto.summary().steps == steps + 1
        step(second)
        assert auto.summary().steps == steps + 2


def test_an_interrupt_in_the_middle_of_a_call_ends_the_step(chosen: list[StepKey]) -> None:
    model = Net()
    with pooch.auto(model, FAR, quiet=True) as auto:
        settle(model, chosen)
        handle = model.layers[1].register_forward_hook(lambda *_: _interrupt(batch()))
        with pytest.raises(KeyboardInterrupt):
            step(model)
        handle.remove()
        assert not auto.is_within_call()
        steps = auto.summary().steps
        train(model, 3)
        assert auto.summary().steps == steps + 3


def test_a_loop_within_a_transform_or_under_a_mode_begins_no_native_step(chosen: list[StepKey]) -> None:
    model = Net()
    with pooch.auto(model, FAR, quiet=True) as auto:
        settle(model, chosen)
        steps = auto.summary().steps
        torch.func.vmap(model)(batch())
        torch.jit.trace(model, batch(), check_trace=False)
        with torch.no_grad():
            model(batch())
        assert auto.summary().steps == steps
        train(model, 2)
        assert auto.summary().steps == steps + 2


def _more_trained(model: Net) -> None:
    model.frozen.requires_grad_(True)


def _another_parameter(model: Net) -> None:
    model.scale = nn.Parameter(torch.ones(32))


def _a_new_part(model: Net) -> None:
    model.layers.append(nn.Linear(32, 32))


def _a_part_inserted(model: Net) -> None:
    model.layers.insert(1, nn.Linear(32, 32))


def _another_part(model: Net) -> None:
    model.layers[0] = nn.Sequential(nn.Linear(32, 512), nn.Linear(512, 32))


def _evaluation(model: Net) -> None:
    model.eval()


def _gradients(model: Net) -> None:
    step(model)  # whose gradients stay


@pytest.mark.parametrize(
    "change",
    [_more_trained, _another_parameter, _a_new_part, _a_part_inserted, _another_part, _evaluation, _gradients],
)
def test_a_step_of_a_model_that_has_changed_is_looked_at(change: Callable[[Net], None], chosen: list[StepKey]) -> None:
    model = Net()
    with pooch.auto(model, FAR, quiet=True):
        settle(model, chosen)
        change(model)
        chosen.clear()
        step(model)
        assert len(chosen) == 1


@pytest.mark.parametrize(
    ("data", "kwargs", "around"),
    [
        (batch(9), {}, nullcontext()),
        (batch().double().float().requires_grad_(), {}, nullcontext()),
        (batch(), {"doubled": True}, nullcontext()),
        (batch(), {}, torch.autocast("cpu", dtype=torch.bfloat16)),
    ],
    ids=["another shape", "a gradient for the data", "a switch", "autocast"],
)
def test_a_call_that_is_another_one_is_looked_at_once(
    data: Tensor, kwargs: dict[str, Any], around: AbstractContextManager[Any], chosen: list[StepKey]
) -> None:
    model = Net()
    with pooch.auto(model, FAR, quiet=True):
        settle(model, chosen)
        for _ in range(4):
            with around:
                step(model, data, **kwargs)
            model.zero_grad()
            data.grad = None
        assert len(set(chosen)) == 1
        assert len(chosen) == 2  # it is recorded, and runs in-core
        chosen.clear()
        train(model, 1)
        assert chosen == []  # the other kind is still known


def test_the_other_position_of_a_switch_is_another_step(chosen: list[StepKey]) -> None:
    model = Net()
    with pooch.auto(model, FAR, quiet=True):
        settle(model, chosen)
        for is_on in (True, True, True, False):
            before = len(chosen)
            step(model, doubled=is_on)
            model.zero_grad()
        assert len(chosen) == before + 1


def test_numbers_among_the_arguments_make_no_other_step(chosen: list[StepKey]) -> None:
    model = Net()
    with pooch.auto(model, FAR, quiet=True):
        settle(model, chosen)
        for number in range(6):
            step(model, power=float(number))
            model.zero_grad()
        assert len(chosen) == 2


def test_the_budget_is_held_over_a_step_that_is_suddenly_larger(chosen: list[StepKey]) -> None:
    model, large = Net(64, 24), batch(512, 64)
    step(model, large[:8])
    budget_bytes = live_bytes(torch.device("cpu")) + 2_000_000  # a large step saves 6 MB
    plain = step(model, large)
    model.zero_grad()
    with pooch.auto(model, budget_bytes, quiet=True) as auto:
        train(model, 6, large[:8] * 0)  # without gradients to speak of, so the model stays as it is
        chosen.clear()
        step(model, large[:8] * 0)
        assert chosen == []
        model.zero_grad()
        found = step(model, large)
        assert len(chosen) == 1
        summary = auto.summary()
    assert summary.steps_over_budget == 0
    assert summary.swapped_bytes + summary.recomputed_ops > 0
    assert found.shape == plain.shape


def test_a_step_is_looked_at_that_begins_with_more_than_before(chosen: list[StepKey]) -> None:
    model = Net()
    budget_bytes = live_bytes(torch.device("cpu")) + 10_000_000
    with pooch.auto(model, budget_bytes, quiet=True):
        settle(model, chosen)
        held = torch.zeros(2_000_000)
        train(model, 2)
        assert len(chosen) == 2
        del held
        chosen.clear()
        train(model, 2)
        assert len(chosen) == 1  # it is far away again


def test_a_step_that_took_more_than_was_known_is_looked_at_the_next_time(chosen: list[StepKey]) -> None:
    class Now(Net):
        more = 0

        def forward(self, hidden: Tensor, doubled: bool = False, power: float = 1.0) -> Tensor:
            grown = hidden.repeat(self.more + 1, 1)
            return super().forward(grown, doubled, power)

    model = Now()
    budget_bytes = live_bytes(torch.device("cpu")) + 4_000_000
    with pooch.auto(model, budget_bytes, quiet=True):
        settle(model, chosen)
        model.more = 500
        train(model, 1)
        assert chosen == []
        train(model, 1)
        assert len(chosen) == 1


def test_after_a_step_that_failed_the_next_one_is_looked_at(chosen: list[StepKey]) -> None:
    plain = train(Net(), 8)
    model = Net()
    with pooch.auto(model, FAR, quiet=True) as auto:
        losses = train(model, 5)
        chosen.clear()
        model.fails = True
        with pytest.raises(RuntimeError, match="in the middle"):
            step(model)
        assert chosen == []
        assert not auto.is_within_call()
        model.fails = False
        losses += train(model, 3)
        assert len(chosen) == 1
        assert auto.summary().steps == 9
    assert all(torch.equal(one, other) for one, other in zip(plain, losses, strict=True))


def test_a_backward_pass_that_failed_ends_the_step(chosen: list[StepKey]) -> None:
    model = Net()
    with pooch.auto(model, FAR, quiet=True) as auto:
        settle(model, chosen)
        hidden = model(batch())
        with pytest.raises(RuntimeError, match="scalar"):
            hidden.backward()
        hidden = model(batch())
        hidden.register_hook(_interrupt)
        loss = hidden.sum()
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        train(model, 3)
        assert auto.summary().steps >= 15
        assert not auto.is_within_call()


def _interrupt(_: Tensor) -> None:
    raise KeyboardInterrupt


def test_after_an_interrupt_at_any_byte_code_steps_are_governed_counted_and_quiet_again(
    chosen: list[StepKey], natively: bool
) -> None:
    model, interrupts = Net(depth=1), Interrupts("autopilot", "torchtools")
    with pooch.auto(model, FAR, quiet=True) as auto:
        train(model, 101)
        while interrupts.next(lambda: train(model, 1)):
            place = interrupts.place
            model.zero_grad()
            train(model, 1)  # in which what was left over is seen to
            steps = auto.summary().steps
            chosen.clear()
            train(model, 3)
            assert auto.summary().steps == steps + 3, place
            assert len(chosen) <= 2, place
            assert not auto.is_within_call(), place
            chosen.clear()
            model.layers[0](batch()).sum().backward()
            model.zero_grad()
            assert len(chosen) == 1, place  # a call of a part on its own is governed too
            train(model, 2)
    assert interrupts.count == 0 if natively else interrupts.count > 300


def test_a_model_that_is_called_more_often_than_it_was_recorded_goes_on_online(chosen: list[StepKey]) -> None:
    model = Net()
    with pooch.auto(model, FAR, quiet=True) as auto:
        settle(model, chosen)
        online = auto.summary().steps_online
        (model(batch()).sum() + model(batch()).sum()).backward()
        assert auto.summary().steps_online == online + 1
        model.zero_grad()
        train(model, 1)
        assert len(chosen) == 1


def test_a_backward_pass_that_builds_a_graph_goes_on_online(chosen: list[StepKey]) -> None:
    model = Net()
    with pooch.auto(model, FAR, quiet=True) as auto:
        settle(model, chosen)
        online = auto.summary().steps_online
        loss = model(batch()).square().mean()
        (gradient,) = torch.autograd.grad(loss, [model.layers[0].weight], create_graph=True)
        (loss + gradient.square().sum()).backward()
        assert auto.summary().steps_online == online + 1


def test_calls_without_gradients_and_of_parts_begin_what_they_did(chosen: list[StepKey]) -> None:
    model = Net()
    with pooch.auto(model, FAR, quiet=True) as auto:
        settle(model, chosen)
        steps = auto.summary().steps
        with torch.no_grad():
            model(batch())
        assert auto.summary().steps == steps
        model.layers[0](batch()).sum().backward()
        assert auto.summary().steps == steps + 1
        assert len(chosen) == 1


def test_a_step_of_another_thread_is_looked_at(chosen: list[StepKey]) -> None:
    model = Net()
    with pooch.auto(model, FAR, quiet=True) as auto:
        settle(model, chosen)
        other = threading.Thread(target=train, args=(model, 2))
        other.start()
        other.join()
        assert len(chosen) == 1
        train(model, 2)
        assert len(chosen) == 2
        assert auto.summary().steps == 16


def test_another_governed_model_is_looked_at_as_before(chosen: list[StepKey]) -> None:
    model, second = Net(), Net()
    with pooch.auto(model, FAR, quiet=True) as auto:
        settle(model, chosen)
        auto.add(second)
        train(second, 4)
        assert len(chosen) == 4


def test_what_was_seen_of_a_model_does_not_keep_it_nor_its_parts(chosen: list[StepKey]) -> None:
    model = Net()
    auto = pooch.auto(model, FAR, quiet=True)
    settle(model, chosen)
    part = weakref.ref(model.layers[0].weight)
    model.layers[0] = nn.Linear(32, 32)
    train(model, 1)
    assert part() is None
    whole = weakref.ref(model.layers[1].weight)
    del model
    gc.collect()
    assert whole() is None
    auto.remove()


def test_nothing_is_left_where_modules_tell_what_they_are_given() -> None:
    def there() -> int:
        hooks = modules_of_torch
        return len(hooks._global_parameter_registration_hooks) + len(hooks._global_module_registration_hooks)

    before = there()
    with pooch.auto(Net(), FAR, quiet=True):
        assert there() == before + 2
    assert there() == before
