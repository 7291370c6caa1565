"""Every example runs, and shows what it says that it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "packaging")))}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHOWN = {
    "accelerate_loop": "Budget held: ",
    "data_parallel": "for each of 2 ranks",
    "fully_sharded": "rank 0, step 7: loss",
    "guarded_training": "Repair(",
    "ignite_engine": "Budget held: ",
    "lightning_trainer": "Budget held: ",
    "monai_segmentation": "Budget held: ",
    "pipeline": "0 steps over the budget in both stages",
    "plain_script": "loss",
    "smallest_budget": "times the plain step",
    "transformers_trainer": "Budget held: ",
    "tutorial": "RunStats(",
    "whole_step": "region 'step'",
}
NEEDED = {
    "accelerate_loop": ("accelerate",),
    "ignite_engine": ("ignite",),
    "lightning_trainer": ("lightning",),
    "monai_segmentation": ("monai",),
    "transformers_trainer": ("transformers", "accelerate"),
}


def test_every_example_is_listed_and_has_a_line_to_look_for() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    assert [path.stem for path in EXAMPLES] == sorted(SHOWN)
    assert all(f"`{path.name}`" in listed for path in EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path) -> None:
    for package in NEEDED.get(path.stem, ()):
        pytest.importorskip(package, reason=f"{path.name} needs the extra 'frameworks'")
    finished = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT
    )
    assert finished.returncode == 0, finished.stderr
    assert SHOWN[path.stem] in finished.stdout
    assert "keeps its activations" not in finished.stderr, "no step leaves its plan"


@pytest.mark.slow
def test_the_plain_script_runs_under_a_budget_with_the_same_losses() -> None:
    script = str(ROOT / "examples" / "plain_script.py")
    outputs = []
    for command in ((script,), ("-m", "pooch", "exec", "--budget", "60%", script)):
        finished = subprocess.run(
            [sys.executable, *command, "--steps", "8"], capture_output=True, text=True, timeout=300, check=False,
            env=ENVIRONMENT,
        )  # fmt: skip
        assert finished.returncode == 0, finished.stderr
        outputs.append(finished.stdout)
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == 8
    assert "pooch: 8 steps: " in finished.stderr
    assert "Budget held: " in finished.stderr


@pytest.mark.slow
def test_the_sharded_script_runs_under_a_budget_in_two_ranks_with_the_same_losses() -> None:
    script = str(ROOT / "examples" / "fully_sharded.py")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    outputs = []
    for command in ((script,), ("-m", "pooch", "exec", "--budget", "60%", script)):
        finished = subprocess.run(
            [*torchrun, *command], capture_output=True, text=True, timeout=300, check=False,
            env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert finished.returncode == 0, finished.stderr
        # Both ranks write to one pipe, so their line ends may be swapped.
        outputs.append(sorted(re.findall(r"rank \d, step \d: loss [-+.\dxpa-f]+(?=\n|rank)", finished.stdout)))
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 16
    for rank in range(2):
        assert f"pooch (rank {rank}): 8 steps: " in finished.stderr
    assert finished.stderr.count("Budget held: ") == 2
