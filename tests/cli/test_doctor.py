"""`pooch doctor`: the page, the file to attach, and the exit code."""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pooch.api.doctor import Finding, examination
from pooch.api.doctor.finding import Check, Patient
from pooch.ground import anonymous
from tests.cli.conftest import Command
from tests.doctor.from_a_wheel import Installed, assert_nothing_is_wrong

NAMED = "/home/alice/my project/x is full, as said by alice on ALICES-BOX"


@pytest.fixture
def alice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The user is alice, and the host is alices-box."""
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(socket, "gethostname", lambda: "alices-box.example.org")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/alice"))
    for function in (anonymous._known_paths, anonymous._personal_names):
        function.cache_clear()
    yield
    for function in (anonymous._known_paths, anonymous._personal_names):
        function.cache_clear()


def these(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    """Have the examination find these."""

    def found(patient: Patient) -> Iterator[Finding]:
        yield from findings

    monkeypatch.setattr(examination, "checks_for", lambda device: (Check("all", found),))


def test_where_nothing_is_wrong(pooch_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    these(monkeypatch, Finding("clocks", "passed", "they agree", {"a, ms": 1.5}), Finding("disk", "told", "in memory"))
    told = pooch_command("doctor", "--device", "cpu")
    assert told.code == 0
    assert told.out.startswith("Nothing is wrong on cpu: 2 checks in 0 s, 1 with a note\n")
    assert "they agree" in told.out
    assert "wrote pooch-doctor.json" in told.out
    record = json.loads((tmp_path / "pooch-doctor.json").read_text())
    assert record["faults"] == []
    assert record["findings"][0]["figures"] == {"a, ms": 1.5}


def test_a_fault_is_the_first_thing_that_is_told(
    pooch_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    these(monkeypatch, Finding("clocks", "passed", "they agree"), Finding("link", "failed", "slow: look at the slot"))
    told = pooch_command("doctor", "--device", "cpu", "-o", tmp_path / "found.json")
    assert told.code == 1
    assert told.out.startswith("1 of 2 checks on cpu is not right (0 s): link\n")
    assert "slow: look at the slot" in told.out
    assert "not right on this machine: link" in told.error_line
    as_json = pooch_command("doctor", "--device", "cpu", "-o", tmp_path / "found.json", "--json", "--force")
    assert as_json.code == 1
    assert json.loads(as_json.out) == json.loads((tmp_path / "found.json").read_text())


def test_a_file_that_is_there_is_kept(pooch_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    these(monkeypatch)
    (tmp_path / "found.json").write_text("mine")
    told = pooch_command("doctor", "--device", "cpu", "-o", tmp_path / "found.json")
    assert told.code == 2
    assert (tmp_path / "found.json").read_text() == "mine"


@pytest.mark.usefixtures("alice")
def test_the_file_names_neither_users_nor_hosts_nor_their_directories(
    pooch_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POOCH_SPILL_DIRECTORY", "/data/bob smith/spill")
    directory = {"directory": "/data/bob smith/spill", "other": "/mnt/carol/x.cpp: error", "rate, bytes/s": 2.0}
    these(monkeypatch, Finding("disk", "failed", NAMED, directory))
    told = pooch_command("doctor", "--device", "cpu", "-o", tmp_path / "found.json")
    assert NAMED in " ".join(told.out.split()), "who reads the page is at home there"
    text = (tmp_path / "found.json").read_text().lower()
    assert not any(name in text for name in ("alice", "bob", "smith", "carol", "box", "example"))
    figures = json.loads((tmp_path / "found.json").read_text())["findings"][0]["figures"]
    assert figures == {"directory": "POOCH_SPILL_DIRECTORY", "other": "/mnt/...: error", "rate, bytes/s": 2.0}


@pytest.mark.slow
@pytest.mark.cpu
def test_it_examines_this_machine_from_a_wheel_in_an_empty_folder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    installed = Installed(tmp_path, tmp_path_factory)
    assert_nothing_is_wrong(installed.doctor("cpu"), "cpu")
    cache = tmp_path / "nothing-built"
    missing = {"CXX": "no-such-compiler", "POOCH_CACHE_DIRECTORY": str(cache), "POOCH_SPILL_DIRECTORY": "/nowhere"}
    told = installed.doctor("cpu", **missing)
    assert told.code == 1
    assert "there is no no-such-compiler" in told.out
    assert "compiler, spill directory: what to do stands beside each finding" in " ".join(told.error.split())
