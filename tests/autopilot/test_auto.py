"""`pooch.auto` around loops of every kind: bitwise those without it, within the budget, and gone after `remove()`."""

from __future__ import annotations

import functools
import gc
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import pooch
from pooch.autopilot import Auto
from pooch.autopilot.counting import highest_rise_bytes
from pooch.autopilot.requests import PlanRequests
from pooch.autopilot.steps import GovernedStep
from pooch.errors import UsageError
from pooch.executor.evictor import Evictor
from pooch.executor.status import Status
from pooch.executor.step import Step
from pooch.ground.units import format_bytes
from pooch.torchtools.cpu_allocator import CountingAllocator, counting_allocator
from pooch.torchtools.memory_trace import live_bytes
from tests.children import child_environment
from tests.executor.online.support import Training, copies_cost, run_plainly
from tests.executor.online.zoo import Cube, Layers, rows
from tests.executor.support import assert_same, quick_profile

pytestmark = pytest.mark.cpu
Found = dict[str, Tensor]
Loop = Callable[[nn.Module], Found]
ROWS = 256
ENOUGH_BYTES = 700_000  # above what is live before: for gradients, optimizer and a part of about 1 MB of activations


@pytest.fixture(autouse=True)
def no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about steps without a plan, and about recorded ones."""
    monkeypatch.setattr(PlanRequests, "ask", lambda *_: None)
    monkeypatch.setattr(PlanRequests, "warm_up", lambda *_: None)


def a_model() -> nn.Module:
    torch.manual_seed(1)
    return Layers(lambda hidden: Cube.apply(torch.tanh(hidden)), depth=5)


@contextmanager
def under(model: nn.Module | list[nn.Module], budget: int | str = ENOUGH_BYTES) -> Iterator[Auto]:
    """A budget, in bytes above those that are live."""
    gc.collect()
    models = [model] if isinstance(model, nn.Module) else model
    budget = budget if isinstance(budget, str) else budget + live_bytes(torch.device("cpu"))
    with Auto(models, budget, tell=lambda _: None) as auto:
        yield auto


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def everything(model: nn.Module, losses: list[Tensor]) -> Found:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return state | {"losses": torch.stack(losses).detach(), "random state": torch.get_rng_state()}


def ragged(model: nn.Module) -> Found:
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for count in (ROWS, 100, 200, ROWS, 100, 260):
        optimizer.zero_grad()
        losses.append(loss_of(model(rows(count))))
        losses[-1].backward()
        optimizer.step()
    return everything(model, losses)


def accumulated(model: nn.Module) -> Found:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for number in range(6):
        loss = loss_of(model(rows(ROWS)))
        loss.backward()
        losses.append(loss)
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return everything(model, losses)


def evaluated_between(model: nn.Module) -> Found:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for number in range(4):
        loss = loss_of(model(rows(ROWS)))
        with torch.no_grad():
            losses.append(loss_of(model(rows(50))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad() if number % 2 else nullcontext():
            losses.append(loss_of(model(rows(ROWS))))
        model.train()
    return everything(model, losses)


def failing_now_and_then(model: nn.Module) -> Found:
    losses = []
    for number in range(6):
        try:
            if number == 1:
                model(torch.ones(3, 3))  # a shape that does not fit
            output = model(rows(ROWS))
            if number in (0, 3):
                raise ValueError("the loss is wrong")
            losses.append(loss_of(output))
            losses[-1].backward()
        except (ValueError, RuntimeError):
            continue
    assert len(losses) == 3
    return everything(model, losses) | {str(i): p.grad.clone() for i, p in enumerate(model.parameters())}


def with_lbfgs(model: nn.Module) -> Found:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    data, losses = rows(ROWS), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(data))
        loss.backward()
        losses.append(loss)
        return loss

    optimizer.step(closure)
    return everything(model, losses)


def with_functional_gradients(model: nn.Module) -> Found:
    losses, found = [], {}
    for number in range(3):
        data = rows(ROWS).requires_grad_()
        loss = loss_of(model(data))
        (force,) = torch.autograd.grad(loss, data, create_graph=True)
        losses.append(loss + force.square().sum())
        losses[-1].backward()
        found[str(number)] = force.detach()
    return everything(model, losses) | found


def in_another_thread(model: nn.Module) -> Found:
    losses = []
    for number in range(4):
        losses.append(loss_of(model(rows(ROWS))))
        if number % 2:
            thread = threading.Thread(target=losses[-1].backward)
            thread.start()
            thread.join()
        else:
            losses[-1].backward()
    return everything(model, losses) | {str(i): p.grad.clone() for i, p in enumerate(model.parameters())}


class Counting(TorchDispatchMode):
    """A mode of the program's that counts the matrix products and nothing of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:  # type: ignore[type-arg, override]
        self.count += "mm" in str(func)
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


