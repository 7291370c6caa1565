"""Every test that is marked as needing a GPU is in a part that runs on one."""

from __future__ import annotations

from pathlib import Path

from tests.device_parts import NEEDS_A_GPU, PARTS
from tests.simulated_cuda.suite import SLOW

ROOT = Path(__file__).parents[1]


def test_every_file_with_a_test_that_needs_a_gpu_is_run() -> None:
    mark = "pytest.mark." + "gpu"  # in two pieces: this file is no such test
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if mark in path.read_text()]
    assert len(files) > 10
    places = [ROOT / path for path in NEEDS_A_GPU]
    missed = [path for path in files if not any(path.is_relative_to(place) for place in places)]
    assert missed == [ROOT / "tests/test_cases.py"]  # it names the mark, and uses it for no test


def test_no_test_that_needs_a_gpu_is_left_out_by_its_marks() -> None:
    """The slow ones take more time than there is on a real device, and run on the simulated one alone."""
    marks = {part.marks for part in (*PARTS, SLOW) if part.paths == NEEDS_A_GPU}
    assert marks == {"gpu and not slow", "gpu and slow"}


def test_what_a_part_names_is_there() -> None:
    for part in (*PARTS, SLOW):
        assert all((ROOT / path).exists() for path in (*part.paths, part.rehearsed)), part.name
        assert len(set(part.paths)) == len(part.paths)
