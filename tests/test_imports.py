"""No module imports, by any way round, a module that imports it: neither at the top of a file nor inside a function."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import pytest


def imported_by_module(*packages: str) -> dict[str, set[str]]:
    """Every module with the modules that it imports, inside functions as well; imports for type checkers are none."""
    grimp = pytest.importorskip("grimp", reason="grimp reads imports; import-linter brings it along")
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=True, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


@pytest.mark.parametrize("package", ["pooch", "benchmarks", "tests"])
def test_no_import_leads_back(package: str) -> None:
    imports = imported_by_module(package)
    assert len(imports) > 30  # the packages were found
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"modules import one another in a circle: {' -> '.join(error.args[1])}")