@contextmanager
def shifted_hooks() -> Iterator[None]:
    """Hooks of the program's, which change what is read, so that it shows where they apply."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor * 2):
        yield


def own(context: Callable[[], AbstractContextManager[object]], around: str) -> Loop:
    """A loop with a context of the program's around parts of its steps."""

    def loop(model: nn.Module) -> Found:
        losses, counts = [], []
        for _ in range(3):
            with context() if around == "everything" else nullcontext() as everywhere:
                with context() if around == "forward" else nullcontext() as forward:
                    output = model(rows(ROWS))
                with context() if around == "loss and backward" else nullcontext() as after:
                    loss = loss_of(output)
                    with context() if around == "backward" else nullcontext() as backward:
                        loss.backward()
            losses.append(loss)
            counts += [each.count for each in (everywhere, forward, after, backward) if isinstance(each, Counting)]
        assert not counts or min(counts) > 0
        gradients = {str(i): p.grad.clone() for i, p in enumerate(model.parameters())}
        return everything(model, losses) | gradients | {"counts": torch.tensor(counts)}

    return loop


LOOPS: dict[str, Loop] = {
    "ragged": ragged,
    "accumulated": accumulated,
    "evaluated between": evaluated_between,
    "failing now and then": failing_now_and_then,
    "LBFGS": with_lbfgs,
    "functional gradients": with_functional_gradients,
    "backward in another thread": in_another_thread,
    **{
        f"{name} around {around}": own(context, around)
        for name, context in (("a mode", Counting), ("hooks", shifted_hooks))
        for around in ("everything", "forward", "loss and backward", "backward")
    },
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_those_without_it(name: str) -> None:
    model = a_model()
    torch.manual_seed(2)
    plain = LOOPS[name](model)
    model = a_model()
    torch.manual_seed(2)
    with under(model) as auto:
        found = LOOPS[name](model)
    assert_same(plain, found)
    summary = auto.summary()
    if name in ("hooks around everything", "hooks around forward"):
        assert summary.steps_in_core == summary.steps > 0  # the program decides itself what is kept, and how
        return
    assert summary.steps_online
    assert summary.swapped_bytes or summary.recomputed_ops
    assert 0 < summary.lost_ms < summary.compared_ms <= summary.steps_ms
    if name not in ("a mode around everything", "a mode around forward", "LBFGS", "functional gradients"):
        assert summary.steps_recorded
    if name != "functional gradients":  # what a graph of gradients saves cannot leave
        assert summary.steps_over_budget == 0


def ways_of_online_steps(monkeypatch: pytest.MonkeyPatch, budget_bytes: int) -> list[bool]:
    """Train under a budget, compare with plain training, and return of each online step whether it could replay."""
    could_replay: list[bool] = []
    new_step = GovernedStep.__init__

    def noted(self: GovernedStep, step: Step, **given: Any) -> None:
        if step.guide is None and step._copies_ahead:  # else it fits, and is only watched
            could_replay.append(step.replays)
        new_step(self, step, **given)

    monkeypatch.setattr(GovernedStep, "__init__", noted)
    model = a_model()
    torch.manual_seed(2)
    plain = ragged(model)
    model = a_model()
    torch.manual_seed(2)
    with under(model, budget_bytes) as auto:
        found = ragged(model)
    assert_same(plain, found)
    summary = auto.summary()
    assert (summary.steps_over_budget > 0) == (budget_bytes < ENOUGH_BYTES)
    assert summary.swapped_bytes or summary.recomputed_ops
    assert len(could_replay) > 1
    return could_replay


@pytest.mark.parametrize("copies_are_slow", [False, True])
def test_ops_are_only_looked_at_where_replays_gain_more(copies_are_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copies_cost(monkeypatch, 1e9 if copies_are_slow else 1e-9)
    first, *later = ways_of_online_steps(monkeypatch, ENOUGH_BYTES)
    assert first
    assert set(later) == {copies_are_slow}


def test_where_the_budget_was_passed_nothing_is_replayed_any_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    copies_cost(monkeypatch, 1e9)
    first, *later = ways_of_online_steps(monkeypatch, 1)
    assert first
    assert set(later) == {False}


def test_the_first_step_of_a_process_keeps_no_more_than_later_ones() -> None:
    """An import in the middle of its first op would keep frames of the forward pass, and with them their tensors."""
    code = """
import gc, sys, types, torch, pooch
from tests.executor.online.zoo import Layers, rows
model = Layers(torch.tanh)
with pooch.auto(model, "60%", tell=lambda _: None):
    loss = model(rows()).sum()
    frames = [each for each in gc.get_objects() if type(each) is types.FrameType]
    assert [each.f_code.co_name for each in frames if each.f_code.co_name == "forward"] == []
    loss.backward()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], env=child_environment(), check=True, timeout=120)


def test_a_share_of_the_first_step_becomes_the_budget() -> None:
    model = a_model()
    with under(model, "60%") as auto:
        assert auto.budget_bytes is None
        for _ in range(4):
            model.zero_grad()
            loss_of(model(rows(ROWS))).backward()
        (shape,) = {each.in_core_peak_bytes for each in auto.summary().shapes if each.in_core_peak_bytes}
        assert auto.budget_bytes == int(0.6 * shape)
    assert auto.summary().swapped_bytes or auto.summary().recomputed_ops


def test_gradients_that_go_between_the_loss_and_its_backward_pass_are_not_there_at_the_peak() -> None:
    """Most loops release them there. What plain training takes then is told, and all has room in it."""

    def deep() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    def train(model: nn.Module, steps: int) -> None:
        data = torch.ones(512, 64)
        for _ in range(steps):
            loss = loss_of(model(data))
            model.zero_grad()
            loss.backward()

    def training() -> Training:
        model = deep()
        train(model, 1)  # leaves gradients
        return lambda _: train(model, 1) or {}  # type: ignore[func-returns-value]

    plain_bytes, model = run_plainly(training).peak_bytes, deep()
    gradients_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with under(model, gradients_bytes + plain_bytes + gradients_bytes // 2) as auto:
        train(model, 5)
    summary = auto.summary()
    (told_bytes,) = (shape.in_core_peak_bytes for shape in summary.shapes if shape.in_core_peak_bytes)
    assert summary.peak_bytes <= told_bytes <= (auto.budget_bytes or 0)
    assert (summary.steps_in_core, summary.swapped_bytes, summary.recomputed_ops) == (3, 0, 0)


@pytest.mark.parametrize("says_what_it_wraps", [True, False])
def test_a_wrapper_that_somebody_puts_around_backward_later_stays(
    monkeypatch: pytest.MonkeyPatch, says_what_it_wraps: bool
) -> None:
    calls: list[str] = []

    def theirs(*args: object, **kwargs: object) -> object:
        calls.append("theirs")
        return within(*args, **kwargs)

    model, plain = a_model(), torch.autograd._engine_run_backward
    with monkeypatch.context() as patched:
        with under(model):
            within = torch.autograd._engine_run_backward
            if says_what_it_wraps:
                functools.update_wrapper(theirs, within)
            patched.setattr(torch.autograd, "_engine_run_backward", theirs)
            loss_of(model(rows(ROWS))).backward()
        assert torch.autograd._engine_run_backward is theirs
        loss_of(model(rows(ROWS))).backward()
        assert calls == ["theirs"] * 2
        for _ in range(2):
            with under(model) as auto:  # within theirs, or around it: each backward pass is noticed once
                for _ in range(2):
                    loss_of(model(rows(ROWS))).backward()
            assert auto.summary().steps == 2
        assert torch.autograd._engine_run_backward is theirs
    with under(model) as auto:  # what they put back is ours, which nobody has taken away
        loss_of(model(rows(ROWS))).backward()
    assert auto.summary().steps == 1
    assert torch.autograd._engine_run_backward is plain


def test_models_that_come_and_go_leave_nothing_in_the_budget() -> None:
    with under(a_model()) as auto:
        for _ in range(30):
            auto.add(a_model())
        gc.collect()
        auto.add(a_model())
        assert len(auto._driver.governed._calls) < 40
        assert len(auto._driver.governed._models) < 4


def test_a_budget_that_is_a_share_is_told_once_with_the_optimizers_state() -> None:
    # GIVEN a loop in which gradients accumulate over two steps
    model, told = a_model(), list[str]()
    optimizer = torch.optim.Adam(model.parameters())

    def budgets() -> list[str]:
        return [line for line in told if line.startswith("the budget is ")]

    with Auto([model], "60%", tell=told.append) as auto:
        for step in range(4):
            loss_of(model(rows(ROWS))).backward()
            assert bool(budgets()) is (step > 1)
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    # THEN the budget is told with the state that the optimizer has created, and not before
    (budget,) = budgets()
    assert budget.startswith(f"the budget is {format_bytes(auto.budget_bytes or 0)}: 60% of what the first step takes")
    # AND without an optimizer, it is told in the end
    told.clear()
    with Auto([model], "60%", tell=told.append):
        loss_of(model(rows(ROWS))).backward()
        assert not budgets()
    assert len(budgets()) == 1


@pytest.mark.parametrize(("share", "is_passed"), [("60%", False), ("20%", True)])
def test_a_step_is_told_to_have_passed_a_share_once_the_share_is_known(share: str, is_passed: bool) -> None:
    """Parameters and gradients are live in the first step, and the optimizer's state is as much again."""
    model, told = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]), list[str]()
    optimizer = torch.optim.Adam(model.parameters())
    with Auto([model], share, tell=told.append) as auto:
        for _ in range(2):
            loss_of(model(torch.randn(4, 256))).backward()
            optimizer.step()
            optimizer.zero_grad()
        budget_bytes = auto.budget_bytes or 0
    passed = [line for line in told if " over the budget of " in line]
    assert len(passed) == is_passed
    if is_passed:
        assert f" over the budget of {format_bytes(budget_bytes)}: " in passed[0]
        assert [line[:14] for line in told].index("the budget is ") < told.index(passed[0])


