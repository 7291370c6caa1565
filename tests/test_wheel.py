"""The wheel can be installed beside the download helper `pooch`, which many packages require."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.wheels import built_wheel, pip

ROOT = Path(__file__).parents[1]
USED = """
import sys
import pooch, pooch_planner, torch
assert callable(pooch.retrieve) and not hasattr(pooch, "plan"), "the download helper is itself"
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)])
data = torch.randn(512, 64)
forward = lambda: model(data).square().mean()
profile = pooch_planner.profile(forward, model)
assert pooch_planner.plan(profile, "90%", policy="tflms").policy == "tflms", "optional rooms are found under any name"
plan = pooch_planner.plan(profile, "60%")
with pooch_planner.apply(plan, model) as run:
    forward().backward()
assert run.stats.swapped_out_bytes + run.stats.recomputed_ops > 0
ours = {name for name in sys.modules if name.partition(".")[0] == "pooch"}
assert not any(hasattr(sys.modules[name], "Profile") for name in ours)
print("both work")
"""


def test_the_package_never_names_itself_in_an_import() -> None:
    """So it works under any name: a wheel installs it as `pooch_planner`."""
    for path in (ROOT / "pooch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not any(name.partition(".")[0] == "pooch" for name in names), f"{path}:{node.lineno}"


SAME = """
import pooch_planner as by_its_installed_name
import pooch
from pooch_planner.ir.plan import Plan
from pooch_planner.integrations import budgeted
import pooch.ir.plan, pooch.integrations.budgeted as same
assert by_its_installed_name is pooch and by_its_installed_name.errors is pooch.errors
assert Plan is pooch.Plan is pooch.ir.plan.Plan and budgeted is same
assert same.__spec__.name == same.__name__ == "pooch.integrations.budgeted"
try:
    import pooch_planner.retrieve
except ModuleNotFoundError as error:
    assert error.name == "pooch.retrieve"
    print("one package")
"""


def test_a_checkout_is_imported_by_both_names_and_is_there_once() -> None:
    path = os.pathsep.join((str(ROOT), str(ROOT / "packaging")))
    used = run([sys.executable, "-c", SAME], ROOT.parent, {**os.environ, "PYTHONPATH": path})
    assert used.stdout.strip() == "one package", used.stderr
    asked = run([sys.executable, "-m", "pooch_planner", "--version"], ROOT.parent, {**os.environ, "PYTHONPATH": path})
    assert asked.stdout.startswith("pooch-planner "), asked.stderr


def run(command: list[object], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(each) for each in command],
        capture_output=True, text=True, timeout=280, check=False, cwd=folder, env=environment,
    )  # fmt: skip


def test_tables_are_in_the_wheel(tmp_path_factory: pytest.TempPathFactory) -> None:
    tables = {f"pooch_planner/{path.relative_to(ROOT / 'pooch')}" for path in (ROOT / "pooch").rglob("*.toml")}
    assert "pooch_planner/workloads/models/workloads.toml" in tables
    assert tables <= set(zipfile.ZipFile(built_wheel(tmp_path_factory)).namelist())


@pytest.mark.slow
def test_both_work_in_one_environment_whichever_is_installed_first(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wheel = built_wheel(tmp_path_factory)
    # What both need besides is taken from this environment; its own checkout of Pooch is not on that path.
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"]}
    for name, first, second in (("helper-first", "pooch", str(wheel)), ("wheel-first", str(wheel), "pooch")):
        folder = tmp_path / name
        venv.create(folder)
        python = folder / "bin" / "python"
        pip(python, "install", "--no-deps", first)
        pip(python, "install", "--no-deps", second)
        pip(python, "install", "platformdirs", "packaging", "requests")
        used = run([python, "-c", USED], tmp_path, environment)
        assert used.stdout.strip() == "both work", used.stderr
        profile = ROOT / "profiles" / "lstm-b32-cpu.json"
        planned = run([folder / "bin" / "pooch", "plan", profile, "--budget", "60%"], tmp_path, environment)
        assert planned.returncode == 0, planned.stderr
