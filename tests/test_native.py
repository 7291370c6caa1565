"""Libraries that were built before: taken from the cache only as this user built them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pooch.ground import native
from pooch.ground.native import BuildError, built_library, ready_name

needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="there is no compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POOCH_CACHE_DIRECTORY", str(tmp_path / "cache"))
    file = tmp_path / "answer.cpp"
    file.write_text('extern "C" int answer() { return 42; }')
    return file


@needs_compiler
def test_what_was_built_is_taken_again(source: Path) -> None:
    library = built_library("answer", source)
    built = library.stat().st_mtime_ns
    assert built_library("answer", source) == library
    assert library.stat().st_mtime_ns == built
    assert library.parent.stat().st_mode & 0o777 == 0o700


@needs_compiler
@pytest.mark.parametrize("change", ["cut short", "other bytes", "no checksum", "others may write it", "a link"])
def test_what_is_in_doubt_is_built_again(source: Path, change: str) -> None:
    library = built_library("answer", source)
    good = library.read_bytes()
    match change:
        case "cut short":
            library.write_bytes(good[: len(good) // 2])
        case "other bytes":
            library.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        case "no checksum":
            library.with_suffix(".sha256").unlink()
        case "others may write it":
            library.chmod(0o666)
        case "a link":
            other = library.rename(source.with_suffix(".so"))
            library.symlink_to(other)
    before = library.lstat().st_ino
    again = built_library("answer", source)
    assert again == library
    assert not library.is_symlink()
    assert library.stat().st_ino != before
    assert library.stat().st_mode & 0o777 == 0o700
    assert built_library("answer", source).stat().st_ino == library.stat().st_ino


@needs_compiler
@pytest.mark.parametrize("way", ["all may write there", "it is another user's"])
def test_nothing_is_taken_from_a_directory_of_others(source: Path, way: str) -> None:
    library = built_library("answer", source)
    if way == "all may write there":
        library.parent.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(library.parent, 12345, 12345)
    else:
        pytest.skip("only root can give a directory away")
    own = built_library("answer", source)
    assert own.parent != library.parent
    assert own.exists()


def test_a_compiler_that_cannot_be_read_is_told(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "'unbalanced")
    with pytest.raises(BuildError, match=r"CXX=.*is not a command: No closing quotation"):
        built_library("answer", source)


@pytest.fixture
def ready_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(native, "READY_MADE", tmp_path / "ready_made")
    native.READY_MADE.mkdir()
    return native.READY_MADE


def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POOCH_CACHE_DIRECTORY", str(tmp_path / "empty"))
    monkeypatch.setenv("CXX", "/nonexistent/c++")


@needs_compiler
@pytest.mark.parametrize("name", ["answer-2.13.0+cpu-cpython-311", "answer-2.13.0+cu130-cpython-311"])
def test_what_is_ready_made_needs_no_compiler_wherever_pytorch_lies(
    source: Path, ready_made: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = built_library("answer-2.13.0+cpu-cpython-311", source, compile_flags=["-I/here"], link_flags=["-L/here"])
    shutil.copyfile(built, ready_made / ready_name(built.name))
    without_compiler(monkeypatch, source.parent)
    taken = built_library(name, source, compile_flags=["-I/there"], link_flags=["-L/there"])
    assert taken.parent == ready_made
    assert not (source.parent / "empty").exists(), "nothing is written"


@needs_compiler
@pytest.mark.parametrize(
    ("name", "flags", "text"),
    [
        ("answer-2.13.1+cpu-cpython-311", [], "42"),  # another version
        ("answer-2.13.0+cpu-cpython-312", [], "42"),  # another Python
        ("answer-2.13.0-cpython-311", [], "42"),  # built by somebody else
        ("answer-2.13.0+rocm7.0-cpython-311", [], "42"),
        ("answer-2.13.0+cpu-cpython-311", ["-DOTHER=1"], "42"),
        ("answer-2.13.0+cpu-cpython-311", [], "43"),  # other sources
    ],
)
def test_what_was_made_for_something_else_is_not_taken(
    source: Path, ready_made: Path, name: str, flags: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = built_library("answer-2.13.0+cpu-cpython-311", source)
    shutil.copyfile(built, ready_made / ready_name(built.name))
    without_compiler(monkeypatch, source.parent)
    source.write_text(source.read_text().replace("42", text))
    with pytest.raises(BuildError, match="there is no /nonexistent"):
        built_library(name, source, compile_flags=flags)


@needs_compiler
def test_what_the_system_cannot_load_is_built(source: Path, ready_made: Path) -> None:
    built = built_library("answer", source)
    (ready_made / ready_name(built.name)).write_bytes(b"made for a newer C library")
    assert built_library("answer", source) == built