def test_several_models_share_one_budget() -> None:
    def adversarial(generator: nn.Module, critic: nn.Module) -> Found:
        torch.manual_seed(2)
        optimizers = [torch.optim.Adam(each.parameters()) for each in (generator, critic)]
        losses = []
        for _ in range(3):
            made = generator(rows(ROWS))
            losses.append(loss_of(critic(made.detach())) - loss_of(critic(rows(ROWS))))
            losses[-1].backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            losses.append(-loss_of(critic(made)))
            losses[-1].backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
        return everything(nn.ModuleList([generator, critic]), losses)

    plain = adversarial(a_model(), a_model())
    pair = [a_model(), a_model()]
    with under(pair, 1_100_000) as auto:
        assert_same(plain, adversarial(*pair))
    summary = auto.summary()
    assert summary.steps == 6
    assert summary.swapped_bytes or summary.recomputed_ops


def test_a_flop_counter_between_counts_the_backward_pass() -> None:
    model = a_model()

    def flops() -> int:
        output = model(rows(ROWS))
        with FlopCounterMode(display=False) as counter:
            loss_of(output).backward()
        return int(counter.get_total_flops())

    plain = flops()
    with under(model):
        assert flops() == plain > 0


def test_a_lazy_model_is_refused_before_its_first_call_and_taken_after_it() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())
    with pytest.raises(UsageError, match=r"^0\.weight of the model has no shape yet, .*: call the model once"):
        pooch.auto(model, "1GiB", quiet=True)
    with torch.no_grad():
        model(torch.ones(4, 8))
    pooch.auto(model, "1GiB", quiet=True).remove()


