"""Functions that are called once a module is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pooch.cli.first_import import when_imported


def test_it_is_called_once_when_the_module_is_there_or_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, seen = "imported_later_and_once", list[int]()
    (tmp_path / f"{name}.py").write_text("number = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = list(sys.meta_path)
    when_imported(name, lambda: seen.append(sys.modules[name].number))
    assert seen == []
    try:
        module = __import__(name)
        __import__(name)
        assert (module.number, seen, sys.meta_path) == (1, [1], before)
        when_imported(name, lambda: seen.append(2))
        assert seen == [1, 2]
    finally:
        sys.modules.pop(name, None)


def test_a_module_that_is_not_there_is_missing_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    when_imported("no_such_module_anywhere", lambda: pytest.fail("it is not there"))
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        __import__("no_such_module_anywhere")
