"""Each snippet of README, tutorial and how-to guides runs as it stands from an installed wheel, README's from a
checkout as well.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.wheels import built_wheel, pip

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/tutorial.md", "docs/how-to.md")
# The same snippet with less work. What is replaced has to stand on the page.
NARROW = {
    "torch.nn.Linear(512, 512)": "torch.nn.Linear(64, 64)",
    "torch.nn.Linear(512, 10)": "torch.nn.Linear(64, 10)",
    "4096, 512": "1024, 64",
    "4096,)": "1024,)",
}
SMALLER = {
    "README.md": {**NARROW, "range(40)": "range(6)"},
    "docs/tutorial.md": NARROW,
    "docs/how-to.md": {
        "resnet50 --device-model V100-PCIe --batch-size 640": "lstm@small --device-model V100-PCIe --batch-size 8",
        "--budget 80% --budget 60% --budget 45%": "--budget 80%",
        "-o report.html": "-o report.html --budgets 80%",
        '"plan.json")      #': '"plan-of-run.json")      #',  # of another model than the page's commands
    },
}
# Commands that are tested elsewhere, with the test.
ELSEWHERE = {
    "$ pip install": "here",
    "$ make": "test_readme.py",
    "$ pooch exec --budget 16GiB train.py": "cli/test_exec.py",
    "$ pooch exec --budget 60% -m package.training": "cli/test_exec.py",
    "$ torchrun": "cli/test_exec.py",
    "$ pooch optimize my_model.py:make --budget 8GiB": "api/test_does_not_fit.py",
    "$ pooch max-batch": "cli/test_max_batch.py",
    "$ pooch compare profile.json --budget 60% --policy ilp": "cli/test_training_commands.py",
    "$ pooch reproduce pooch --quick": "published/test_tables.py",
    "$ pooch optimize model.onnx": "cli/test_onnx.py",
    "$ POOCH_PROFILE=profile.json POOCH_PLAN=plan.json jupyter lab": "notebooks/test_inspect_plan.py",
}
# What a page takes for granted.
CONTEXT = {
    "docs/how-to.md": """
import torch
import pooch_planner as pooch
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data, loss_of = [torch.randn(256, 64) for _ in range(2)], lambda output: output.square().mean()
profile = pooch.profile(lambda: loss_of(model(data[0])), model, optimizer)
with pooch.apply(pooch.plan(profile, "80%"), model) as run:
    loss_of(model(data[0])).backward()
"""
}
# What holds after the last snippet of a page.
HELD = {
    "README.md": """
assert auto.summary().swapped_bytes + auto.summary().recomputed_ops > 0 and not auto.summary().steps_over_budget
assert set(plan.decisions.values()) != {"keep"} and run.stats.mismatches == 0
""",
    "docs/tutorial.md": """
assert set(plan.decisions.values()) != {"keep"} and run.stats.mismatches == 0
assert 0 < run.totals.peak_bytes <= plan.budget_bytes
""",
    "docs/how-to.md": """
assert not guard.repairs and changed.decisions[largest.id] == "keep"
""",
}


def blocks_of(page: str) -> list[tuple[str, str]]:
    """The snippets of a page with less work, in order: Python blocks as a whole, and single command lines."""
    found = re.findall(r"```(python|console)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    blocks: list[tuple[str, str]] = [("python", CONTEXT[page])] if page in CONTEXT else []
    for kind, text in found:
        for old, new in SMALLER[page].items():
            text = text.replace(old, new)
        if kind == "python":
            blocks.append((kind, text))
        else:
            blocks += [(kind, line) for line in text.splitlines() if line.startswith("$ ")]
    blocks.append(("python", HELD[page]))
    return [(kind, text.removeprefix("$ ")) for kind, text in blocks if not text.startswith(tuple(ELSEWHERE))]


@pytest.fixture(scope="module")
def wheel_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel, and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder)
    python = folder / "bin" / "python"
    pip(python, "install", "--no-deps", str(built_wheel(tmp_path_factory)))
    return python


@pytest.fixture
def installed(request: pytest.FixtureRequest) -> tuple[Path, str]:
    """The interpreter, and the folders that it imports from."""
    if request.param == "checkout":
        return Path(sys.executable), os.pathsep.join((str(ROOT), str(ROOT / "packaging")))
    return request.getfixturevalue("wheel_python"), sysconfig.get_paths()["purelib"]


def prepare(folder: Path) -> None:
    """Write the files that the pages name."""
    (folder / "examples").mkdir()
    example = (ROOT / "examples" / "tutorial.py").read_text()
    (folder / "examples" / "tutorial.py").write_text(example.replace("4096", "1024").replace("512", "64"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "installed"), [*((page, "wheel") for page in PAGES), ("README.md", "checkout")], indirect=["installed"]
)
def test_the_snippets_of_a_page_run(page: str, installed: tuple[Path, str], tmp_path: Path) -> None:
    prepare(tmp_path)
    blocks = blocks_of(page)
    if page == "README.md":
        (tmp_path / "train.py").write_text(blocks[0][1])
    python, path = installed
    finished = subprocess.run(
        [python, ROOT / "tests" / "snippet_process.py"], input=json.dumps(blocks),
        capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    assert finished.stdout.count("\nran: ") + finished.stdout.startswith("ran: ") == len(blocks)
    if page == "README.md":
        assert len(shown()) >= 2
        printed = {shape_of(line) for line in finished.stdout.splitlines()}
        for line in shown():
            assert shape_of(line) in printed, line


def shown() -> list[str]:
    """The lines of output on the README that depend neither on when a plan is ready nor on times."""
    return re.findall(r"^(?:pooch: the budget |loss ).*$", (ROOT / "README.md").read_text(), re.MULTILINE)


def shape_of(line: str) -> str:
    """A line of output without its figures."""
    return re.sub(r"\d[\d.]*|\b[KMG]?i?B\b", "#", line)


@pytest.mark.parametrize("page", PAGES)
def test_what_is_run_with_less_work_stands_on_the_page(page: str) -> None:
    text = (ROOT / page).read_text()
    for old in SMALLER[page]:
        assert old in text, old


def test_what_is_tested_elsewhere_stands_on_a_page_and_has_a_test() -> None:
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    for line, test in ELSEWHERE.items():
        assert line in text
        assert test == "here" or (ROOT / "tests" / test).exists(), test