@pytest.mark.parametrize("budget", [ENOUGH_BYTES, 1], ids=["with room", "without"])
def test_a_lazy_head_finds_out_its_shapes_within_a_step(budget: int) -> None:
    def train(model: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        for step in range(4):
            hidden = model(rows(ROWS))
            if step % 2 == 0:
                head = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())
            head(hidden.flatten(1)).sin().sum().backward()
        parts = nn.ModuleList([model, head])
        return {name: p.grad.clone() for name, p in parts.named_parameters() if p.grad is not None}

    model = a_model()
    plain = train(model)
    with under(model, budget):
        assert_same(plain, train(model))


def test_a_second_budget_is_refused() -> None:
    with under(a_model()), pytest.raises(UsageError, match="a budget is held on cpu already"):
        Auto([a_model()], 10**6)


def test_a_second_budget_on_the_same_model_says_how_to_end_the_first() -> None:
    model = a_model()
    with under(model):
        with pytest.raises(UsageError, match=r"under pooch.auto already: call remove\(\) .*, or give replace=True$"):
            pooch.auto(model, "60%")
        with pytest.raises(UsageError, match=r"under pooch.auto already: call remove\(\) on what it returned$"):
            pooch.profile(lambda: loss_of(model(rows(ROWS))), model)


@pytest.mark.parametrize("is_same_model", [True, False])
def test_a_cell_that_is_run_again_replaces_its_budget(is_same_model: bool) -> None:
    model = a_model()
    first = pooch.auto(model, "90%", quiet=True)
    loss_of(model(rows(ROWS))).backward()
    if not is_same_model:
        model = a_model()
    with pytest.raises(UsageError, match="did you mean"):
        pooch.auto(model, 16, replace=True)
    loss_of(model(rows(ROWS))).backward()
    counted = first.summary().steps  # the first one was not ended for a budget that cannot be held
    assert counted == (2 if is_same_model else 1)
    with pooch.auto(model, "80%", quiet=True, replace=True) as second:
        loss_of(model(rows(ROWS))).backward()
        assert (first.summary().steps, second.summary().steps) == (counted, 1)
        first.remove()  # which is over already
        loss_of(model(rows(ROWS))).backward()
        assert second.summary().steps == 2


