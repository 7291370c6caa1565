"""The notebook runs from top to bottom on the recorded profile, and its figures and tables are there."""

from __future__ import annotations

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "inspect_plan.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_shows_tables_figures_and_costs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": NOTEBOOK.parent}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    kinds = [kind for output in outputs if "data" in output for kind in output["data"]]
    assert kinds.count("image/png") >= 4
    assert kinds.count("text/html") >= 5
    printed = "".join(output["text"] for output in outputs if output.output_type == "stream")
    assert "predicted peak" in printed
    assert not [output for output in outputs if output.output_type == "error"]


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code)
