"""Parameters, gradients and the optimizer's state leave where a step does not fit with them on the device."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

import pooch
import pooch.autopilot.persistence
from pooch.autopilot.autopilot import Auto
from pooch.autopilot.costs import HostCosts
from pooch.autopilot.driver import StepDriver
from pooch.autopilot.jobs import Answer, Job, done
from pooch.autopilot.requests import PlanRequests
from pooch.executor.persistent import PersistentMemory
from pooch.ground.errors import TierError
from pooch.ground.units import format_bytes
from pooch.ir import Profile
from pooch.torchtools import watch
from pooch.torchtools.tensors import storage_key
from tests.live_before import live_before
from tests.other_threads import another_thread

WIDTH, LAYERS = 192, 8
LAYER_BYTES = 4 * WIDTH * WIDTH
ROOM_BYTES = 2**20  # for activations and what single ops need
STEPS = 4
STEPS_UNTIL_STATE_STAYS = 10  # until then it is not known what similar steps take
others_bytes = 0  # that earlier tests have left

pytestmark = pytest.mark.skipif(watch.LIBRARY.get() is None, reason="nothing leaves without what watches natively")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def tight(model: nn.Module) -> int:
    """About a quarter of what parameters, gradients and Adam's state take."""
    return sum(parameter.nbytes for parameter in model.parameters()) + ROOM_BYTES


