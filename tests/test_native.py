"""Libraries that were built before: taken from the cache only as this user built them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pooch.ground.native import BuildError, built_library

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
