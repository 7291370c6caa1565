from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import sweeps

ITEMS: list[Any] = [SimpleNamespace(path=Path(name), name=case) for name in "abc" for case in ("first", "second")]


@pytest.mark.parametrize(("start", "expected"), [(0, "aabbcc"), (1, "bbccaa"), (5, "ccaabb")])
def test_another_start_begins_with_another_file_and_leaves_no_test_out(start: int, expected: str) -> None:
    items = sweeps.rotated(ITEMS, start)
    assert "".join(str(item.path) for item in items) == expected
    assert sorted(map(id, items)) == sorted(map(id, ITEMS))


def test_without_tests_there_is_nothing_to_begin_with() -> None:
    assert sweeps.rotated([], 3) == []


def test_what_the_time_does_not_suffice_for_is_skipped_and_nothing_where_no_time_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(sweeps.SECONDS_VARIABLE, "100000")
    sweeps.skip_if_late()
    monkeypatch.setenv(sweeps.SECONDS_VARIABLE, "-1")
    with pytest.raises(pytest.skip.Exception):
        sweeps.skip_if_late()
    monkeypatch.delenv(sweeps.SECONDS_VARIABLE)
    sweeps.skip_if_late()


def test_every_name_in_a_list_is_that_of_a_test() -> None:
    for file in ("sweeps.txt", "seconds.txt"):
        for line in (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                path, _, name = line.partition("::")
                text = (Path(__file__).parents[1] / path).read_text(encoding="utf-8")
                assert not name or f"def {name}(" in text, line