def contents(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    return [tensor.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Parameters, buffers, gradients and state, read one by one."""
    found = [*model.parameters(), *model.buffers()]
    found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        found += [state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)]
    return contents(found)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.randn(8, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def memory_of(auto: Auto) -> PersistentMemory:
    memory = auto._driver._persistence.memory
    assert memory is not None
    return memory


def weights(model: nn.Module) -> list[torch.Tensor]:
    """What is large enough to leave."""
    return [parameter for parameter in model.parameters() if parameter.nbytes == LAYER_BYTES]


def away(auto: Auto) -> int:
    """How many values are away now."""
    return sum(not value.is_here for value in memory_of(auto).values)


@pytest.fixture(autouse=True)
def _beside_what_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "others_bytes", live_before())


@contextlib.contextmanager
def held(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, budget: int, disk_budget: int | None = None
) -> Iterator[Auto]:
    told: list[str] = []
    budget += others_bytes
    with pooch.auto(model, budget, optimizer, disk_budget=disk_budget, tell=told.append) as auto:
        yield auto
        counters = auto._driver.counters  # what a test does after its last step is its own
        assert not [line for line in told if "over the budget" in line], told
        assert max(counters.peak_bytes, counters.between_peak_bytes) <= budget


def trained(budget: Callable[[nn.Module], int] | None, steps: int = STEPS) -> tuple[list[float], list[bytes]]:
    model = network()
    optimizer = adamw(model)
    around = contextlib.nullcontext() if budget is None else held(model, optimizer, budget(model))
    torch.manual_seed(1)
    with around as auto:
        losses = [step(model, optimizer) for _ in range(steps)]
        if auto is not None:
            moved = memory_of(auto).values.moved
            assert all(moved.in_bytes[kind] for kind in ("parameter", "gradient", "state"))
        return losses, everything(model, optimizer)


def test_a_model_whose_state_takes_four_times_the_budget_trains_with_the_same_bits() -> None:
    assert trained(tight) == trained(None)


def slices_of(auto: Auto, optimizer: torch.optim.Optimizer) -> int:
    return auto._driver._persistence._sliced.by_optimizer[optimizer].slices_in_last_step


@pytest.mark.parametrize("foreach", [False, True])
def test_where_all_of_a_step_is_here_it_is_one_slice_if_its_temporary_tensors_have_room(foreach: bool) -> None:
    def found(budget_bytes: int | None) -> tuple[list[int], list[bytes]]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
        torch.manual_seed(1)
        slices: list[int] = []
        with contextlib.nullcontext() if budget_bytes is None else held(model, optimizer, budget_bytes) as auto:
            for _ in range(STEPS_UNTIL_STATE_STAYS + 3):
                step(model, optimizer)
                if auto is not None:
                    slices.append(slices_of(auto, optimizer))
            return slices, everything(model, optimizer)

    parameters_bytes = sum(parameter.nbytes for parameter in network().parameters())
    _, plain = found(None)
    slices, values = found(4 * parameters_bytes + ROOM_BYTES)
    assert values == plain
    assert slices[0] >= LAYERS
    assert slices[-3:] == [2 if foreach else 1] * 3, "on lists, temporary tensors are as large as all parameters"


@pytest.mark.parametrize("room_bytes", [LAYER_BYTES, 2 * ROOM_BYTES])
def test_what_moves_is_stepped_in_as_few_slices_as_have_room(room_bytes: int) -> None:
    model = network()
    optimizer = adamw(model)
    parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with held(model, optimizer, 2 * parameters_bytes + room_bytes) as auto:
        for _ in range(STEPS):
            step(model, optimizer)
        moved = memory_of(auto).values.moved
        assert moved.in_bytes["state"] > 0
        slices = slices_of(auto, optimizer)
    assert slices > LAYERS if room_bytes == LAYER_BYTES else 2 <= slices <= LAYERS


def test_the_peak_without_pooch_counts_state_that_was_away_when_the_step_was_recorded() -> None:
    model = network()
    optimizer = adamw(model)
    parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with held(model, optimizer, 3 * parameters_bytes) as auto:
        for _ in range(STEPS):
            step(model, optimizer)
        summary = auto.summary()
    assert any(each.out_bytes for each in summary.persistent)
    assert summary.steps_recorded > 0
    (peak_bytes,) = (shape.in_core_peak_bytes for shape in summary.shapes)
    assert peak_bytes is not None
    assert peak_bytes - others_bytes > 4 * parameters_bytes, "parameters, gradients and both moments"


@pytest.mark.parametrize("is_tight", [True, False])
def test_what_slices_of_optimizers_wait_for_is_counted(is_tight: bool) -> None:
    model = network()
    optimizer = adamw(model)
    parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with held(model, optimizer, 3 * parameters_bytes if is_tight else 2**30) as auto:
        for _ in range(STEPS):
            step(model, optimizer)
        summary = auto.summary()
    assert (summary.around_slices_ms > 0) == is_tight
    assert "longer for it" not in str(replace(summary, around_slices_ms=0.0))
    told = "optimizer.step() took 1.2 s longer for it"
    assert (told in str(replace(summary, around_slices_ms=1234.0))) == is_tight


def test_what_was_live_before_the_budget_and_above_it_is_told() -> None:
    model = network()
    parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
    told: list[str] = []
    with pooch.auto(model, parameters_bytes // 2, adamw(model), tell=told.append) as auto:
        first = auto.summary()
        assert first.between_peak_bytes == 0, "what was there before is no peak between steps"
        step(model, adamw(model))
        assert "were live before the first" in str(auto.summary())
    assert [line for line in told if "were live before the budget of" in line]


@pytest.mark.parametrize("rows", [4096, 4])
def test_a_peak_over_the_budget_between_steps_is_told_once(rows: int) -> None:
    model, told = network(), list[str]()
    optimizer = adamw(model)
    parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with pooch.auto(model, live_before() + 5 * parameters_bytes, optimizer, tell=told.append) as auto:
        for _ in range(3):
            step(model, optimizer)
            with torch.no_grad():
                model(torch.zeros(rows, WIDTH))
        summary = auto.summary()
    assert summary.budget_bytes is not None
    is_over = summary.between_peak_bytes > summary.budget_bytes
    assert is_over == (rows == 4096)
    lines = [line for line in told if "were live between two steps" in line]
    assert len(lines) == is_over
    more = f"more than the budget of {format_bytes(summary.budget_bytes)}, as in optimizer.step() or an evaluation: "
    assert all(more in line for line in lines)


def steps_of(counts: Sequence[int], budget: int | None) -> tuple[list[bytes], list[int], list[str]]:
    """The numbers after steps of so many rows, what of parameters and gradients left in each of them, what is told."""
    model, left, told = network(), [0], list[str]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    around: Any = contextlib.nullcontext()
    if budget is not None:
        around = pooch.auto(model, budget + others_bytes, optimizer, tell=told.append)
    with around as auto:
        for count in counts:
            model(torch.randn(count, WIDTH)).square().mean().backward()
            if auto is not None:
                assert auto.summary().peak_bytes <= auto.summary().budget_bytes
                left.append(sum(each.out_bytes for each in auto.summary().persistent))
                assert (auto._driver._persistence.memory is None) == (left[-1] == 0)
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer), [after - before for before, after in pairwise(left)], told


@pytest.mark.parametrize("smaller", [[], [400], [400, 500, 300]])
def test_parameters_and_gradients_leave_in_the_first_step_that_has_no_room_beside_them(smaller: list[int]) -> None:
    counts, budget = [*smaller, 1050, 1050], 5 * 2**20
    numbers, left_bytes, told = steps_of(counts, budget)
    assert numbers == steps_of(counts, None)[0]
    assert left_bytes[: len(smaller)] == [0] * len(smaller)
    assert all(left_bytes[len(smaller) :])
    assert len([line for line in told if line.startswith("parameters, gradients and the optimizer's state leave")]) == 1


def test_what_a_first_step_is_given_leaves_as_well() -> None:
    """The program holds it, so it is none of the step's activations."""
    model, rows, told = network(), torch.randn(1050, WIDTH), list[str]()
    with pooch.auto(model, 5 * 2**20 + others_bytes + rows.nbytes // 2, tell=told.append) as auto:
        model(rows).square().mean().backward()
        assert auto.summary().peak_bytes <= auto.summary().budget_bytes
        assert {each.name: each.out_bytes for each in auto.summary().persistent}["data of the program"] == rows.nbytes
    assert told[1].startswith("nothing else can leave, so tensors that the program holds leave cpu memory")


def test_a_batch_leaves_in_the_first_step_that_has_no_room_beside_it_however_small_parameters_are() -> None:
    torch.manual_seed(0)
    width, rows, told = 64, 8000, list[str]()
    model = nn.Sequential(*[each for _ in range(LAYERS) for each in (nn.Linear(width, width), nn.Tanh())])
    batch_bytes = 4 * rows * width
    assert 3 * sum(parameter.nbytes for parameter in model.parameters()) < 0.1 * 5 * batch_bytes
    with pooch.auto(model, int(5.5 * batch_bytes) + others_bytes, tell=told.append) as auto:
        model(torch.randn(rows, width)).square().mean().backward()
        assert auto.summary().peak_bytes <= auto.summary().budget_bytes
    assert [line for line in told if "tensors that the program holds leave" in line]
    assert not [line for line in told if "over the budget" in line]


@pytest.mark.parametrize("smaller", [[], [100, 100]])
def test_a_larger_batch_leaves_in_the_first_step_that_has_no_room_though_parameters_leave(smaller: list[int]) -> None:
    model, told = network(), list[str]()
    optimizer = adamw(model)
    with pooch.auto(model, 4 * 2**20 + others_bytes, optimizer, tell=told.append) as auto:
        for count in [*smaller, 1000]:
            model(torch.randn(count, WIDTH)).square().mean().backward()
            begun = [line for line in told if "tensors that the program holds leave" in line]
            assert len(begun) == (count == 1000)
            optimizer.step()
            optimizer.zero_grad()
        assert memory_of(auto).values.moved.out_bytes["data"] > 0
        assert auto.summary().peak_bytes <= auto.summary().budget_bytes
    assert not [line for line in told if "over the budget" in line]


def test_in_a_first_step_with_room_beside_them_they_stay_and_nothing_is_told() -> None:
    counts, budget = [400, 400], 5 * 2**20
    numbers, left_bytes, told = steps_of(counts, budget)
    assert numbers == steps_of(counts, None)[0]
    assert left_bytes == [0, 0]
    assert not [line for line in told if "parameters, gradients" in line]


def test_a_step_in_which_nothing_has_to_leave_has_no_time_of_moving_and_nothing_that_stays() -> None:
    """Else steps far below the budget are told to lose time to it, and the summary lists what stays."""
    model = network()
    array, moves = model[0].weight.detach().numpy(), list[bool]()
    with pooch.auto(model, 16 * 2**20 + others_bytes, adamw(model), quiet=True) as auto:
        persistence = auto._driver._persistence
        model[-1].register_forward_hook(lambda *_: moves.append(persistence.memory is not None))
        model[-1].register_forward_hook(lambda *_: moves.append(persistence.times.moves))
        model(torch.randn(400, WIDTH)).square().mean().backward()
        assert moves == [True, False]
        assert not auto.summary().staying
    assert array.nbytes == LAYER_BYTES


def test_after_a_trial_nothing_of_it_is_left_on_parameters_and_data() -> None:
    """What is compiled afterwards would be compiled anew for each tensor that has another key."""
    model, rows, keys = network(), torch.randn(400, WIDTH), []
    for around in (pooch.auto(model, 5 * 2**20 + others_bytes, quiet=True), contextlib.nullcontext()):
        with around as auto:
            model(rows).square().mean().backward()
            assert auto is None or auto._driver._persistence.memory is None
        tensors = [rows, *model.parameters(), *(each.grad for each in model.parameters() if each.grad is not None)]
        keys.append([str(torch._C._dispatch_keys(each)) for each in tensors])
        assert not [each for each in model.parameters() if each._post_accumulate_grad_hooks]
        model.zero_grad()
    assert keys[0] == keys[1]


def test_what_was_there_before_leaves_at_once() -> None:
    model = network()
    budget = sum(parameter.nbytes for parameter in model.parameters()) // 2
    with pooch.auto(model, budget + others_bytes, adamw(model), tell=lambda _: None) as auto:
        assert auto._driver.evictor.live.now() <= budget + others_bytes
        assert away(auto) > 0


def test_everything_is_back_afterwards() -> None:
    model = network()
    optimizer = adamw(model)
    with held(model, optimizer, tight(model)) as auto:
        for _ in range(2):
            step(model, optimizer)
        assert away(auto) > 0
        values = list(memory_of(auto).values)
    assert all(value.is_here for value in values if not value.is_gone)
    step(model, optimizer)
    assert not [hook for parameter in model.parameters() for hook in parameter._post_accumulate_grad_hooks or ()]


def test_one_budget_after_another_on_the_same_optimizer() -> None:
    model = network()
    optimizer = adamw(model)
    for _ in range(2):
        with held(model, optimizer, tight(model)) as auto:
            for _ in range(2):
                step(model, optimizer)
            assert memory_of(auto).values.moved.out_bytes["state"] > 0


def test_one_budget_after_another_that_ended_between_the_passes() -> None:
    """The step that is still open goes on knowing the parameters that it has recorded."""
    budget = 4_000_000 + live_before()
    model = nn.Sequential(*[each for _ in range(6) for each in (nn.Linear(256, 256), nn.GELU())])
    optimizer, rows = adamw(model), torch.randn(768, 256)

    def loss() -> torch.Tensor:
        return model(rows).square().mean()

    with pooch.auto(model, budget, optimizer, tell=lambda _: None) as auto:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        last = loss()
        assert memory_of(auto).values.moved.out_bytes["parameter"] > 0
    with pooch.auto(model, budget, optimizer, tell=lambda _: None) as auto:
        last.backward()
        assert memory_of(auto).values.of_all([storage_key(each) for each in model.parameters()])


def test_an_optimizer_is_found_that_was_not_given() -> None:
    model = network()
    optimizer = adamw(model)
    with held(model, None, tight(model)) as auto:
        for _ in range(2):
            step(model, optimizer)
        assert memory_of(auto).values.moved.out_bytes["state"] > 0


def test_the_first_step_of_an_optimizer_that_was_not_given_holds_the_budget() -> None:
    model = network()
    optimizer = adamw(model)
    parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with held(model, None, 3 * parameters_bytes):  # enough until the moments of AdamW come
        for _ in range(STEPS):
            step(model, optimizer)


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("is_alone", [True, False])
def test_the_first_step_of_an_optimizer_holds_a_share_that_the_step_before_it_made_known(
    is_given: bool, passes: int, is_alone: bool
) -> None:
    """There are nearly no activations, and moments come that take as much as all there was before."""

    def trained(share: str | None) -> list[bytes]:
        model = network()
        optimizer = adamw(model)
        with contextlib.ExitStack() as stack:
            if not is_alone:
                stack.enter_context(another_thread(may_train=True))
            if share is not None:
                governed = pooch.auto(model, share, optimizer if is_given else None, tell=lambda _: None)
                auto = stack.enter_context(governed)
            torch.manual_seed(1)
            for _ in range(STEPS):
                for _ in range(passes):
                    model(torch.randn(8, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if share is not None:
                driver = auto._driver
                assert driver.budget.size_bytes is not None
                assert driver.counters.between_peak_bytes <= driver.budget.size_bytes
                assert memory_of(auto).values.moved.out_bytes["state"] > 0
            return everything(model, optimizer)

    assert trained("60%") == trained(None)


def test_state_that_fits_into_a_share_stays() -> None:
    model = network()
    optimizer = adamw(model)
    with pooch.auto(model, "98%", optimizer, tell=lambda _: None) as auto:
        for _ in range(STEPS):
            model(torch.randn(2**12, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert auto._driver._persistence.memory is None
        assert auto._driver.counters.between_peak_bytes <= (auto._driver.budget.size_bytes or 0)


@pytest.mark.parametrize("is_given", [True, False])
def test_what_an_optimizer_needs_beside_its_state_counts_from_its_first_step_on(is_given: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 2**15), nn.Linear(2**15, 16))  # two parameters have most of the bytes
    optimizer = adamw(model)
    parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with held(model, optimizer if is_given else None, 9 * parameters_bytes // 2):
        for _ in range(STEPS):
            model(torch.randn(1, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("is_given", [True, False])
def test_what_takes_most_of_the_budget_may_leave_before_a_step_has_passed_it(is_given: bool) -> None:
    model = network()
    optimizer = adamw(model)
    parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with held(model, optimizer if is_given else None, 24 * parameters_bytes // 5):  # of which ops need a quarter
        for _ in range(STEPS):
            model(torch.randn(600, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


class Keeping(nn.Module):
    """Returns all that its layers have made, so that the program holds it until the backward pass ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, rows: torch.Tensor) -> list[torch.Tensor]:
        made = [rows]
        for layer in self.layers:
            made.append(layer(made[-1]))
        return made[1:]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize(("make", "budget_mib"), [(adamw, 9), (momentum, 8)])
def test_new_state_leaves_in_the_middle_of_the_first_step_that_has_no_room_beside_it(
    make: Callable[[nn.Module], torch.optim.Optimizer], budget_mib: int, is_given: bool
) -> None:
    def found(budget: int | None) -> tuple[list[float], list[bytes]]:
        model = Keeping()
        optimizer = make(model)
        torch.manual_seed(1)
        losses = []
        around = contextlib.nullcontext() if budget is None else held(model, optimizer if is_given else None, budget)
        with around as auto:
            for number in range(STEPS):
                made = model(torch.randn(256, WIDTH))
                loss = sum((each.square().mean() for each in made), torch.zeros(()))
                assert auto is None or number != 1 or auto._driver._persistence.memory is None
                loss.backward()
                del made
                losses.append(loss.item())
                if auto is not None and number == 1:
                    assert memory_of(auto).values.moved.out_bytes["state"] > 0
                    assert memory_of(auto).values.moved.out_bytes["parameter"] == 0
                optimizer.step()
                optimizer.zero_grad()
        return losses, everything(model, optimizer)

    assert found(budget_mib * 2**20) == found(None)


def test_state_stays_that_an_optimizer_works_on_before_the_step_has_ended() -> None:
    """As where the backward pass runs in another thread: an op of the optimizer found its own arguments gone."""

    def found(budget: int | None) -> list[bytes]:
        torch.manual_seed(0)
        model = nn.Sequential(*[each for _ in range(6) for each in (nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128))])
        optimizer = torch.optim.Adam(model.parameters())
        around = contextlib.nullcontext() if budget is None else pooch.auto(model, live_before() + budget, tell=str)
        with around:
            for _ in range(3):
                loss = model(torch.randn(2048, 128)).sum()
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                optimizer.zero_grad()
                del loss
        return contents(list(model.parameters()))

    plain = found(None)
    for budget in (3_000_000, 4_000_000, 5_000_000):
        assert found(budget) == plain


def test_state_that_is_there_already_is_not_expected_once_more() -> None:
    model = network()
    optimizer = adamw(model)
    parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with held(model, optimizer, 6 * parameters_bytes) as auto:
        for _ in range(STEPS):
            step(model, optimizer)
        assert auto._driver._persistence.memory is None, "everything fits at once"


def test_everything_stays_where_there_is_room_for_it() -> None:
    model = network()
    optimizer = adamw(model)
    with pooch.auto(model, "1GiB", optimizer, tell=lambda _: None) as auto:
        for _ in range(3):
            step(model, optimizer)
        assert auto._driver._persistence.memory is None


def frozen_network() -> nn.Sequential:
    model = network()
    for parameter in model[:-2].parameters():
        parameter.requires_grad_(False)
    return model


def test_what_is_frozen_leaves_at_no_cost_but_once() -> None:
    model = frozen_network()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    frozen_bytes = sum(each.nbytes for each in model.parameters() if not each.requires_grad)
    with held(model, optimizer, 5 * LAYER_BYTES + ROOM_BYTES // 4) as auto:
        for _ in range(6):
            step(model, optimizer)
        moved = memory_of(auto).values.moved
        assert moved.in_bytes["parameter"] > 3 * frozen_bytes
        trained_bytes = sum(each.nbytes for each in model.parameters() if each.requires_grad)
        assert moved.out_bytes["parameter"] <= frozen_bytes + 6 * trained_bytes


# Reads outside of steps -----------------------------------------------------------------------------------------------


@pytest.fixture
def streamed() -> Iterator[tuple[nn.Sequential, torch.optim.Optimizer, Auto, list[bytes]]]:
    """A model of which a part is away, its optimizer, the budget, and what the parameters hold."""
    plain = network()
    plain_optimizer = adamw(plain)
    torch.manual_seed(1)
    for _ in range(2):
        step(plain, plain_optimizer)
    expected = contents(list(plain.parameters()))
    del plain, plain_optimizer
    model = network()
    optimizer = adamw(model)
    with held(model, optimizer, tight(model)) as auto:
        torch.manual_seed(1)
        for _ in range(2):
            step(model, optimizer)
        auto._driver.evictor.relieve()
        assert away(auto) > 2 * LAYERS
        yield model, optimizer, auto, expected


Streamed = tuple[nn.Sequential, torch.optim.Optimizer, Auto, list[bytes]]


def test_a_parameter_that_has_the_id_of_one_that_is_gone_is_looked_at_as_well(streamed: Streamed) -> None:
    auto = streamed[2]
    parts, kept = nn.ModuleList(), []
    seen, again = set[int](), None
    for _ in range(200):
        parameter = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        if id(parameter) in seen:
            again = parameter
            break
        seen.add(id(parameter))
        kept.append(torch.empty(1))  # so that memory is taken in another order
        parts.append(nn.ParameterList([parameter]))
        memory_of(auto).adopt_model(parts)
        del parts[-1], parameter
    assert again is not None
    memory_of(auto).adopt_model(nn.ParameterList([again]))
    assert again._post_accumulate_grad_hooks


def test_a_model_is_saved_one_value_at_a_time(streamed: Streamed, tmp_path: Path) -> None:
    model, optimizer, auto, expected = streamed
    live = auto._driver.evictor.live
    live.reset_peak()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    assert auto.budget_bytes is not None
    assert live.peak() <= auto.budget_bytes < others_bytes + (tmp_path / "checkpoint.pt").stat().st_size
    again = torch.load(tmp_path / "checkpoint.pt")
    assert contents(list(again["model"].values())) == expected


def test_a_state_is_loaded_into_what_is_away(streamed: Streamed) -> None:
    model, optimizer, _, _ = streamed
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    assert not any(parameter.count_nonzero() for parameter in model.parameters())
    step(model, optimizer)


READS: dict[str, Callable[[torch.Tensor], bytes]] = {
    "clone": lambda tensor: tensor.clone().numpy().tobytes(),
    "numpy": lambda tensor: tensor.numpy().tobytes(),
    "view then numpy": lambda tensor: tensor.view(-1).numpy().tobytes(),
    "dlpack": lambda tensor: torch.from_dlpack(tensor.__dlpack__()).clone().numpy().tobytes(),
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)).numpy().tobytes(),
    "deepcopy": lambda tensor: copy.deepcopy(tensor).numpy().tobytes(),
    "untyped_storage": lambda tensor: _by_items(tensor),
    "clone of the storage": lambda tensor: bytes(tensor.untyped_storage().clone().tolist()),
    "address": lambda tensor: _bytes_at(tensor.data_ptr(), tensor.nbytes),
    "address of the storage": lambda tensor: _bytes_at(tensor.untyped_storage().data_ptr(), tensor.nbytes),
    "saved alone": lambda tensor: _saved(tensor).numpy().tobytes(),
    "tolist": lambda tensor: torch.tensor(tensor.tolist()).numpy().tobytes(),
    "copy_": lambda tensor: torch.empty_like(tensor).copy_(tensor).numpy().tobytes(),
    "inference mode": lambda tensor: _inferred(tensor),
    "another thread": lambda tensor: _in_a_thread(lambda: tensor.clone().numpy().tobytes()),
}


def _by_items(tensor: torch.Tensor) -> bytes:
    """Each item takes microseconds, so of a large storage only the first ones and some of the others are read."""
    storage = tensor.untyped_storage()
    if len(storage) <= 4 * WIDTH:  # of a bias
        return bytes(storage.tolist())
    items = dict(enumerate(islice(storage, 1000)))
    items |= {at: storage[at] for at in range(1000, len(storage), 997)}
    whole = bytearray(tensor.numpy().tobytes())
    for at, item in items.items():
        whole[at] = item
    return bytes(whole)


def _bytes_at(address: int, size_bytes: int) -> bytes:
    import ctypes

    return ctypes.string_at(address, size_bytes)


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


def _inferred(tensor: torch.Tensor) -> bytes:
    with torch.inference_mode():
        return (tensor * 1).numpy().tobytes()


def _in_a_thread(read: Callable[[], bytes]) -> bytes:
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(read()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("how", READS)
def test_whoever_reads_what_is_away_gets_it(streamed: Streamed, how: str) -> None:
    model, _, auto, expected = streamed
    found = []
    for parameter in model.parameters():
        auto._driver.evictor.relieve()
        found.append(READS[how](parameter.detach()))
    assert found == expected


def test_what_a_slice_of_a_storage_is_on_stays(streamed: Streamed) -> None:
    model, _, auto, expected = streamed
    weight = model[0].weight
    auto._driver.evictor.relieve()
    assert memory_of(auto).reads.is_away(weight.untyped_storage()._cdata)
    part = weight.detach().untyped_storage()[4:20]
    auto._driver.evictor.relieve()
    assert not memory_of(auto).reads.is_away(weight.untyped_storage()._cdata)
    assert bytes(part.tolist()) == expected[0][4:20]


def test_what_an_array_is_on_stays_as_long_as_the_array(streamed: Streamed) -> None:
    model, optimizer, auto, expected = streamed
    weight = model[0].weight
    array: Any = weight.detach().numpy()
    auto._driver.evictor.relieve()
    assert array.tobytes() == expected[0]
    step(model, optimizer)
    auto._driver.evictor.relieve()
    assert array.tobytes() == contents([weight])[0]
    key = weight.untyped_storage()._cdata
    assert not memory_of(auto).reads.is_away(key)
    del array
    auto._driver.evictor.relieve()
    assert memory_of(auto).reads.is_away(key)


def test_what_safetensors_has_saved_leaves_again(
    streamed: Streamed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the address of each tensor, and needs all of them until the file is written."""
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer, auto, expected = streamed
    write = safetensors.serialize_file

    def under_pressure(*args: Any, **kwargs: Any) -> Any:
        auto._driver.evictor.relieve()
        assert not any(memory_of(auto).reads.is_away(each.untyped_storage()._cdata) for each in weights(model))
        return write(*args, **kwargs)

    monkeypatch.setattr(safetensors, "serialize_file", under_pressure)
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    assert contents([loaded[name] for name in model.state_dict()]) == expected
    step(model, optimizer)
    auto._driver.evictor.relieve()
    assert all(memory_of(auto).reads.is_away(each.untyped_storage()._cdata) for each in weights(model))


def test_addresses_that_are_only_compared_bring_nothing_back(streamed: Streamed) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, _, auto, _ = streamed
    auto._driver.evictor.relieve()
    tensors = {name: each.detach() for name, each in model.named_parameters()}
    weight = tensors["0.weight"]
    shared = {
        **tensors,
        "again": weight.view(-1),
        "first half": weight[: WIDTH // 2],
        "last half": weight[WIDTH // 2 :],
    }
    found = safetensors._find_shared_tensors(shared)
    assert sorted(map(len, found)) == [1] * (len(tensors) - 1) + [4]
    halves = {name: shared[name] for name in ("first half", "last half", "2.weight")}
    assert sorted(map(len, safetensors._find_shared_tensors(halves))) == [1, 1, 1]
    assert all(memory_of(auto).reads.is_away(each.untyped_storage()._cdata) for each in weights(model))


def test_a_program_that_takes_an_address_as_safetensors_does_keeps_it(streamed: Streamed) -> None:
    model, _, auto, _ = streamed

    def _to_ndarray(tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    weight = model[0].weight.detach()
    _to_ndarray(weight)
    auto._driver.evictor.relieve()
    assert not memory_of(auto).reads.is_away(weight.untyped_storage()._cdata)


def test_what_nothing_can_see_is_an_error_and_no_wrong_number(streamed: Streamed) -> None:
    """As a library that reads memory on its own would."""
    model, _, auto, _ = streamed
    auto._driver.evictor.relieve()
    storage = model[0].weight.untyped_storage()
    with pytest.raises(RuntimeError, match="its bytes are away"):
        torch._C.StorageBase.data_ptr(storage)


@pytest.mark.parametrize("what", ["record_shapes", "with_stack"])
def test_a_profiler_that_records_shapes_or_stacks_has_everything_stay_as_long_as_it_runs(what: str) -> None:
    """It takes the addresses of what ops read before anything else hears of these ops."""

    def trained(budget: int | None) -> tuple[list[bytes], list[bool], list[str]]:
        model, told, away = network(), list[str](), list[bool]()
        optimizer = adamw(model)
        torch.manual_seed(1)
        with contextlib.ExitStack() as ends:
            auto: Auto | None = None
            if budget is not None:
                auto = ends.enter_context(pooch.auto(model, budget + others_bytes, optimizer, tell=told.append))
            for number in range(8):
                records = torch.profiler.profile(**{what: number != 2}) if number in (2, 3, 4, 6) else None
                with records or contextlib.nullcontext():
                    model(torch.randn(8, WIDTH)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                away.append(auto is not None and auto._driver._persistence.memory is not None)
        return everything(model, optimizer), away, [line for line in told if "profiler" in line]

    plain, _, _ = trained(None)
    found, away, told = trained(tight(network()))
    assert found == plain
    assert away == [True, True, True, False, False, True, False, True]
    assert len(told) == 1
    assert "record_shapes=False" in told[0]


# Steps ----------------------------------------------------------------------------------------------------------------


def test_ops_on_all_gradients_run_in_parts() -> None:
    """The norm of all gradients is one op on all of them, which would have to be there at once."""

    def losses(budget: int | None) -> tuple[list[float], list[bytes]]:
        model = network()
        optimizer = adamw(model)
        torch.manual_seed(1)
        around = contextlib.nullcontext() if budget is None else held(model, optimizer, budget)
        with around:
            found = []
            for _ in range(STEPS):
                loss = model(torch.randn(8, WIDTH)).square().mean()
                loss.backward()
                found.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item())
                optimizer.step()
                optimizer.zero_grad()
            return found, everything(model, optimizer)

    assert losses(5 * LAYER_BYTES + ROOM_BYTES // 2) == losses(None)


def test_steps_are_planned_with_the_state_away() -> None:
    """What parameters and gradients take leaves room enough, so activations are decided on by a plan."""

    def found(budget: int | None) -> tuple[list[float], list[bytes]]:
        model = network()
        optimizer = adamw(model)
        torch.manual_seed(1)
        losses = []
        around = contextlib.nullcontext() if budget is None else held(model, optimizer, budget)
        with around as auto:
            for _ in range(8):
                loss = model(torch.randn(512, WIDTH)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                while auto is not None and auto.is_planning:
                    time.sleep(0.05)
            if auto is not None:
                moved = memory_of(auto).values.moved
                assert auto.summary().steps_on_plan > 2
                assert moved.in_bytes["state"] > 0
                assert moved.in_bytes["parameter"] + moved.in_bytes["gradient"] <= 4 * LAYER_BYTES  # before the plan
            return losses, everything(model, optimizer)

    assert found(4 * 2**20 + 2**19) == found(None)


def recorded(budget: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Profile, bool]:
    """Return the profile of a step, and whether anything that outlives steps has left or come back in it."""
    model, moves = network(), list[bool]()
    optimizer, end = adamw(model), StepDriver._end
    torch.manual_seed(1)

    def ended(driver: StepDriver, is_complete: bool) -> None:
        running = driver.running
        if running is not None and running.decision == "record":
            moves.append(driver._persistence.moves)
        end(driver, is_complete)

    with monkeypatch.context() as patched, held(model, optimizer, budget) as auto:
        patched.setattr(StepDriver, "_end", ended)
        patched.setattr(PlanRequests, "ask", lambda *_: None)
        for _ in range(3):
            model(torch.randn(512, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        (profile,) = [known.profile for _, known in auto._driver.library._known.items() if known.profile is not None]
    (has_moved,) = moves
    return profile, has_moved


@pytest.mark.parametrize("budget", [2**21 + 3 * 2**19, 2**21 + 2**20])
def test_a_step_is_recorded_as_if_nothing_had_moved_in_it(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, is_moved = recorded(2**28, monkeypatch)
    assert not is_moved
    found, is_moved = recorded(budget, monkeypatch)
    assert is_moved

    def facts(profile: Profile) -> list[object]:
        less = profile.persistent_bytes
        ops = [(op.name, op.reads, op.writes, op.entry_bytes - less, op.peak_bytes - less) for op in profile.ops]
        values = [replace(value, packs=False) for value in profile.values]
        return [profile.peak_bytes - less, ops, values]

    assert facts(found) == facts(plain)


class LeavesRoom:
    """In place of the process that plans: all state that is away is to stay."""

    def start(self) -> None:
        """Do nothing."""

    def ask(self, job: Job) -> Answer:
        assert job.away_bytes or job.known is not None
        answer = done(replace(job, budget_bytes=job.budget_bytes - job.away_bytes, away_bytes=0))
        return replace(answer, staying_bytes=job.away_bytes)

    def end(self) -> None:
        """Do nothing."""


def test_state_that_had_left_stays_once_a_plan_leaves_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without a plan begin without any of it."""
    monkeypatch.setattr(PlanRequests, "_put", PlanRequests.serve)
    monkeypatch.setattr(PlanRequests, "warm_up", lambda _: None)
    monkeypatch.setattr(HostCosts, "begin", lambda _: None)

    def found(budget: int | None) -> tuple[list[float], list[bytes]]:
        model = network()
        optimizer = adamw(model)
        torch.manual_seed(1)
        losses, moved_bytes = [], []
        around = contextlib.nullcontext() if budget is None else held(model, optimizer, budget)
        with around as auto:
            if auto is not None:
                auto._driver.library.requests._child = LeavesRoom()  # type: ignore[assignment]
            for _ in range(8):
                loss = model(torch.randn(512, WIDTH)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if auto is not None:
                    moved_bytes.append(memory_of(auto).values.moved.in_bytes["state"])
            if auto is not None:
                summary = auto.summary()
                assert summary.steps_on_plan > 3
                assert summary.steps_over_budget == 0
                assert moved_bytes[1] > moved_bytes[0]
                assert moved_bytes[-1] == moved_bytes[-3]
            return losses, everything(model, optimizer)

    assert found(6 * 2**20) == found(None)


def test_state_stays_once_steps_fit_with_it() -> None:
    model = network()
    optimizer = adamw(model)
    with pooch.auto(model, tight(model) * 3 + others_bytes, optimizer, quiet=True) as auto:
        model(torch.randn(4096, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(12):
            step(model, optimizer)
        before = memory_of(auto).moved_bytes
        step(model, optimizer)
        assert memory_of(auto).moved_bytes == before > 0


@pytest.mark.parametrize("beside_bytes", [0, 2**25])
def test_only_as_much_state_leaves_as_steps_need(beside_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What of it is used first in the optimizer's step stays, once it is known how much steps take.

    What others hold beside it, however much, is no reason to have more of it leave. How often state comes back within
    a step depends on how soon copies end, so what is away before the optimizer's step counts.
    """
    beside = torch.empty(beside_bytes, dtype=torch.uint8)
    monkeypatch.setattr(sys.modules[__name__], "others_bytes", others_bytes + beside.nbytes)

    def found(budget: int | None) -> list[bytes]:
        model = network()
        optimizer = adamw(model)
        torch.manual_seed(1)
        around = contextlib.nullcontext() if budget is None else held(model, optimizer, budget)
        with around as auto:
            for number in range(14):
                loss = model(torch.randn(8, WIDTH)).square().mean()
                if number == 13 and auto is not None:
                    state = [value for value in memory_of(auto).values if value.kind == "state"]
                    away_bytes = sum(value.size_bytes for value in state if not value.is_here)
                    assert 0 < away_bytes < 0.6 * 2 * LAYERS * LAYER_BYTES
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if auto is not None:
                moved = memory_of(auto).values.moved
                assert moved.in_bytes["parameter"] + moved.in_bytes["gradient"] <= 4 * LAYER_BYTES
        return everything(model, optimizer)

    assert found(int(3.6 * LAYERS * LAYER_BYTES)) == found(None)


def test_gradients_accumulate_and_are_zeroed_in_place() -> None:
    def found(budget: int | None) -> list[bytes]:
        model = network()
        optimizer = adamw(model)
        torch.manual_seed(1)
        around = contextlib.nullcontext() if budget is None else held(model, optimizer, budget)
        with around:
            for _ in range(STEPS):
                for _ in range(3):
                    model(torch.randn(8, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            return everything(model, optimizer)

    assert found(5 * LAYER_BYTES + ROOM_BYTES) == found(None)


def test_a_parameter_that_is_given_other_data_goes_on() -> None:
    def found(budget: int | None) -> list[bytes]:
        model = network()
        optimizer = adamw(model)
        torch.manual_seed(1)
        around = contextlib.nullcontext() if budget is None else held(model, optimizer, budget)
        with around:
            step(model, optimizer)
            for module in model[::4]:
                module.weight.data = module.weight.data * 2
            step(model, optimizer)
            step(model, optimizer)
            return everything(model, optimizer)

    assert found(2 * tight(network())) == found(None)


class Interrupted(BaseException):
    pass


class InterruptedAt(TorchDispatchMode):
    """Raises an error before an op, given its number, if there are so many."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left == 0:
            raise Interrupted
        self.left -= 1
        return func(*args, **(kwargs or {}))


def by_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[bytes]]:
    """What each parameter and its state hold."""
    return [
        contents([parameter, *(optimizer.state[parameter][name] for name in sorted(optimizer.state[parameter]))])
        for parameter in model.parameters()
    ]


def with_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    for _ in range(2):
        step(model, optimizer)
    model(torch.randn(8, WIDTH)).square().mean().backward()


Made = tuple[nn.Module, torch.optim.Optimizer]
Values = list[list[bytes]]


class Slices:
    """A streamed model before a step of its optimizer, as often as wanted, and what is to come of that."""

    def __init__(self, foreach: bool) -> None:
        self.foreach = foreach
        model, optimizer = self.made()
        with_gradients(model, optimizer)
        self.before = by_parameter(model, optimizer)
        optimizer.step()
        self.after = by_parameter(model, optimizer)

    def made(self) -> Made:
        model = network()[:6]
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=self.foreach)

    @contextlib.contextmanager
    def held(self) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Auto]]:
        model, optimizer = self.made()
        with pooch.auto(model, 5 * LAYER_BYTES + 2**18, optimizer, tell=lambda _: None) as auto:
            with_gradients(model, optimizer)
            yield model, optimizer, auto

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, auto: Auto) -> None:
        """Have all be as before the step, and away."""
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), self.before, strict=True):
                state = optimizer.state[parameter]
                tensors = [parameter, *(state[name] for name in sorted(state))]
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(torch.frombuffer(bytearray(value), dtype=tensor.dtype).view_as(tensor))
        auto._driver.evictor.relieve()
        assert away(auto) > 6

    def are_whole(self, found: Values) -> bool:
        """Whether each parameter is with its state as before its slice, or as after it."""
        choices = zip(self.before, self.after, strict=True)
        return all(each in choice for each, choice in zip(found, choices, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
def test_an_interrupt_at_any_op_of_a_slice_leaves_each_parameter_with_its_state(foreach: bool) -> None:
    slices = Slices(foreach)
    undone = 0
    with slices.held() as (model, optimizer, auto):
        for number in range(10_000):
            slices.begin(model, optimizer, auto)
            try:
                with InterruptedAt(number):
                    optimizer.step()
            except Interrupted:
                found = by_parameter(model, optimizer)
                assert slices.are_whole(found)
                undone += found != slices.after
            else:
                break
        assert by_parameter(model, optimizer) == slices.after
        assert number > 20
        assert undone > 10


@pytest.mark.usefixtures("copied_by")
@pytest.mark.parametrize("call", ["preadv", "pwrite"])
def test_a_copy_that_fails_in_any_slice_loses_nothing(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = Slices(foreach=True)
    original = getattr(os, call)
    left = -1

    def fails(*args: Any) -> int:
        nonlocal left
        left -= 1
        if left == -1:
            raise OSError(5, "no such luck")
        return original(*args)

    monkeypatch.setattr(os, call, fails)
    with slices.held() as (model, optimizer, auto):
        failures = 0
        for number in range(10_000):
            left = -2
            slices.begin(model, optimizer, auto)
            left = number
            try:
                optimizer.step()
            except TierError:
                failures += 1
            has_failed, left = left < 0, -2
            found = by_parameter(model, optimizer)
            assert slices.are_whole(found)
            if not has_failed:
                break
        assert found == slices.after
        assert number >= 2
        assert failures == 0  # what cannot be read is read again


@pytest.mark.usefixtures("copied_by")
def test_a_read_that_fails_is_an_error_and_loses_nothing(streamed: Streamed, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _, expected = streamed
    original = os.preadv
    failing = True

    def read(*args: Any) -> int:
        if failing:
            raise OSError(5, "no such luck")
        return original(*args)

    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(TierError):
        model(torch.randn(8, WIDTH))
    failing = False
    assert contents(list(model.parameters())) == expected
    step(model, optimizer)


def test_what_cannot_be_read_at_the_end_is_an_error_and_the_rest_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = adamw(model)
    auto = pooch.auto(model, tight(model), optimizer, tell=lambda _: None)
    step(model, optimizer)
    auto._driver.evictor.relieve()
    values = list(memory_of(auto).values)
    place = values[0].place
    monkeypatch.setattr(type(place), "copy_in", _failing_for(place, type(place).copy_in))
    with pytest.raises(TierError):
        auto.remove()
    assert [value for value in values if not value.is_gone and not value.is_here] == values[:1]
    with pooch.auto(network(), "1GiB", quiet=True):  # nothing is held any more
        pass


def _failing_for(place: Any, original: Any) -> Any:
    class Failed:
        error, copy_ms = OSError(5, "no such luck"), None

        def wait(self) -> float:
            return 0.0

    def copy_in(self: Any, storage: Any) -> Any:
        return Failed() if self is place else original(self, storage)

    return copy_in


def test_a_model_whose_backward_pass_is_not_seen_is_told_once_an_optimizer_steps() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer, other = adamw(model), adamw(nn.Linear(1, 1))
    rows = torch.randn(8, WIDTH)

    def loss_of(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, (rows,)).square().mean()

    told: list[str] = []
    with pooch.auto(model, "1GiB", optimizer, tell=told.append):
        other.step()
        assert not told
        for _ in range(2):
            gradients = torch.func.grad(loss_of)({name: each.detach() for name, each in model.named_parameters()})
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name]
            optimizer.step()
    assert [line for line in told if "Linear" in line and "torch.func" in line] == told
    assert len(told) == 1


def test_sparse_gradients_stay_and_what_else_there_is_leaves() -> None:
    def found(budget: int | None) -> list[bytes]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(1000, WIDTH, mode="sum", sparse=True), network())
        sparse, dense = torch.optim.SparseAdam([*model[0].parameters()]), adamw(model[1])
        torch.manual_seed(1)
        around = contextlib.nullcontext() if budget is None else held(model, dense, budget)
        with around as auto:
            for _ in range(STEPS):
                model(torch.randint(0, 1000, (64, 4))).square().mean().backward()
                for optimizer in (sparse, dense):
                    optimizer.step()
                    optimizer.zero_grad()
            assert auto is None or memory_of(auto).moved_bytes > 0
        return everything(model, dense) + everything(model[0], sparse)

    assert found(6 * 2**20) == found(None)


class Shared(torch.optim.Optimizer):
    """All parameters have the same tensor in their state."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.average = torch.zeros(WIDTH, WIDTH)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 2:
                self.state[parameter]["average"] = self.average.lerp_(parameter.grad, 0.1)
                parameter.sub_(self.average, alpha=0.1)


def test_a_state_of_several_parameters_comes_back_once() -> None:
    def found(budget: int | None) -> list[bytes]:
        model = network()
        optimizer = Shared(model.parameters())
        torch.manual_seed(1)
        around = contextlib.nullcontext() if budget is None else pooch.auto(model, budget, optimizer, quiet=True)
        with around as auto:
            for _ in range(STEPS):
                step(model, optimizer)
            assert auto is None or memory_of(auto).values.moved.in_bytes["parameter"]
        return everything(model, optimizer)

    assert found(tight(network())) == found(None)


def test_an_optimizer_that_keeps_a_list_beside_its_states_is_like_any_other() -> None:
    def found(budget: Callable[[nn.Module], int] | None) -> list[bytes]:
        model = network()
        optimizer = adamw(model)
        optimizer.state["norms"] = [1.0]  # type: ignore[index]
        torch.manual_seed(1)
        with contextlib.nullcontext() if budget is None else held(model, None, budget(model)):
            for _ in range(STEPS):
                step(model, optimizer)
        return everything(model, optimizer)

    assert found(tight) == found(None)


def test_two_threads_that_have_things_leave_at_once_have_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one begins a step and the other is about to step its optimizer."""
    model, begun = network(), threading.Event()
    made: list[Any] = []
    original = pooch.autopilot.persistence.PersistentMemory

    def slowly(*args: Any) -> Any:
        begun.set()
        time.sleep(0.2)  # for as long as the other would need to make one of its own
        return original(*args)

    monkeypatch.setattr(pooch.autopilot.persistence, "PersistentMemory", slowly)
    with pooch.auto(model, 2**30, quiet=True) as auto:
        persistence = auto._driver._persistence
        other = threading.Thread(target=lambda: made.append(persistence._begin([model], 2**30)))
        other.start()
        begun.wait(60)
        made.append(persistence._begin([model], 2**30))
        other.join()
        assert made[0] is made[1] is persistence.memory


def test_what_a_thread_is_about_to_read_as_the_budget_ends_is_read(streamed: Streamed) -> None:
    """As by a thread that logs norms: it waits for what ends the budget, which brings everything back meanwhile."""
    model, _, auto, expected = streamed
    memory, found, errors = memory_of(auto), list[bytes](), list[BaseException]()
    bring_back, waits = memory.bring_back, threading.Event()

    def noted(values: Any) -> None:
        waits.set()
        bring_back(values)

    def read() -> None:
        try:
            found.extend(contents([model[0].weight]))
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    reader = threading.Thread(target=read)
    with memory._evictor.lock:
        memory.bring_back = noted  # type: ignore[method-assign]
        reader.start()
        assert waits.wait(60)
        memory.bring_back = bring_back  # type: ignore[method-assign]
        auto.remove()
    reader.join()
    assert not errors, errors
    assert found == expected[:1]