def test_a_status_tells_how_the_last_step_ran() -> None:
    model = a_model()
    with under(model) as auto:
        assert auto.status() == Status(0, "none", None, auto.status().budget_mib, None)
        assert str(auto.status()) == "no step yet"
        modes = []
        for _ in range(3):
            loss_of(model(rows(ROWS))).backward()
            modes.append(auto.status().mode)
        assert modes == ["online", "recorded", "online"]
        status, summary = auto.status(), auto.summary()
        assert 0 < status.peak_mib <= summary.peak_bytes / 2**20 + 0.01  # type: ignore[operator]
        assert status.as_dict() == {
            "pooch/steps": 3,
            "pooch/mode": "online",
            "pooch/peak_mib": status.peak_mib,
            "pooch/budget_mib": round(summary.budget_bytes / 2**20, 2),  # type: ignore[operator]
        }
        assert status.as_numbers()["pooch/on_plan"] == 0
        assert all(isinstance(value, float) for value in status.as_numbers().values())
    with under(model, "1GiB") as auto:
        for _ in range(3):
            loss_of(model(rows(ROWS))).backward()
        assert auto.status().mode == "in-core"
        assert auto.status().slowdown == 1.0


def test_an_auto_says_what_it_is_in_one_line() -> None:
    model = a_model()
    with under(model, "60%") as auto:
        assert repr(auto) == "Auto(Layers, budget not known yet, 0 steps)"
        loss_of(model(rows(ROWS))).backward()
        assert re.fullmatch(r"Auto\(Layers, budget [\d.]+ .iB, 1 step: 1 online; peak [\d.]+ .iB\)", repr(auto))
        assert re.fullmatch(r"AutoSummary\(budget .*, 1 step: 1 online; peak .*\)", repr(auto.summary()))
    assert repr(auto).endswith(" (removed)")


