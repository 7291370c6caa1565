"""Files that somebody else may have made are read within limits, whatever they say of themselves."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from pooch.ground.reading import file_bytes

pytestmark = pytest.mark.cpu


def test_a_small_file_takes_little_memory_however_much_it_may_hold(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"abc" * 1000)
    tracemalloc.start()
    try:
        assert file_bytes(tmp_path / "small", 2**31 - 1) == b"abc" * 1000
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there are no files without a size")
def test_a_file_that_does_not_tell_its_size_is_read_whole_and_within_the_limit() -> None:
    path = Path("/proc/self/maps")
    assert path.stat().st_size == 0
    assert file_bytes(path).count(b"\n") > 10
    with pytest.raises(OSError, match="larger than any such file"):
        file_bytes(path, 100)


@pytest.mark.parametrize("size_bytes", [0, 1, 2**20 - 1, 2**20, 2**20 + 1])
def test_a_file_may_hold_as_much_as_the_limit_and_no_more(size_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(size_bytes))
    assert len(file_bytes(tmp_path / "file", 2**20 + 1)) == size_bytes
    if size_bytes:
        with pytest.raises(OSError, match="larger than any such file"):
            file_bytes(tmp_path / "file", size_bytes - 1)
