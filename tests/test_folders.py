"""Temporary folders go with their process, however it ends, and never while it lives."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pooch.ground import folders
from pooch.ground.folders import TemporaryFolder
from tests.children import ROOT, child_environment

HOLDING = """
import os, sys
from pathlib import Path
from pooch.ground.folders import TemporaryFolder
folder = TemporaryFolder()
(folder.path / "part").write_text("x")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are; nothing was swept there yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(folders, "_swept", set())
    return tmp_path


def holding(place: Path) -> tuple[subprocess.Popen[str], Path]:
    environment, pipe = child_environment(TMPDIR=str(place)), subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", HOLDING], stdin=pipe, stdout=pipe, text=True, env=environment)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_process_left_goes_with_the_next_one_and_what_a_living_one_has_stays(
    number: int, place: Path
) -> None:
    killed, left = holding(place)
    living, held = holding(place)
    with killed, living:
        killed.send_signal(number)
        killed.wait()
        assert (left / "part").exists()
        with TemporaryFolder() as own:
            assert own.is_dir()
            assert own.parent == place
            assert not left.exists()
            assert (held / "part").exists()
        living.communicate("")
    with TemporaryFolder():
        assert held.exists(), "it is looked once in each process"


def test_a_folder_goes_when_it_is_closed_and_can_be_closed_again() -> None:
    folder = TemporaryFolder()
    (folder.path / "inside").mkdir()
    folder.close()
    assert not folder.path.exists()
    folder.close()


def test_a_forked_process_leaves_the_folder_of_its_parent_alone() -> None:
    folder = TemporaryFolder()
    child = os.fork()
    if child == 0:
        folder.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.path.exists()
    folder.close()


def test_only_folders_of_ours_are_removed_and_no_link_is_followed(place: Path) -> None:
    kept = place / "kept"
    (kept / "inside").mkdir(parents=True)
    link = place / "pooch-held-abcd1234"
    link.symlink_to(kept)
    others = [
        place / name for name in ("pooch-held-abcd123", "pooch-held-abcd12345", "pooch-faults", "xpooch-held-abcd1234")
    ]
    for other in others:
        other.mkdir()
    file = place / "pooch-held-a_file_0"
    file.write_text("x")
    left = place / "pooch-held-left0000"
    left.mkdir()
    (left / "link").symlink_to(kept)
    with TemporaryFolder():
        pass
    assert not left.exists()
    assert (kept / "inside").exists()
    assert link.is_symlink()
    assert file.exists()
    assert all(other.exists() for other in others)


def test_folders_of_other_users_stay(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = place / "pooch-held-left0000"
    left.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with TemporaryFolder():
        assert left.exists()


def test_a_folder_that_is_taken_for_a_left_one_while_it_is_made_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process looks just before it is locked: once it has removed it, and once it is about to."""
    real, taken, locks = tempfile.mkdtemp, [], []

    def mkdtemp(**where: str) -> str:
        path = real(**where)
        taken.append(path)
        if len(taken) == 1:
            folders._remove_if_left(Path(path))
        if len(taken) == 2:
            locks.append(os.open(path, os.O_RDONLY))
            fcntl.flock(locks[0], fcntl.LOCK_EX)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with TemporaryFolder() as path:
        assert [str(path)] == taken[2:]
        assert path.is_dir()
    os.close(locks[0])


def test_without_locks_nothing_is_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = place / "pooch-held-left0000"
    left.mkdir()

    def flock(descriptor: int, how: int) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with TemporaryFolder() as path:
        assert path.is_dir()
        assert left.exists()
    assert not path.exists()


def test_a_folder_beside_a_file_is_hidden_and_swept_there(tmp_path: Path) -> None:
    target = tmp_path / "there" / "file"
    left = target.parent / ".pooch-held-left0000"
    left.mkdir(parents=True)
    with TemporaryFolder(beside=target) as path:
        assert path.parent == target.parent
        assert path.name.startswith(".pooch-held-")
        assert not left.exists()


def test_all_temporary_folders_are_made_in_one_place() -> None:
    making = re.compile(r"\b(mkdtemp|TemporaryDirectory|NamedTemporaryFile)\b")
    found = {path.name for path in (ROOT / "pooch").rglob("*.py") if making.search(path.read_text())}
    assert found == {"folders.py"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"POOCH_CACHE_DIRECTORY": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/pooch-planner"),
        ({"HOME": "/c"}, "/c/.cache/pooch-planner"),
    ],
)
def test_the_cache_is_where_the_user_keeps_such(
    environment: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("POOCH_CACHE_DIRECTORY", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(folders.cache_directory()) == found


def test_a_user_without_a_home_has_a_cache_beside_temporary_files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As any number is one in a container, if no variable says where its home is."""
    for name in ("POOCH_CACHE_DIRECTORY", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert folders.cache_directory() == place / f"pooch-planner-{os.getuid()}"
