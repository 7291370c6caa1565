"""`pooch pack`: its answers, its files, and one line for every bad file."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import matplotlib.colors
import matplotlib.image
import pytest

from benchmarks.packing_instances import training_step
from pooch import plan
from pooch.analysis.inference import inference_of
from pooch.ground.colours import BLOCKS
from pooch.ir import Plan, Profile
from pooch.packing import POLICIES, Layout, verify
from pooch.packing.files import load_blocks
from tests.cli.conftest import Command
from tests.toys import FAST_LINK, blocks

HEADER = "id,lower,upper,size"


@pytest.fixture
def blocks_path(tmp_path: Path) -> Path:
    path = tmp_path / "blocks.csv"
    rows = [f"{k},{block.lower},{block.upper},{block.size_bytes},512" for k, block in enumerate(training_step(8))]
    path.write_text("\n".join([HEADER + ",alignment", *rows]) + "\n")
    return path


@pytest.mark.parametrize("policy", POLICIES)
def test_the_answer_and_the_offsets_agree(
    pooch_command: Command, blocks_path: Path, tmp_path: Path, policy: str
) -> None:
    offsets_path = tmp_path / "offsets.csv"
    options = ("--policy", policy, "--time-limit", 0.2, "--json", "-o", offsets_path)
    outcome = pooch_command("pack", blocks_path, *options)
    assert outcome.code == 0, outcome.error
    answer = json.loads(outcome.out)
    assert answer["verified"] is True
    assert answer["ratio"] == answer["arena_bytes"] / answer["bound_bytes"] >= 1
    assert answer["seconds"] > 0
    blocks = load_blocks(offsets_path)
    assert blocks == load_blocks(blocks_path)
    with offsets_path.open() as stream:
        offsets = tuple(int(row["offset"]) for row in csv.DictReader(stream))
    verify(blocks, Layout(offsets, answer["arena_bytes"], answer["bound_bytes"], policy))


def test_a_capacity_is_answered(pooch_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "blocks.csv"
    path.write_text(f"{HEADER}\n1,0,2,1024\n2,1,3,1024\n")
    roomy, tight = (pooch_command("pack", path, "--capacity", capacity) for capacity in ("3KiB", "1KiB"))
    assert (roomy.code, tight.code) == (0, 0)
    assert "it fits into 3.00 KiB" in roomy.out
    assert "it does not fit into 1.00 KiB" in tight.out
    assert json.loads(pooch_command("pack", path, "--capacity", "2KiB", "--json").out)["fits"] is True
    wrong = pooch_command("pack", path, "--capacity", "60%")
    assert wrong.code == 2
    assert "capacity" in wrong.error


def test_the_picture_shows_blocks(pooch_command: Command, blocks_path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "arena.png"
    outcome = pooch_command("pack", blocks_path, "--policy", "sekiyama", "--plot", picture)
    assert outcome.code == 0
    assert "verified" in outcome.out
    assert f"wrote {picture}" in outcome.out
    pixels = matplotlib.image.imread(picture)[..., :3]
    assert (pixels.max(axis=2) - pixels.min(axis=2) > 0.05).mean() > 0.2, "a fifth of the picture has a colour"


def test_files_are_not_overwritten_unasked(pooch_command: Command, blocks_path: Path) -> None:
    outcome = pooch_command("pack", blocks_path, "-o", blocks_path)
    assert outcome.code == 2
    assert "--force" in outcome.error_line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lacks the column 'id'"),
        ("id,lower,upper\n1,0,2\n", "lacks the column 'size'"),
        (HEADER + ",size\n1,0,2,3,3\n", "column 'size' twice"),
        (HEADER + "\n", "has no blocks"),
        (HEADER + "\n1,0,2,-3\n", "line 2: the size is -3"),
        (HEADER + "\n1,0,2,3\n2,4,4,3\n", "line 3: lower is 4 and upper 4"),
        (HEADER + "\n1,0,2,many\n", "line 2: size is 'many', but it must be an integer"),
        (HEADER + "\n1,0,2,1.5\n", "size is '1.5'"),
        (HEADER + "\n1,0,2\n", "size is ''"),
        (HEADER + "\n,0,2,3\n", "the id is missing"),
        (HEADER + "\n7,0,2,3\n7,2,3,4\n", "id '7' twice"),
        (HEADER + ",alignment\n7,0,2,3,0\n", "alignment is 0"),
        (HEADER + "\n7,0,2,99999999999999999999999\n", "2**60"),
        ("\x00\x01\x02", ""),
    ],
)
def test_a_bad_file_is_told_in_one_line(pooch_command: Command, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    outcome = pooch_command("pack", path)
    assert outcome.code in (1, 2)
    assert message in outcome.error_line
    assert "unexpected" not in outcome.error_line


def test_a_cell_that_is_endless_is_told_in_a_line_that_can_be_read(pooch_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"{HEADER}\n1,0,2,{'x' * 100_000}\n")
    line = pooch_command("pack", path).error_line
    assert "line 2: size is 'xxx" in line
    assert line.endswith("it must be an integer")
    assert len(line) < 1500


def test_files_that_cannot_be_read_are_told(pooch_command: Command, tmp_path: Path) -> None:
    outcome = pooch_command("pack", tmp_path / "none.csv")
    assert outcome.code == 2
    assert "none.csv does not exist" in outcome.error_line
    assert "cannot read" in pooch_command("pack", tmp_path).error_line
    (tmp_path / "binary.csv").write_bytes(bytes(range(128, 256)))
    assert "cannot read" in pooch_command("pack", tmp_path / "binary.csv").error_line
    assert pooch_command("pack", tmp_path / "none.csv", "--time-limit", 0).code == 2


@pytest.fixture
def step_paths(tmp_path: Path) -> tuple[Path, Path]:
    """A profile, and a plan of it."""
    profile = blocks(4, link=FAST_LINK)
    profile.save(tmp_path / "profile.json")
    plan(profile, "70%", region="step", time_limit_s=5, explain=False).save(tmp_path / "plan.json")
    return tmp_path / "profile.json", tmp_path / "plan.json"


def test_a_plan_is_packed_with_its_profile(pooch_command: Command, step_paths: tuple[Path, Path]) -> None:
    profile_path, plan_path = step_paths
    outcome = pooch_command("pack", plan_path, "--profile", profile_path, "--time-limit", 0.2, "--json")
    assert outcome.code == 0, outcome.error
    answer = json.loads(outcome.out)
    saved = Plan.load(plan_path)
    assert answer["bound_bytes"] + answer["outside_bytes"] == saved.predicted_peak_bytes
    assert answer["total_bytes"] == answer["outside_bytes"] + answer["arena_bytes"]
    assert answer["fits"] == (answer["total_bytes"] <= saved.budget_bytes)


def test_a_profile_is_packed_by_itself(pooch_command: Command, step_paths: tuple[Path, Path]) -> None:
    outcome = pooch_command("pack", step_paths[0], "--time-limit", 0.2, "--json")
    assert outcome.code == 0, outcome.error
    answer = json.loads(outcome.out)
    assert answer["bound_bytes"] + answer["outside_bytes"] == Profile.load(step_paths[0]).peak_bytes
    assert answer["fits"] is None


def test_a_forward_pass_without_gradients_is_packed(pooch_command: Command, step_paths: tuple[Path, Path]) -> None:
    outcome = pooch_command("pack", step_paths[0], "--inference", "--policy", "sekiyama", "--json")
    assert outcome.code == 0, outcome.error
    answer = json.loads(outcome.out)
    expected = inference_of(Profile.load(step_paths[0]))
    assert answer["bound_bytes"] + answer["outside_bytes"] == expected.peak_bytes
    assert expected.peak_bytes < Profile.load(step_paths[0]).peak_bytes
    assert answer["verified"] is True


def test_the_picture_of_a_plan_has_its_colours(
    pooch_command: Command, step_paths: tuple[Path, Path], tmp_path: Path
) -> None:
    profile_path, plan_path = step_paths
    picture = tmp_path / "step.png"
    outcome = pooch_command("pack", plan_path, "--profile", profile_path, "--time-limit", 0.2, "--plot", picture)
    assert outcome.code == 0, outcome.error
    pixels = matplotlib.image.imread(picture)[..., :3]
    for kind in {"swap", "recompute", "keep"} & set(Plan.load(plan_path).decisions.values()):
        wanted = matplotlib.colors.to_rgb(BLOCKS[kind])
        assert (abs(pixels - wanted).max(axis=2) < 0.02).mean() > 0.001, f"nothing has the colour of {kind}"


def test_the_offsets_of_a_plan_are_a_file_of_blocks_though_values_leave_and_return(
    pooch_command: Command, step_paths: tuple[Path, Path], tmp_path: Path
) -> None:
    profile_path, plan_path = step_paths
    offsets = tmp_path / "offsets.csv"
    outcome = pooch_command("pack", plan_path, "--profile", profile_path, "--time-limit", 0.2, "-o", offsets)
    assert outcome.code == 0, outcome.error
    names = [block.name for block in load_blocks(offsets)]
    assert any(f"{name} (2)" in names for name in names), "no value is there twice"
    outcome = pooch_command("pack", offsets, "--time-limit", 0.2)
    assert outcome.code == 0, outcome.error


def test_bad_files_of_steps_get_one_line(pooch_command: Command, step_paths: tuple[Path, Path]) -> None:
    profile_path, plan_path = step_paths
    for arguments, words in (
        ((plan_path,), "--profile"),
        ((profile_path, "--profile", profile_path), "leave out --profile"),
        ((plan_path, "--profile", profile_path, "--inference"), "is a plan for a training step"),
        ((profile_path.with_suffix(".csv"), "--inference"), "is no profile"),
        ((plan_path, "--profile", profile_path, "--seed", 3), "--seed"),
        ((plan_path, "--profile", plan_path), "pooch-plan"),
    ):
        outcome = pooch_command("pack", *arguments)
        assert outcome.code in (1, 2)
        assert words in outcome.error_line


def test_a_plan_bounds_its_arena(pooch_command: Command, step_paths: tuple[Path, Path], tmp_path: Path) -> None:
    made = tmp_path / "arena.json"
    options = ("--budget", "75%", "--bound", "arena", "--region", "step", "--effort", "fast", "-o", made, "--json")
    outcome = pooch_command("plan", step_paths[0], *options)
    assert outcome.code == 0, outcome.error
    answer = json.loads(outcome.out)
    assert answer["bound"] == "arena"
    assert answer["arena"]["total_bytes"] <= answer["budget_bytes"]
    saved = Plan.load(made)
    assert saved.layout is not None
    assert saved.layout.total_bytes == answer["arena"]["total_bytes"]


def test_a_missing_compiler_is_told(pooch_command: Command, blocks_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooch.packing.policies.kernels", lambda: None)
    outcome = pooch_command("pack", blocks_path)
    assert outcome.code == 0
    assert "verified" in outcome.out
    assert "no C++ compiler: nothing was searched" in outcome.error
    assert "compiler" not in pooch_command("pack", blocks_path, "--policy", "sekiyama").error
