"""Faults of a device with streams are found and named; without one, nothing is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pooch.api.doctor import Examination, basics, examination, examine, training
from pooch.api.manual import plan_from_decisions
from pooch.executor.engines.streams import StreamArena
from pooch.ir import Decisions, Plan, Profile
from pooch.torchtools import accelerators, cuda_only
from tests.doctor.from_a_wheel import Installed, assert_nothing_is_wrong
from tests.simulated_cuda.mistakes import is_simulated, take_mistakes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NAMES = ("clocks", "memory counters", "random numbers", "page-locked memory", "copies")


def examined(*names: str) -> Examination:
    device = torch.device("cuda", 0)
    return examine(device, checks=[check for check in examination.checks_for(device) if check.name in names])


def _no_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamArena, "await_copy", lambda arena, event: None)


def _no_lock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_only, "lock_pages", lambda *_: 2)


def _other_bytes(patch: pytest.MonkeyPatch) -> None:
    real = StreamArena.copy_in

    def flipping(arena: StreamArena, storage: torch.UntypedStorage, offset_bytes: int) -> Any:
        ticket = real(arena, storage, offset_bytes)
        ticket.wait()
        torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)[:1].bitwise_xor_(1)
        return ticket

    patch.setattr(StreamArena, "copy_in", flipping)


def _state_is_not_set(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(accelerators, "_restoring", lambda device, snapshot: (lambda state: None, None))


def _counter_is_wrong(patch: pytest.MonkeyPatch) -> None:
    real = accelerators.peak_allocated_bytes
    patch.setattr(accelerators, "peak_allocated_bytes", lambda device: real(device) + 512)


def _clock_is_wrong(patch: pytest.MonkeyPatch) -> None:
    real = basics._device_interval_ms
    patch.setattr(basics, "_device_interval_ms", lambda device: (real(device)[0], 10 * real(device)[0] + 100))


@pytest.mark.parametrize(
    ("within", "finding", "put"),
    [
        ("copies", "order of copies", _no_wait),
        ("copies", "copied bytes", _other_bytes),
        ("page-locked memory", "page-locked memory", _no_lock),
        ("random numbers", "random numbers", _state_is_not_set),
        ("memory counters", "memory counters", _counter_is_wrong),
        ("clocks", "clocks", _clock_is_wrong),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_fault_is_found_and_named(
    within: str, finding: str, put: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        put(patch)
        found = examined(within)
    assert [each.check for each in found.faults] == [finding], found
    if is_simulated():
        assert (take_mistakes() != []) == (put is _no_wait)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    found = examined(*NAMES)
    assert found.faults == (), found
    assert len(found.findings) == len(NAMES) + 1  # copies: the bytes and their order


@pytest.mark.parametrize("allowed", [True, False])
def test_checksums_of_replays_are_no_fault(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run tells them as well. Which of a few kilobytes a plan replays depends on times that were measured."""

    def tight(profile: Profile) -> Plan:
        decisions: Decisions = training._all(profile, "swap")
        decisions[list(decisions)[2]] = "recompute"  # it is compared where the step needs the most
        least_bytes = plan_from_decisions(profile, decisions, region="step").predicted_peak_bytes
        return plan_from_decisions(profile, decisions, budget=least_bytes, region="step")

    name = "perceptron with dropout"
    monkeypatch.setattr(training, "MODELS", {name: training.MODELS[name]})
    monkeypatch.setattr(training, "_within_budget", tight)
    if not allowed:
        monkeypatch.setattr(training, "CHECKSUM_BYTES", 0)
    (found,) = examined("training").findings
    assert found.status == ("told" if allowed else "failed"), found
    assert ("for checksums of replays alone" in found.text) == allowed


@pytest.mark.slow
def test_it_examines_the_device_from_a_wheel_in_an_empty_folder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert_nothing_is_wrong(Installed(tmp_path, tmp_path_factory).doctor("cuda"), "cuda:0")
