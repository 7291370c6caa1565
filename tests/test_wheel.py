"""The wheel shares an environment with the download helper `pooch`, which many packages require."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

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


def pip(python: Path | str, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
    if "No matching distribution" in finished.stderr or "ConnectionError" in finished.stderr:
        pytest.skip("the package index cannot be reached")
    assert finished.returncode == 0, finished.stderr


def run(command: list[object], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(each) for each in command],
        capture_output=True, text=True, timeout=280, check=False, cwd=folder, env=environment,
    )  # fmt: skip


@pytest.mark.slow
def test_both_work_in_one_environment_whichever_is_installed_first(tmp_path: Path) -> None:
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), ".")
    (wheel,) = tmp_path.glob("*.whl")
    # What both need besides is taken from this environment; its own checkout of Pooch is not on that path.
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"]}
    for name, first, second in (("helper-first", "pooch", str(wheel)), ("wheel-first", str(wheel), "pooch")):
        folder = tmp_path / name
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        pip(python, "install", "--no-deps", first)
        pip(python, "install", "--no-deps", second)
        pip(python, "install", "platformdirs", "packaging", "requests")
        used = run([python, "-c", USED], tmp_path, environment)
        assert used.stdout.strip() == "both work", used.stderr
        profile = ROOT / "profiles" / "lstm-b32-cpu.json"
        planned = run([folder / "bin" / "pooch", "plan", profile, "--budget", "60%"], tmp_path, environment)
        assert planned.returncode == 0, planned.stderr
