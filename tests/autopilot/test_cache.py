"""The directory of kept plans: whatever happened to it, it gives the plan that was kept, or none."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from pooch.api.manual import plan_from_decisions
from pooch.autopilot.cache import Cached, PlanCache, Purpose, Seat
from pooch.autopilot.signature import StepKey
from pooch.errors import UsageError
from pooch.ir import Profile
from tests.children import child_environment
from tests.toys import FAST_LINK, blocks, in_full

pytestmark = pytest.mark.cpu
KEY, OTHER_KEY = StepKey((("float32", 2),), (8, 4)), StepKey((("float32", 2),), (9, 4))
PURPOSE = Purpose("a model, a budget")


@cache
def made(count: int = 3, *, is_recorded: bool = True) -> Cached:
    profile = blocks(count, link=FAST_LINK)
    plan = plan_from_decisions(profile, {value.id: "swap" for value in profile.activations[:2]})
    return Cached(profile, plan, is_recorded)


def kept(directory: Path, key: StepKey = KEY, cached: Cached | None = None, purpose: Purpose = PURPOSE) -> Path:
    """Keep something, and return its folder."""
    directory.mkdir(exist_ok=True)
    before = set(directory.rglob("*"))
    PlanCache(directory, purpose).keep(key, cached or made())
    [profile] = set(directory.rglob("profile.json")) - before
    return profile.parent


def found(directory: Path, key: StepKey = KEY, purpose: Purpose = PURPOSE) -> Cached | None:
    return PlanCache(directory, purpose).find(key)


def same(one: Cached | None, other: Cached) -> bool:
    return one is not None and in_full(one) == in_full(other)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_what_is_kept_is_found(tmp_path: Path, is_recorded: bool) -> None:
    cached = made(is_recorded=is_recorded)
    kept(tmp_path, cached=cached)
    assert same(found(tmp_path), cached)
    assert found(tmp_path, OTHER_KEY) is None
    assert found(tmp_path, purpose=Purpose("another model")) is None


def test_what_is_kept_again_replaces_all_of_what_was_kept(tmp_path: Path) -> None:
    kept(tmp_path, cached=made(is_recorded=False))
    fits_in_core = Cached(blocks(5), None, is_recorded=True)
    PlanCache(tmp_path, PURPOSE).keep(KEY, fits_in_core)
    assert same(found(tmp_path), fits_in_core)


@pytest.mark.parametrize("names", [("profile.json",), ("plan.json",), ("profile.json", "plan.json")])
def test_files_of_another_step_are_not_taken_for_those_that_were_kept(tmp_path: Path, names: tuple[str, ...]) -> None:
    mine, theirs = kept(tmp_path), kept(tmp_path, OTHER_KEY, made(4))
    for name in names:
        shutil.copy(theirs / name, mine / name)
    assert found(tmp_path) is None
    assert found(tmp_path, OTHER_KEY) is not None


def test_a_folder_in_the_place_of_another_is_not_taken(tmp_path: Path) -> None:
    mine, theirs = kept(tmp_path), kept(tmp_path, OTHER_KEY, made(4))
    shutil.rmtree(mine)
    theirs.rename(mine)
    assert found(tmp_path) is None


def test_two_that_keep_at_once_leave_the_files_of_one_or_nothing(tmp_path: Path) -> None:
    """One of them is interrupted after its profile is written, and the other one after its plan."""
    folder = kept(tmp_path)
    other = kept(tmp_path, OTHER_KEY, made(4))
    shutil.copy(other / "profile.json", folder / "profile.json")
    assert found(tmp_path) is None
    shutil.copy(other / "plan.json", folder / "plan.json")
    assert found(tmp_path) is None


KEEPS = """
import sys
from tests.autopilot.test_cache import KEY, PURPOSE
from pooch.autopilot.cache import Cached, PlanCache
from pooch.ir import Plan, Profile
cache, mine = PlanCache(sys.argv[1], PURPOSE), Cached(Profile.load(sys.argv[2]), Plan.load(sys.argv[3]), True)
for _ in range(25):
    cache.keep(KEY, mine)
