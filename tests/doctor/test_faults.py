"""Each fault that is put in is found and named; and without one, nothing is."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pooch.api.doctor import Examination, Finding, examination, examine, tier, training
from pooch.api.doctor.finding import Check, Patient
from pooch.workloads import Workload
from tests.doctor.faults import FAULTS, MISSING, SLOW_LINK_BYTES_PER_MS, Fault, _copy_gives_other_bytes
from tests.executor.fake_streams import Machine, install

CPU = torch.device("cpu")
pytestmark = pytest.mark.cpu
SLOW = ("link", "hooks", "training")  # checks that take long, each looked at by its own tests
NO_LIMIT_S = 1e6  # a busy machine may build native parts for minutes: that is no fault


def examined(*names: str) -> Examination:
    """The findings of some checks, or of all but the slow ones."""
    checks = [check for check in examination.checks_for(CPU) if check.name in names or not names]
    return examine(CPU, limit_s=NO_LIMIT_S, checks=[check for check in checks if names or check.name not in SLOW])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_and_named(fault: Fault, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The disk of a busy machine may be slower than any that is as it should be.
    monkeypatch.setitem(tier.SLOW_BYTES_PER_S, "file", 2 * SLOW_LINK_BYTES_PER_MS * 1000)
    with monkeypatch.context() as patch:
        fault.put(patch, tmp_path)
        found = examined(fault.within)
    assert [each.check for each in found.faults] == [fault.finding], found
    assert fault.says in found.faults[0].text
    assert "\n" not in found.faults[0].text
    assert examined(fault.within).faults == ()


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    found = examined()
    assert found.faults == (), found
    assert {each.check for each in found.findings} >= {fault.finding for fault in FAULTS} - {"link"}


def test_memory_that_cannot_be_locked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(refuse_to_lock=2)
    with monkeypatch.context() as patch:
        install(machine, patch)
        found = examine(CPU, checks=[Check("page-locked memory", tier.try_locking)])
    assert [each.check for each in found.faults] == ["page-locked memory"]
    assert "CUDA error 2" in found.faults[0].text
    machine.refuse_to_lock = 0
    with monkeypatch.context() as patch:
        install(machine, patch)
        found = examine(CPU, checks=[Check("page-locked memory", tier.try_locking)])
    assert found.faults == ()
    assert machine.locked == {}


def only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MODELS", {name: training.MODELS[name]})


def test_a_budget_that_is_passed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something keeps more memory from step to step, as a list of outputs does."""
    only("perceptron with dropout", monkeypatch)
    build = training.MODELS["perceptron with dropout"]

    def leaking(device: torch.device) -> Workload:
        workload = build(device)
        kept: list[torch.Tensor] = []

        def forward() -> torch.Tensor:
            kept.append(torch.ones(2**19, device=device))
            return workload.forward()

        return Workload(workload.model, forward, workload.optimizer)

    monkeypatch.setattr(training, "MODELS", {"leaking": leaking})
    found = examined("training")
    assert [each.check for each in found.faults] == ["training: leaking"]
    assert "the budget was exceeded by" in found.faults[0].text


def test_training_that_gets_other_bits_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only("long skips", monkeypatch)
    assert examined("training").faults == ()
    _copy_gives_other_bytes(monkeypatch, tmp_path)
    found = examined("training")
    assert [each.check for each in found.faults] == ["training: long skips"]
    assert "other bits than plain training where everything is swapped" in found.faults[0].text


def test_training_that_differs_from_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    build = training.MODELS["GRU"]
    drawn = torch.Generator().manual_seed(1)

    def varying(device: torch.device) -> Workload:
        workload = build(device)
        return Workload(
            workload.model, lambda: workload.forward() + torch.rand((), generator=drawn), workload.optimizer
        )

    monkeypatch.setattr(training, "MODELS", {"varying": varying})
    (found,) = examined("training").findings
    assert found.status == "told"
    assert "differs from itself" in found.text


def test_a_check_that_breaks_down_is_a_fault_and_the_others_go_on() -> None:
    def broken(patient: Patient) -> Iterator[Finding]:
        yield Finding("first", "passed", "was there")
        raise RuntimeError("the driver is gone\nfor good")

    after = Check("after", lambda patient: iter([Finding("after", "passed", "")]))
    found = examine(CPU, checks=[Check("broken", broken), after])
    assert [each.check for each in found.findings] == ["first", "broken", "after"]
    assert found.faults[0].text == "RuntimeError: the driver is gone"


def test_a_check_that_never_ends_is_interrupted_and_named() -> None:
    """The timer of the examination is not waited for: its signal is sent here."""

    def waits(patient: Patient) -> Iterator[Finding]:
        yield Finding("first", "passed", "was there")
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        os.kill(os.getpid(), signal.SIGALRM)
        threading.Event().wait(60)

    before = signal.getsignal(signal.SIGALRM)
    timer = signal.setitimer(signal.ITIMER_REAL, 0)  # that of the test, which would be left alone
    try:
        found = examine(CPU, checks=[Check("a file system that does not answer", waits)])
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
    assert [each.check for each in found.faults] == ["a file system that does not answer"]
    assert "did not end in time" in found.faults[0].text
    assert "on an idle machine" in found.faults[0].text
    assert signal.getsignal(signal.SIGALRM) is before


def test_what_needs_a_part_that_failed_is_not_run_and_the_cause_is_named_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POOCH_SPILL_DIRECTORY", MISSING)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("POOCH_CACHE_DIRECTORY", str(tmp_path))
    found = examined("compiler", "native parts", "spill directory", "copies", "link", "hooks", "training")
    assert [each.check for each in found.causes] == ["compiler", "spill directory"]
    assert {each.status for each in found.findings} == {"failed", "not run"}


def test_what_there_was_no_time_for_is_not_passed() -> None:
    found = examine(CPU, limit_s=0)
    assert {each.status for each in found.findings} == {"not run"}
    assert len(found.faults) == len(found.findings)


def test_the_programs_random_numbers_go_on_as_if_nothing_had_been() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    examined("random numbers", "operators")
    assert torch.equal(torch.rand(3), expected)


def test_a_directory_in_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "_file_system", lambda path: "tmpfs")
    (found,) = examined("spill directory").findings
    assert found.status == "told"
    assert "frees nothing" in found.text