def test_lines_go_to_standard_error_unless_it_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    for quiet in (False, True):
        model = a_model()
        with pooch.auto(model, "60%", quiet=quiet):
            for _ in range(2):
                loss_of(model(rows(ROWS))).backward()
        told = capsys.readouterr().err.splitlines()
        assert all(line.startswith("pooch: ") for line in told)
        assert any("pooch: the budget is " in line for line in told) is not quiet


def test_what_is_to_be_looked_at_is_a_warning_of_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    model = a_model()
    with caplog.at_level("INFO", logger="pooch"), pooch.auto(model, "2%"):
        for _ in range(2):
            loss_of(model(rows(ROWS))).backward()
    assert {record.levelname for record in caplog.records if "over the budget" in record.getMessage()} == {"WARNING"}
    assert {record.levelname for record in caplog.records if "the budget is" in record.getMessage()} == {"INFO"}


@pytest.mark.parametrize("budget", ["min", "0%", "120%", "-5%", "many", -3])
def test_budgets_that_make_no_sense_are_refused(budget: str | int) -> None:
    with pytest.raises(UsageError) as caught:
        Auto([a_model()], budget)
    assert "\n" not in str(caught.value)


def is_counting() -> bool:
    allocator = counting_allocator()
    assert isinstance(allocator, CountingAllocator)
    tensor = torch.ones(100)
    return allocator.knows(tensor.data_ptr())


