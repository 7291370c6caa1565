"""The wheel can be installed beside the download helper `pooch`, which many packages require."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

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


def test_ready_made_parts_are_in_a_wheel_for_systems_that_can_load_them(tmp_path: Path) -> None:
    ready_made = tmp_path / "ready_made"
    ready_made.mkdir()
    (ready_made / "part-1.so").write_bytes(b"GLIBC_2.2.5 GLIBC_2.14 GLIBCXX_3.4.21 CXXABI_1.3")
    (ready_made / "part-2.so").write_bytes(b"GLIBC_2.32 GLIBCXX_3.4.30")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POOCH_READY_MADE", str(ready_made))
        pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), ".")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-manylinux_2_35_{os.uname().machine}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"pooch_planner/ready_made/part-1.so", "pooch_planner/ready_made/part-2.so"} <= set(names)
    assert not any("wheel_hook" in name or name.startswith("ready_made.py") for name in names)


def test_a_wheel_without_them_fits_every_platform(tmp_path_factory: pytest.TempPathFactory) -> None:
    wheel = built_wheel(tmp_path_factory)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_one_version_is_told_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f'VERSION = "{version}"' in (ROOT / "pooch/ground/version.py").read_text()
    assert f"\nversion: {version} " in (ROOT / "CITATION.cff").read_text()
    assert f"version = {{{version}}}" in (ROOT / "docs/index.md").read_text()
    assert re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_do_what_there_is(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    wanted = [
        target
        for each in commands
        for line in re.findall(r"^make (.*)$", each, re.MULTILINE)
        for target in line.split()
    ]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(wanted) <= set(targets)
    files = [word for each in commands for word in each.split() if word.startswith("packaging/")]
    assert all((ROOT / file).exists() for file in files)


def test_every_version_of_pytorch_that_checks_run_with_gets_ready_made_parts() -> None:
    checks, wheels = (
        yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text()) for name in ("checks", "wheels")
    )
    made = wheels["jobs"]["parts"]["strategy"]["matrix"]["torch"]
    assert set(checks["jobs"]["tests"]["strategy"]["matrix"]["torch"]) <= set(made)
    assert set(wheels["jobs"]["tried"]["strategy"]["matrix"]["torch"]) <= set(made)
    assert min(made, key=lambda each: [int(part) for part in each.split(".")]).startswith("2.11.")


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
