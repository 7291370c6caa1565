"""A spill directory that is missing, full, forbidden, broken or slow: one line names it, and training goes on."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pooch
from pooch.autopilot import Auto
from pooch.autopilot.requests import PlanRequests
from pooch.errors import PlanMismatch, TierError
from pooch.executor import apply_plan, native_watch
from pooch.executor.engines import spill_file
from pooch.executor.planned_values import PlannedValues
from pooch.executor.recording import CallRecorder
from pooch.executor.table import ActionTable
from pooch.torchtools.memory_trace import live_bytes
from tests.executor.copiers import copy_threads
from tests.executor.online.zoo import Layers, rows
from tests.executor.support import all_of, assert_same, quick_profile, tight_plan

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("copied_by")]
ROWS, DEPTH = 512, 8
ACTIVATION_BYTES = ROWS * 64 * 4
ENOUGH_BYTES = 9 * ACTIVATION_BYTES  # for the gradients, and for what replays need: about half of the activations
CPU = torch.device("cpu")
Found = dict[str, Tensor]
Between = Callable[[int], None]


@pytest.fixture(autouse=True)
def no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about the tier."""
    monkeypatch.setattr(PlanRequests, "ask", lambda *_: None)
    monkeypatch.setattr(PlanRequests, "warm_up", lambda *_: None)


@pytest.fixture
def spill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    directory = tmp_path / "spill"
    directory.mkdir()
    monkeypatch.setenv("POOCH_SPILL_DIRECTORY", str(directory))
    return directory


def a_model() -> nn.Module:
    torch.manual_seed(1)
    return Layers(lambda hidden: functional.dropout(torch.tanh(hidden).exp().sin(), 0.1), depth=DEPTH)


def nothing(_: int) -> None:
    pass


