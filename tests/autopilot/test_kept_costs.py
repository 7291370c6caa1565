"""What copies and hooks cost, kept from one run to the next."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from pooch.autopilot import kept_costs
from pooch.autopilot.costs import HostCosts
from pooch.autopilot.kept_costs import ANEW_VARIABLE, KEPT_S, KeptCosts
from pooch.ir import HookCosts, Link
from pooch.machine import CopySpeed
from tests.toys import blocks

CPU = torch.device("cpu")
FOUND = Link("a tier", 0.5, 0.25, 2e6, 4e6), HookCosts(op_ms=0.125, adds_in_place=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POOCH_CACHE_DIRECTORY", str(tmp_path))
    monkeypatch.delenv(ANEW_VARIABLE, raising=False)
    return tmp_path / "costs"


def test_what_was_measured_is_found_by_the_next_run_and_by_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert KeptCosts(CPU, "a tier").find() is None
    KeptCosts(CPU, "a tier").keep(FOUND)
    assert KeptCosts(CPU, "a tier").find() == FOUND
    assert KeptCosts(CPU, "another tier").find() is None
    with monkeypatch.context() as patched:
        patched.setenv("POOCH_NATIVE_WATCH", "0")
        assert KeptCosts(CPU, "a tier").find() is None
    with monkeypatch.context() as patched:
        patched.setattr(kept_costs, "VERSION", "0.0.1")
        assert KeptCosts(CPU, "a tier").find() is None
    with monkeypatch.context() as patched:
        patched.setenv(ANEW_VARIABLE, "1")
        assert KeptCosts(CPU, "a tier").find() is None
    assert len(list(folder.iterdir())) == 1


def test_what_a_thread_with_fewer_threads_of_pytorch_keeps_is_found_by_the_next_run(folder: Path) -> None:
    """What measures is a thread of its own, to which `torch.set_num_threads` of the program does not apply."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 2)
    try:
        costs = KeptCosts(CPU, "a tier")
        assert costs.find() is None
        beside = threading.Thread(target=costs.keep, args=(FOUND,))
        beside.start()
        beside.join()
        assert KeptCosts(CPU, "a tier").find() == FOUND
    finally:
        torch.set_num_threads(threads)


def test_a_measurement_of_yesterday_or_of_tomorrow_does_not_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1_000_000.0
    monkeypatch.setattr(kept_costs.time, "time", lambda: now_s)
    KeptCosts(CPU, "a tier").keep(FOUND)
    for later_s, found in ((KEPT_S - 1, FOUND), (KEPT_S, None), (-1.0, None)):
        monkeypatch.setattr(kept_costs.time, "time", lambda later_s=later_s: now_s + later_s)
        assert KeptCosts(CPU, "a tier").find() == found


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"dict": [["at"], ["x"]]}', b"[" * 4000, b"9" * 5000])
def test_a_file_that_is_damaged_counts_as_missing(folder: Path, content: bytes) -> None:
    KeptCosts(CPU, "a tier").keep(FOUND)
    (path,) = folder.iterdir()
    path.write_bytes(content)
    assert KeptCosts(CPU, "a tier").find() is None


def test_a_file_that_names_what_may_not_pass_counts_as_missing(folder: Path) -> None:
    KeptCosts(CPU, "a tier").keep(FOUND)
    (path,) = folder.iterdir()
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said).replace("HookCosts", "Profile"))
    assert KeptCosts(CPU, "a tier").find() is None


def test_what_others_can_write_is_neither_read_nor_written(folder: Path) -> None:
    KeptCosts(CPU, "a tier").keep(FOUND)
    (path,) = folder.iterdir()
    path.chmod(0o666)
    assert KeptCosts(CPU, "a tier").find() is None
    path.chmod(0o600)
    assert KeptCosts(CPU, "a tier").find() == FOUND
    path.unlink()
    folder.chmod(0o777)
    KeptCosts(CPU, "a tier").keep(FOUND)
    assert not list(folder.iterdir())


def test_a_run_that_finds_costs_knows_them_at_once_and_measures_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may be twice as fast an hour later, but a short run ends before that is known."""
    measured = []

    class Measuring:
        def __init__(self, work: str) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *exception: object) -> None:
            pass

        def ask(self) -> kept_costs.Found:
            measured.append(self)
            return FOUND

        def end(self) -> None:
            pass

    monkeypatch.setattr("pooch.autopilot.costs.Child", Measuring)
    for runs in (1, 2):
        speed, profile = CopySpeed("a tier"), blocks(2)
        costs = HostCosts(speed, kept=KeptCosts(CPU, "a tier"))
        costs.prepare(0)
        assert not costs.is_final
        assert costs.has_hooks == bool(measured)
        assert costs.now(profile).hooks == (FOUND[1] if measured else profile.hooks)
        assert (speed.out.latency_ms == FOUND[0].out_latency_ms) == bool(measured)
        costs.begin()
        costs.close()
        assert len(measured) == runs
        assert costs.is_final
        assert costs.has_hooks
        assert costs.now(profile).hooks == FOUND[1]