"""


def test_processes_that_keep_at_once_never_mix_what_they_keep(tmp_path: Path) -> None:
    both, directory, children = [made(3), made(4)], tmp_path / "plans", []
    for number, each in enumerate(both):
        assert each.plan is not None
        files = [str(tmp_path / f"{number}.profile"), str(tmp_path / f"{number}.plan")]
        each.profile.save(files[0])
        each.plan.save(files[1])
        given = [sys.executable, "-c", KEEPS, str(directory), *files]
        children.append(subprocess.Popen(given, env=child_environment()))
    seen = 0
    while any(child.poll() is None for child in children):
        now = found(directory)
        seen += now is not None
        assert now is None or any(same(now, each) for each in both)
    assert [child.returncode for child in children] == [0, 0]
    assert seen
    PlanCache(directory, PURPOSE).keep(KEY, both[0])
    assert same(found(directory), both[0])
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".part")]


def let_others_write(folder: Path) -> None:
    folder.chmod(0o777)


def let_the_group_write(folder: Path) -> None:
    folder.chmod(0o770)


def put_a_link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize("change", [let_others_write, let_the_group_write, put_a_link])
def test_what_somebody_else_may_have_written_is_not_taken(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = kept(tmp_path)
    change(folder)
    assert found(tmp_path) is None


def test_what_belongs_to_another_user_is_not_taken(tmp_path: Path) -> None:
    folder, cached = kept(tmp_path), made()
    assert same(found(tmp_path), cached)
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        assert found(tmp_path) is None
    else:
        with mock.patch("os.geteuid", return_value=12345):
            assert found(tmp_path) is None


def test_nothing_is_written_through_a_link_in_the_place_of_a_folder(tmp_path: Path) -> None:
    directory, victim = tmp_path / "plans", tmp_path / "victim"
    folder = kept(directory)
    shutil.rmtree(folder)
    victim.mkdir()
    (victim / "profile.json").write_text("precious")
    folder.symlink_to(victim)
    PlanCache(directory, PURPOSE).keep(KEY, made())
    assert (victim / "profile.json").read_text() == "precious"
    assert [path.name for path in victim.iterdir()] == ["profile.json"]
    assert found(directory) is None


@pytest.mark.parametrize("name", ["profile.json", "plan.json", "kept.json"])
def test_nothing_is_written_through_a_link_in_the_place_of_a_file(tmp_path: Path, name: str) -> None:
    directory, victim = tmp_path / "plans", tmp_path / "victim"
    path = kept(directory) / name
    victim.write_text("precious")
    path.unlink()
    path.symlink_to(victim)
    PlanCache(directory, PURPOSE).keep(KEY, made(4))
    assert victim.read_text() == "precious"
    assert not path.is_symlink()
    assert same(found(directory), made(4))


def test_others_cannot_write_into_what_is_kept(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = kept(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("hostile", ["../../../tmp/x", "/etc", "a\0b", "..", "x" * 5000, "\ud800", "\n"])
def test_no_name_leads_out_of_the_directory(tmp_path: Path, hostile: str) -> None:
    directory = tmp_path / "plans"
    key, purpose = StepKey(((hostile,), hostile), (1,)), Purpose(hostile, seat=Seat(1, 2))
    folder = kept(directory, key, purpose=purpose)
    assert folder.resolve().is_relative_to(directory / "2-ranks" / "rank-1")
    assert [path.name for path in tmp_path.iterdir()] == ["plans"]
    assert found(directory, key, purpose) is not None


@pytest.mark.parametrize("name", ["profile.json", "plan.json", "kept.json"])
def test_a_file_that_is_something_else_counts_as_missing(tmp_path: Path, name: str) -> None:
    path = kept(tmp_path) / name
    content = path.read_bytes()
    path.rename(tmp_path / "elsewhere")
    for put in (
        lambda: path.mkdir(),
        lambda: os.mkfifo(path),
        lambda: path.symlink_to(tmp_path / "elsewhere"),
        lambda: path.write_bytes(content[: len(content) // 2]),
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(b"\xff\x00"),
        lambda: path.write_text("[" * 5000),
        lambda: None,
    ):
        put()
        assert found(tmp_path) is None
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.write_bytes(content)
    assert found(tmp_path) is not None


@pytest.mark.parametrize(
    "content",
    [{}, [], 3, {"profile": 1}, {"profile": None, "plan": None, "is_recorded": 3, "of": None}, {"x": "y" * 10**6}],
)
def test_a_note_of_what_was_kept_that_makes_no_sense_counts_as_missing(tmp_path: Path, content: object) -> None:
    (kept(tmp_path) / "kept.json").write_text(json.dumps(content))
    assert found(tmp_path) is None


def test_a_full_disk_leaves_what_was_kept_or_nothing(tmp_path: Path) -> None:
    for writes in range(4):
        directory, left = tmp_path / str(writes), [writes]
        before = made()
        kept(directory, cached=before)

        def fsync(descriptor: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with mock.patch("os.fsync", fsync):
            PlanCache(directory, PURPOSE).keep(KEY, made(4))
        now = found(directory)
        assert now is None or same(now, before) or same(now, made(4))
        assert not [path for path in directory.rglob("*") if path.name.endswith(".part")]


def test_a_directory_that_is_read_only_is_read_and_nothing_else(tmp_path: Path) -> None:
    cached = made()
    kept(tmp_path, cached=cached)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    real = os.open

    def read_only(path: str, flags: int, *rest: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, *rest)

    def no_folder(path: Path, *rest: object, **options: object) -> None:
        if not path.exists():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    # What is refused here is what a file system refuses that is mounted read-only; root is not held by permissions.
    with mock.patch("os.open", read_only), mock.patch.object(Path, "mkdir", no_folder):
        PlanCache(tmp_path, PURPOSE).keep(KEY, made(4))
        PlanCache(tmp_path, PURPOSE).keep(OTHER_KEY, made(4))
        assert same(found(tmp_path), cached)
        with pytest.raises(UsageError, match="plans cannot be kept in"):
            PlanCache(tmp_path / "more", PURPOSE)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_file_in_the_place_of_a_folder_is_left_alone(tmp_path: Path) -> None:
    folder = kept(tmp_path)
    shutil.rmtree(folder)
    folder.write_text("mine")
    assert found(tmp_path) is None
    PlanCache(tmp_path, PURPOSE).keep(KEY, made())
    assert folder.read_text() == "mine"


def test_profiles_of_the_cache_are_ordinary_files(tmp_path: Path) -> None:
    cached = made()
    assert Profile.load(kept(tmp_path, cached=cached) / "profile.json") == cached.profile