def train(model: nn.Module, steps: int = 6, between: Between = nothing) -> Found:
    torch.manual_seed(2)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []
    for number in range(steps):
        between(number)
        loss = model(rows(ROWS)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return state | {"losses": torch.stack(losses), "random state": torch.get_rng_state()}


@contextmanager
def under(model: nn.Module, told: list[str], room_bytes: int = ENOUGH_BYTES) -> Iterator[Auto]:
    gc.collect()
    state_bytes = 3 * sum(parameter.nbytes for parameter in model.parameters())  # with gradients and momentum
    with Auto([model], live_bytes(CPU) + state_bytes + room_bytes, tell=told.append) as auto:
        yield auto


def of_the_tier(told: list[str], directory: Path) -> list[str]:
    assert all("\n" not in line for line in told)
    return [line for line in told if str(directory) in line]


def fails(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> list[int]:
    """Let a system call on spill files fail from now on, and count how often it does."""
    hits: list[int] = []

    def failing(*_: Any, **__: Any) -> Any:
        hits.append(code)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(spill_file.os, name, failing)
    return hits


# At the start --------------------------------------------------------------------------------------------------------


def test_a_missing_directory_is_told_before_the_first_step_and_the_budget_is_held(spill: Path) -> None:
    plain, told = train(a_model()), []
    spill.rmdir()
    model = a_model()
    with under(model, told) as auto:
        assert of_the_tier(told, spill) == told
        assert len(told) == 1
        assert told[0].startswith(
            f"the spill directory {spill} is missing: create it, or choose another with POOCH_SPILL_DIRECTORY"
        )
        found = train(model)
        summary = auto.summary()
    assert_same(plain, found)
    assert summary.steps_over_budget == 0
    assert summary.recomputed_ops
    assert len(of_the_tier(told, spill)) == 1


def test_a_share_of_the_first_step_is_held_without_a_tier_too(spill: Path) -> None:
    """The first step is run to know its peak. It replays like the later ones, so its peak is computed."""
    plain, told = train(a_model()), []
    with under(a_model(), []) as auto:
        train(next(iter(auto._driver.governed.living)))
    model = a_model()
    gc.collect()
    with Auto([model], "80%", tell=lambda _: None) as auto:
        train(model)
        healthy_bytes = auto.budget_bytes
    del model
    spill.rmdir()
    model = a_model()
    gc.collect()
    with Auto([model], "80%", tell=told.append) as auto:
        found = train(model)
        summary = auto.summary()
    assert_same(plain, found)
    assert summary.steps_over_budget == 0
    assert auto.budget_bytes == pytest.approx(healthy_bytes, rel=0.01)


WRONG: dict[str, tuple[str, int, str]] = {
    "read-only": ("open", errno.EROFS, "is read-only (Read-only file system): mount it for writing"),
    "forbidden": ("open", errno.EACCES, r"may not be written by this user (Permission denied): change its permissions"),
    "descriptors": ("open", errno.EMFILE, "takes no further file, as too many are open"),
    "full": ("posix_fallocate", errno.ENOSPC, "is full, with"),
    "quota": ("posix_fallocate", errno.EDQUOT, "takes no more than its quota"),
    "file size": ("posix_fallocate", errno.EFBIG, "takes no file as large as needed"),
    "broken": ("pwrite", errno.EIO, "has I/O errors (Input/output error): check the disk"),
    "full when written": ("pwrite", errno.ENOSPC, "is full, with"),
}


@pytest.mark.parametrize("when", ["at the start", "in training"])
@pytest.mark.parametrize("what", WRONG)
def test_each_fault_is_named_once_and_the_budget_is_held(
    what: str, when: str, spill: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, told, call = train(a_model()), [], WRONG[what]
    model, hits = a_model(), []

    def between(number: int) -> None:
        if number == 2:
            hits.append(fails(patch, call[0], call[1]))
            auto._driver.evictor.engine._free["step"].clear()  # type: ignore[attr-defined]

    with monkeypatch.context() as patch:
        if when == "at the start":
            hits.append(fails(patch, call[0], call[1]))
        with under(model, told) as auto:
            found = train(model, between=between if when == "in training" else nothing)
            summary = auto.summary()
    assert hits[0]
    assert_same(plain, found)
    lines = of_the_tier(told, spill)
    assert call[2] in lines[0]
    assert "choose another with POOCH_SPILL_DIRECTORY" in lines[0]
    if when == "at the start":
        assert len(lines) == 1
        assert summary.steps_over_budget == 0
    else:  # the step that meets it may be in the middle of a copy, and says how much that was
        assert len(lines) <= 2
        assert summary.steps_over_budget <= 1


def test_a_directory_instead_of_which_there_is_a_file(spill: Path) -> None:
    told: list[str] = []
    spill.rmdir()
    spill.touch()
    model = a_model()
    with under(model, told):
        train(model, 1)
    assert told[0].startswith(f"the spill directory {spill} is not a directory: choose another with")


def test_a_name_that_would_steer_a_terminal_is_written_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[str] = []
    monkeypatch.setenv("POOCH_SPILL_DIRECTORY", str(tmp_path / "a\nb\x1b[31m"))
    with under(a_model(), told):
        pass
    assert len(told) == 1
    assert "a\\nb\\x1b[31m is missing" in told[0]


# Over the budget -----------------------------------------------------------------------------------------------------


def test_what_has_to_stay_is_told_with_the_tier_as_its_cause(spill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallRecorder, "_keep", lambda *_: None)  # nothing can be replayed
    plain, told = train(a_model()), []
    spill.rmdir()
    model = a_model()
    with under(model, told) as auto:
        found = train(model)
        summary = auto.summary()
    assert_same(plain, found)
    assert summary.steps_over_budget == summary.steps
    over = [line for line in told if "over the budget" in line]
    assert len(over) == 1
    excess = over[0].split(" over the budget")[0].split(", ")[1]
    assert f": {excess} of activations could not leave, as the spill directory {spill} is missing: create it" in over[0]
    assert "parameters" not in over[0]


def test_a_host_budget_that_is_too_small_is_named_as_the_cause(spill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallRecorder, "_keep", lambda *_: None)
    model, told = a_model(), []
    gc.collect()
    with Auto([model], live_bytes(CPU) + ENOUGH_BYTES, host_budget=2 * ACTIVATION_BYTES, tell=told.append):
        train(model, 3)
    over = [line for line in told if "over the budget" in line]
    assert len(over) == len(told) == 1
    assert "could not leave, as the swap tier is limited to" in over[0]
    assert "raise the host budget" in over[0]


def test_a_tier_that_works_again_is_used_again(spill: Path) -> None:
    plain, told, swapped = train(a_model(), 14), [], []
    spill.rmdir()
    model = a_model()

    def between(number: int) -> None:
        swapped.append(auto._driver.counters.swapped_bytes)
        if number == 2:
            spill.mkdir()

    with under(model, told) as auto:
        found = train(model, 14, between)
        assert swapped[2] == 0 < auto.summary().swapped_bytes
    assert_same(plain, found)
    assert len([line for line in told if not line.startswith("steps of ")]) == 1


# Plans ---------------------------------------------------------------------------------------------------------------


def swapping_plan(model: nn.Module, inputs: Tensor) -> Any:
    profile = quick_profile(lambda: model(inputs).square().mean(), model)
    return tight_plan(profile, all_of(profile, "swap", "model"), "model")


def test_a_plan_whose_tier_is_missing_is_refused_in_one_line(spill: Path) -> None:
    model = a_model()
    plan = swapping_plan(model, rows(ROWS))
    spill.rmdir()
    with pytest.raises(TierError, match=f"^the spill directory {spill} is missing: create it, or choose") as caught:
        apply_plan(plan, model)
    assert "\n" not in str(caught.value)


def test_a_step_of_a_plan_for_which_there_is_no_room_keeps_its_activations(spill: Path) -> None:
    """Two forward passes before a backward pass need two files, and the plan was made for one."""
    model, inputs = a_model(), rows(ROWS)
    plan = swapping_plan(model, inputs)
    plan = replace(plan, budget_bytes=plan.predicted_peak_bytes)
    torch.manual_seed(3)
    losses = model(inputs).square().mean() + model(inputs).square().mean()
    expected = torch.autograd.grad(losses, list(model.parameters()))
    found = []
    with warnings.catch_warnings(record=True) as told, apply_plan(plan, model) as run:
        warnings.simplefilter("always")
        shutil.rmtree(spill)
        for _ in range(2):
            torch.manual_seed(3)
            losses = model(inputs).square().mean() + model(inputs).square().mean()  # the first has a file already
            assert run.stats.kept_bytes == plan.schedule.host_bytes
            found.append(torch.autograd.grad(losses, list(model.parameters())))
            del losses
    spill.mkdir()
    assert all(all(map(torch.equal, expected, each)) for each in found)
    lines = [str(each.message) for each in told if str(spill) in str(each.message)]
    assert len(lines) == 2
    assert lines[0].startswith(f"the spill directory {spill} is missing: create it, or choose another with")
    assert " over the budget of " in lines[1]
    assert f" that the plan swaps stayed, as the spill directory {spill} is missing; create it" in lines[1]


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_profile_is_not_made_from_copies_that_failed(call: str, spill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = a_model(), rows(ROWS)
    with monkeypatch.context() as patch:
        assert fails(patch, call, errno.EIO) == []
        with pytest.raises(TierError, match=f"^the spill directory {spill} has I/O errors") as caught:
            pooch.profile(lambda: model(inputs).square().mean(), model)
    assert "\n" not in str(caught.value)


def test_a_profile_without_a_directory(spill: Path) -> None:
    model, inputs = a_model(), rows(ROWS)
    spill.rmdir()
    with pytest.raises(TierError, match=f"^the spill directory {spill} is missing: create it"):
        pooch.profile(lambda: model(inputs).square().mean(), model)


def test_a_profile_is_measured_with_the_room_that_there_is(spill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = os.posix_fallocate, []

    def small(descriptor: int, begin: int, size_bytes: int) -> None:
        if size_bytes > 70 * 2**20:
            refused.append(size_bytes)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, begin, size_bytes)

    monkeypatch.setattr(spill_file.os, "posix_fallocate", small)
    model, inputs = a_model(), rows(ROWS)
    profile = pooch.profile(lambda: model(inputs).square().mean(), model)
    assert refused
    assert profile.link.out_bytes_per_ms > 0


# Slow ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["auto", "apply"])
def test_a_tier_that_becomes_slow_is_told_once_with_both_rates(
    way: str, spill: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CallRecorder, "_keep", lambda *_: None)  # everything that leaves is copied
    real, slow = os.pwrite, []

    def slowed(*given: Any) -> int:
        if slow:
            slow.append(1)
            time.sleep(0.04)
        return real(*given)

    monkeypatch.setattr(spill_file.os, "pwrite", slowed)

    def between(number: int) -> None:
        if number == 5:
            slow.append(0)

    model, told = a_model(), []
    if way == "auto":
        with under(model, told):
            train(model, 9, between)
    else:
        plan = swapping_plan(model, rows(ROWS))
        with pytest.warns(UserWarning, match="is slow") as warned, apply_plan(plan, model):
            train(model, 9, between)
        told = [str(each.message) for each in warned]
    assert len(slow) > 16
    lines = [line for line in told if "is slow" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"the spill directory {spill} is slow: copies to it run at ")
    assert lines[0].count("iB/s") == 2
    assert "choose another with POOCH_SPILL_DIRECTORY" in lines[0]


def test_a_process_that_stood_still_is_not_a_slow_tier(spill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after SIGSTOP: few copies last long."""
    real, count = os.pwrite, []

    def stopped(*given: Any) -> int:
        count.append(1)
        if len(count) in (60, 61):
            time.sleep(0.7)
        return real(*given)

    monkeypatch.setattr(spill_file.os, "pwrite", stopped)
    model, told = a_model(), []
    with under(model, told):
        train(model, 9)
    assert len(count) > 61
    assert told == []


# A plan that is none for the step ------------------------------------------------------------------------------------


PADDED = {"bytes": 0}


@torch.library.custom_op("pooch_tests::padded", mutates_args=())
def padded(argument: Tensor) -> Tensor:
    """Gives the same values in a storage that may be larger than they are."""
    more = PADDED["bytes"] // argument.element_size()
    result = argument.new_empty(argument.numel() + more)[: argument.numel()].view_as(argument)
    return result.copy_(argument)


padded.register_autograd(lambda ctx, gradient: gradient)


def follow_a_plan_that_swaps(auto: Auto) -> Any:
    """Give the kind of step that was recorded a plan under which everything is swapped."""
    known = next(each for each in auto._driver.library._known.values() if each.profile is not None)
    assert known.profile is not None
    known.plan = tight_plan(known.profile, all_of(known.profile, "swap", "step"), "step")
    known.table = ActionTable.of(known.plan)
    return known


def test_a_step_that_its_plan_does_not_fit_goes_on_without_it(spill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of an op come in a larger storage than planned, which nothing in the op's results shows."""

    def padding_model() -> nn.Module:
        torch.manual_seed(1)
        return Layers(lambda hidden: torch.tanh(padded(hidden).sin()), depth=DEPTH)

    monkeypatch.setitem(PADDED, "bytes", 0)
    plain, told, decisions, shapes = train(padding_model(), 7), [], [], list[str]()
    model = padding_model()

    def between(number: int) -> None:
        decisions.append([known.decision for known in auto._driver.library._known.values()][-1:])
        if number == 2:
            follow_a_plan_that_swaps(auto)
        PADDED["bytes"] = 2**15 if number == 4 else 0
        shapes.extend(str(auto.summary()).splitlines()[-1:])

    with under(model, told, 14 * ACTIVATION_BYTES) as auto:
        found = train(model, 7, between)
        summary = auto.summary()
    assert_same(plain, found)
    assert summary.steps_on_plan >= 2
    assert summary.steps_left_plan == 1
    assert ["on a plan that the last one has left" in each for each in shapes] == [number == 5 for number in range(7)]
    assert summary.steps_over_budget == 0
    assert len(told) == 1
    assert "a step could not follow its plan, and is recorded and planned again: value" in told[0]
    assert summary.steps_recorded == 2  # the first one, and the one after that step


def test_a_value_that_a_plan_has_lost_ends_one_step_and_not_the_next(
    spill: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, told = train(a_model(), 7), []
    model, lost = a_model(), []
    real = PlannedValues.ensure

    def ensure(actions: PlannedValues, record: Any) -> Any:
        if lost == ["now"]:
            lost.append("raised")
            raise PlanMismatch("the backward pass needs value 7 again")
        return real(actions, record)

    monkeypatch.setattr(PlannedValues, "ensure", ensure)
    monkeypatch.setattr(native_watch, "native_actions", lambda *_: None)  # which read what is there by themselves

    def between(number: int) -> None:
        if number == 2:
            follow_a_plan_that_swaps(auto)
        if number == 4:
            lost.append("now")
            state = torch.get_rng_state()
            with pytest.raises(PlanMismatch, match=r"^the backward pass needs value 7 again$"):
                model(rows(ROWS)).square().mean().backward()
            model.zero_grad()
            torch.set_rng_state(state)

    with under(model, told, 14 * ACTIVATION_BYTES) as auto:
        found = train(model, 7, between)
        summary = auto.summary()
    assert lost == ["now", "raised"]
    assert_same(plain, found)
    assert [line for line in told if "could not follow its plan" in line] == told
    assert len(told) == 1
    assert summary.steps_recorded == 2


def test_whatever_ends_the_making_of_a_run_its_engine_is_closed(spill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model()
    plan = swapping_plan(model, rows(ROWS))
    for error in (KeyboardInterrupt, ValueError, TierError):
        threads = copy_threads()

        def interrupted(*_: Any, raised: type[BaseException] = error, before: int = threads, **__: Any) -> None:
            assert copy_threads() == before + 1
            raise raised("now")

        monkeypatch.setattr("pooch.executor.run.Attachment", interrupted)
        with pytest.raises(error, match="now"):
            apply_plan(plan, model)
        assert copy_threads() == threads
