"""`pooch pack`: its answers, its files, and one line for every bad file."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import matplotlib.image
import pytest

from benchmarks.packing_instances import training_step
from pooch.packing import POLICIES, Layout, verify
from pooch.packing.files import load_blocks
from tests.cli.conftest import Command

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


def test_files_that_cannot_be_read_are_told(pooch_command: Command, tmp_path: Path) -> None:
    assert "no such file" in pooch_command("pack", tmp_path / "none.csv").error_line
    assert "cannot read" in pooch_command("pack", tmp_path).error_line
    (tmp_path / "binary.csv").write_bytes(bytes(range(128, 256)))
    assert "cannot read" in pooch_command("pack", tmp_path / "binary.csv").error_line
    assert pooch_command("pack", tmp_path / "none.csv", "--time-limit", 0).code == 2
