"""The notebook runs from top to bottom on the recorded profile, and its figures and tables are there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import pooch

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "inspect_plan.ipynb"


def executed() -> Any:
    """The cells after a run from top to bottom."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": NOTEBOOK.parent}})
    client.execute()
    return notebook.cells


def printed(cells: Any) -> str:
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output["text"] for output in outputs if output.output_type == "stream")


@pytest.mark.slow
def test_the_notebook_runs_and_shows_tables_figures_and_costs() -> None:
    cells = executed()
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    kinds = [kind for output in outputs if "data" in output for kind in output["data"]]
    assert kinds.count("image/png") >= 4
    assert kinds.count("text/html") >= 5
    assert "predicted peak" in printed(cells)
    assert not [output for output in outputs if output.output_type == "error"]


@pytest.mark.slow
def test_the_notebook_opens_any_profile_and_a_saved_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = ROOT / "profiles" / "lstm-b32-cpu.json"
    saved = pooch.plan(pooch.Profile.load(recorded), "80%", policy="tflms", region="model")
    saved.save(tmp_path / "plan.json")
    monkeypatch.setenv("POOCH_PROFILE", str(recorded))
    monkeypatch.setenv("POOCH_PLAN", str(tmp_path / "plan.json"))
    text = printed(executed())
    assert "lstm, batch 32" in text
    assert f"budget {saved.budget_bytes / 2**20:.0f} MiB" in text
    assert "tflms, " in text
    monkeypatch.setenv("POOCH_PROFILE", str(ROOT / "profiles" / "unet3d-b2-cpu.json"))
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="is a plan of lstm, not of"):
        executed()


def test_the_notebook_is_stored_as_it_ran() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "from top to bottom, once"
    assert not [cell for cell in code if "execution" in cell.metadata], "no times, which would differ each time"
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4
    assert not [output for output in outputs if output.output_type == "error"]
    text = json.dumps(outputs)
    folders = (ROOT, Path.home(), Path(sys.prefix), "/home/", "/Users/")
    assert not [folder for folder in folders if f"{folder}" != "/" and str(folder) in text], "nothing of this machine"
    assert "inspect_plan" not in text