@pytest.mark.parametrize("steps_before", [0, 1])
def test_removing_it_within_a_step(steps_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is as before at once, and the step still ends as it would have."""
    copies_cost(monkeypatch, 1e-9)  # what is replayed after the removal is not counted any longer
    model = a_model()
    with under(model) as auto:
        for _ in range(steps_before):
            loss_of(model(rows(ROWS))).backward()
        model.zero_grad()
        torch.manual_seed(3)
        loss = loss_of(model(rows(ROWS)))
        assert is_counting()
        auto.remove()
        assert not is_counting()
        assert torch._C._len_torch_dispatch_stack() == 0
        assert gc.isenabled()
        loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(3)
    loss_of(model(rows(ROWS))).backward()
    assert all(map(torch.equal, found, [p.grad for p in model.parameters()]))
    assert auto.summary().swapped_bytes


def test_another_thread_cannot_remove_it_within_a_step() -> None:
    model, errors = a_model(), []
    with under(model) as auto:
        loss = loss_of(model(rows(ROWS)))

        def remove() -> None:
            with pytest.raises(UsageError, match="another thread"):
                auto.remove()
            errors.append("refused")

        thread = threading.Thread(target=remove)
        thread.start()
        thread.join()
        assert errors == ["refused"]
        loss.backward()


@pytest.mark.parametrize("steps_before", [0, 1])
def test_it_goes_with_its_model(steps_before: int) -> None:
    """Also within a step, whose hooks and modes go too (checked after the test)."""
    model = a_model()
    auto = Auto([model], live_bytes(torch.device("cpu")) + ENOUGH_BYTES, tell=lambda _: None)
    for _ in range(steps_before):
        loss_of(model(rows(ROWS))).backward()
    loss = loss_of(model(rows(ROWS)))
    gone = weakref.ref(auto)
    del model, auto, loss
    gc.collect()
    assert gone() is None
    assert not is_counting()
    with under(a_model()):
        pass  # it can be held again


def test_a_profiler_of_the_users_has_precedence() -> None:
    model = a_model()
    with under(model) as auto:
        output = model(rows(ROWS))
        with torch.profiler.profile() as within:
            loss_of(output).backward()
        with torch.profiler.profile() as around:
            loss_of(model(rows(ROWS))).backward()
        loss_of(model(rows(ROWS))).backward()
    for profiler in (within, around):
        assert any("mm" in event.key for event in profiler.key_averages())
    assert [shape.in_core_peak_bytes is not None for shape in auto.summary().shapes].count(True) == 1


def test_a_process_that_ends_within_a_step_ends_well() -> None:
    text = """
import torch
from pooch.autopilot import Auto
model = torch.nn.Linear(8, 8)
auto = Auto([model], 10**6)
model(torch.ones(1, 8))
"""
    done = subprocess.run([sys.executable, "-c", text], env=child_environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_cannot_be_recorded_is_not_tried_for_ever() -> None:
    model = a_model()
    with under(model) as auto:
        for _ in range(10):
            thread = threading.Thread(target=loss_of(model(rows(ROWS))).backward)
            thread.start()
            thread.join()
            model.zero_grad()
        auto.summary()
        assert auto.summary().steps_recorded < 9


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_ctrl_c_while_room_is_made_ends_the_training(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the process is as before (checked after the test), so that training can go on."""
    model, real, parts = a_model(), Evictor.make_room, []

    def interrupted(evictor: Evictor, missing_bytes: int) -> None:
        if parts[-1] == part:
            parts.append("interrupted")
            signal.raise_signal(signal.SIGINT)
            parts.append("went on")
        real(evictor, missing_bytes)

    def step() -> None:
        parts.append("forward")
        loss = loss_of(model(rows(ROWS)))
        parts.append("backward")
        loss.backward()
        parts.append("end")

    monkeypatch.setattr(Evictor, "make_room", interrupted)
    with under(model, ENOUGH_BYTES // 2):
        with pytest.raises(KeyboardInterrupt):
            step()
        assert parts[-1] == "interrupted"
        part = "none"
        model.zero_grad()
        step()


def test_an_error_while_room_is_made_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an op it cannot be raised, and the step would go on over its budget unnoticed."""
    model = a_model()

    def fail(_: Evictor, missing_bytes: int) -> None:
        raise OSError("the disk is broken")

    monkeypatch.setattr(Evictor, "make_room", fail)
    with under(model, ENOUGH_BYTES // 2), pytest.raises(OSError, match="the disk is broken"):
        loss_of(model(rows(ROWS))).backward()


@pytest.mark.filterwarnings("ignore:no counting allocator")
def test_without_a_counting_allocator_the_margin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooch.executor.live_bytes.counting_allocator", lambda: "no compiler")
    model, told = a_model(), []
    with Auto([model], live_bytes(torch.device("cpu")) + ENOUGH_BYTES, tell=told.append) as auto:
        for _ in range(4):
            loss_of(model(rows(ROWS))).backward()
            model.zero_grad()
        assert auto.summary().steps_recorded == 1
    (line,) = [line for line in told if "now and then" in line]
    assert re.search(r"may exceed the budget by up to \d+\.\d+ (KiB|MiB)", line)


def test_the_margin_is_the_highest_rise_while_nobody_counts() -> None:
    model = a_model()
    data = rows(ROWS)
    profile = quick_profile(lambda: loss_of(model(data)), model)
    within_ops = max(op.peak_bytes - op.entry_bytes for op in profile.ops)
    assert highest_rise_bytes(profile, 0.0) == within_ops
    assert highest_rise_bytes(profile, 10 * profile.step_ms) == profile.peak_bytes - profile.ops[0].entry_bytes
    assert within_ops < highest_rise_bytes(profile, profile.step_ms / 4)


def test_steps_leave_nothing_behind() -> None:
    model = a_model()
    live = []
    with under(model) as auto:
        for number in range(60):
            if number == 10:
                gc.collect()
                gc.disable()
            loss_of(model(rows(ROWS))).backward()
            model.zero_grad()
            live.append(auto._driver.evictor.live.now())
        gc.enable()
        assert auto._driver.evictor._values == {}
    assert len(set(live[12:])) == 1


def test_a_summary_knows_what_came_after_the_last_backward_pass() -> None:
    """Such as the step of an optimizer, which may be the highest peak of a training that ends with it."""
    model = a_model()
    with under(model, 100_000_000) as auto:
        loss_of(model(rows(ROWS))).backward()
        before_bytes = live_bytes(torch.device("cpu"))
        torch.empty(3_000_000).zero_()
        assert auto.summary().between_peak_bytes >= before_bytes + 12_000_000
