"""`budget="auto"`: what is free, less a margin, followed while others come and go on the same device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import pooch
from pooch.autopilot import Auto, auto
from pooch.autopilot import autopilot as of_autopilot
from pooch.autopilot.requests import PlanRequests
from pooch.errors import UsageError
from pooch.ground import messages
from pooch.ir import Profile
from pooch.torchtools import free_budget as of_free
from pooch.torchtools.free_budget import FreeBudget, less_a_margin
from pooch.torchtools.memory_trace import live_bytes
from tests.autopilot.stepping import stepped
from tests.executor.online.zoo import WIDTH, Layers
from tests.executor.support import quick_profile

MEBIBYTE = 2**20
CPU = torch.device("cpu")
has_cuda = torch.cuda.is_available()
device = torch.device("cuda" if has_cuda else "cpu")


class Others:
    """What others leave of a device: the free bytes that are found."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.looks = 0

    def found(self, _: torch.device) -> int:
        self.looks += 1
        return self.free_bytes


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[Others]:
    found = Others(512 * MEBIBYTE)
    monkeypatch.setattr(of_free, "free_bytes", found.found)
    monkeypatch.setattr(PlanRequests, "ask", lambda *_: None)
    monkeypatch.setattr(PlanRequests, "warm_up", lambda *_: None)
    return found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(messages, "tell", lines.append)
    return lines


def a_job(rows: int = 4096) -> tuple[torch.nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = Layers(torch.tanh, depth=5).to(device)
    inputs = torch.randn(rows, WIDTH, device=device)
    return model, lambda: model(inputs).square().mean()


def peak_of(held: Auto) -> int:
    peak_bytes = held._driver.last.peak_bytes
    assert peak_bytes is not None
    return peak_bytes


@pytest.mark.cpu
def test_a_margin_is_a_sixteenth_and_neither_little_nor_much() -> None:
    assert less_a_margin(16 * 2**30) == FreeBudget(15 * 2**30, 2**30)
    assert less_a_margin(80 * 2**30) == FreeBudget(79 * 2**30, 2**30)
    assert less_a_margin(4 * 2**30) == FreeBudget(15 * 2**28, 2**28)
    assert less_a_margin(256 * MEBIBYTE) == FreeBudget(192 * MEBIBYTE, 64 * MEBIBYTE)
    assert less_a_margin(2 * MEBIBYTE) == FreeBudget(MEBIBYTE, MEBIBYTE)
    assert less_a_margin(0).size_bytes == 1


@pytest.mark.cpu
def test_what_others_take_in_mid_training_is_left_to_them(others: Others) -> None:
    model, forward = a_job()
    plain = stepped(forward, model)
    lines: list[str] = []
    with auto(model, "auto", tell=lines.append) as held:
        before = stepped(forward, model)
        peak = peak_of(held)
        room_bytes = live_bytes(device) + others.free_bytes
        assert held.budget_bytes == pytest.approx(less_a_margin(room_bytes).size_bytes, abs=MEBIBYTE)
        rise = peak - live_bytes(device)
        others.free_bytes = int(1.6 * rise)  # of which half is the margin
        after = stepped(forward, model)
        assert held.budget_bytes is not None
        assert peak_of(held) <= held.budget_bytes < peak
        first_line = str(held.summary()).splitlines()[0]
        assert "Budget held in both steps: peak " in first_line
        assert " by now" in first_line
        others.free_bytes = 512 * MEBIBYTE
        last = stepped(forward, model)
        assert peak_of(held) == pytest.approx(peak, abs=MEBIBYTE)
    assert all(torch.equal(*pair) for found in (before, after, last) for pair in zip(plain, found, strict=True))
    budgets = [line for line in lines if line.startswith("the budget is ")]
    assert len(budgets) == 3
    assert "what is free now, less a margin of 64.00 MiB" in budgets[0]
    assert all("what is free by now" in line for line in budgets[1:])


@pytest.mark.cpu
def test_small_changes_change_nothing_and_changes_are_not_told_for_ever(others: Others) -> None:
    model, forward = a_job(64)
    lines: list[str] = []
    with auto(model, "auto", tell=lines.append) as held:
        first = held.budget_bytes
        others.free_bytes -= 8 * MEBIBYTE
        stepped(forward, model)
        assert held.budget_bytes == first
        assert others.looks > 1
        for turn in range(600):
            others.free_bytes = (256 if turn // 16 % 2 else 512) * MEBIBYTE
            stepped(forward, model)
        assert held.budget_bytes != first
    assert 5 < len(lines) < 15
    assert sum("not told" in line for line in lines) == 1


@pytest.mark.cpu
def test_a_step_for_which_nothing_is_left_is_told_in_one_line(others: Others) -> None:
    model, forward = a_job()
    lines: list[str] = []
    with auto(model, "auto", tell=lines.append):
        stepped(forward, model)
        others.free_bytes = 0
        for _ in range(3):
            stepped(forward, model)
    assert sum("over the budget" in line for line in lines) == 1


@pytest.mark.cpu
def test_plans_are_made_for_what_is_free(others: Others, told: list[str]) -> None:
    model, forward = a_job()
    profile: Profile = quick_profile(forward, model)
    plan = pooch.plan(profile, "auto")
    assert plan.budget_bytes == less_a_margin(live_bytes(device) + others.free_bytes).size_bytes
    assert told == [f"the budget is {less_a_margin(live_bytes(device) + others.free_bytes).told('what is free now')}"]
    modelled = replace(profile, device=replace(profile.device, modelled=True, memory_bytes=8 * 2**30))
    assert pooch.plan(modelled, "AUTO").budget_bytes == 8 * 2**30 - 2**29
    if not has_cuda:
        elsewhere = replace(profile, device=replace(profile.device, kind="cuda"))
        with pytest.raises(UsageError, match="there is none here: give bytes"):
            pooch.plan(elsewhere, "auto")
    with pytest.raises(UsageError, match="cannot be 'auto'"):
        pooch.max_batch(lambda size: None, budget="auto")


# On a card ------------------------------------------------------------------------------------------------------------


@contextmanager
def taken_from_the_card(size_bytes: int) -> Iterator[None]:
    """Take memory of the card as another program would."""
    runtime = ctypes.CDLL(None)
    pointer = ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size_bytes)) == 0
    try:
        yield
    finally:
        runtime.cudaFree(pointer)


