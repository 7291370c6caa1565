"""No module imports, by any way round, a module that imports it: neither at the top of a file, nor inside a function,
nor for type checkers alone.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import pytest


def imported_by_module(*packages: str) -> dict[str, set[str]]:
    """Every module with the modules that it imports, inside functions and for type checkers as well."""
    grimp = pytest.importorskip("grimp", reason="grimp reads imports; import-linter brings it along")
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=False, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle, the first one again at the end; empty if there are none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("package", ["pooch", "benchmarks", "tests"])
def test_no_import_leads_back(package: str) -> None:
    imports = imported_by_module(package)
    assert len(imports) > 30  # the packages were found
    assert circle_in(imports) == []


def test_imports_in_functions_and_for_type_checkers_are_seen() -> None:
    imports = imported_by_module("pooch")
    assert "pooch.executor" in imports["pooch.api.applying"]  # for type checkers, and in a function
    assert "pooch.report.plugin" not in imports["pooch.ground.plugins"]  # by name only