@pytest.mark.gpu
@pytest.mark.whole_card
@pytest.mark.skipif(not has_cuda, reason="no CUDA device")
def test_half_of_a_card_is_taken_in_mid_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanRequests, "ask", lambda *_: None)
    model, forward = a_job(32768)
    plain = stepped(forward, model)
    torch.cuda.empty_cache()
    with taken_from_the_card(torch.cuda.mem_get_info()[0] - 320 * MEBIBYTE):
        lines: list[str] = []
        with auto(model, "auto", tell=lines.append) as held:
            first = held.budget_bytes
            assert first is not None
            assert first < torch.cuda.memory_reserved() + 320 * MEBIBYTE
            found = [stepped(forward, model)]
            base, peak = torch.cuda.memory_allocated(), peak_of(held)
            torch.cuda.empty_cache()
            with taken_from_the_card(first - base - (peak - base) * 3 // 4):
                for _ in range(3):
                    found.append(stepped(forward, model))
                    assert held.budget_bytes < peak
                    _is_within_what_is_left(held, lines)
            found.append(stepped(forward, model))
            assert held.budget_bytes > peak
    assert all(torch.equal(*pair) for each in found for pair in zip(plain, each, strict=True))


def _is_within_what_is_left(held: Auto, lines: list[str]) -> None:
    assert held.budget_bytes is not None
    rounding_bytes = 4 * MEBIBYTE  # of large blocks, which the allocator does not split
    is_told = any("over the budget" in line for line in lines)
    assert peak_of(held) <= held.budget_bytes + rounding_bytes or is_told
    assert held.budget_bytes + rounding_bytes <= torch.cuda.memory_reserved() + torch.cuda.mem_get_info()[0]


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda, reason="what does not fit goes elsewhere on a CUDA device alone")
def test_a_budget_that_windows_driver_would_spill_is_told(others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    others.free_bytes = 64 * MEBIBYTE
    monkeypatch.setattr(of_autopilot, "free_bytes", others.found)
    for release, budget_bytes, tells in (
        ("6.8.0-generic", 256 * MEBIBYTE, False),
        ("6.6.87.2-microsoft-standard-WSL2", 256 * MEBIBYTE, True),
        ("6.6.87.2-microsoft-standard-WSL2", 48 * MEBIBYTE, False),
    ):
        monkeypatch.setattr("platform.release", lambda release=release: release)
        lines: list[str] = []
        model, _ = a_job(64)
        with auto(model, live_bytes(device) + budget_bytes, tell=lines.append):
            pass
        assert any("Windows' driver" in line and "budget='auto'" in line for line in lines) == tells
