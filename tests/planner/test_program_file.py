"""The integer program as a file: names that docs/planner.md explains, and the program that gives the bound."""

from __future__ import annotations

import re
from pathlib import Path

import highspy
import pytest
from click.testing import CliRunner

from pooch.cli.plan import command
from pooch.ir import Profile
from pooch.planner import PlanningRequest, write_program
from tests.planner.networks import PCIE_16, gpt2
from tests.planner.support import case, make_plan
from tests.toys import SLOW_LINK, blocks

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("profile", [blocks(4, link=SLOW_LINK), gpt2(layers=3, link=PCIE_16, speed=50)])
def test_the_file_holds_the_program_of_the_bound(profile: Profile, tmp_path: Path) -> None:
    # GIVEN the program of a budget as a file
    of, path = case(profile), tmp_path / "program.lp"
    planned = make_plan(of.dataflow, of.share(0.7), of.evaluator)
    write_program(PlanningRequest(of.dataflow, of.share(0.7), of.evaluator), path)
    # WHEN somebody else solves it
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.readModel(str(path))
    model.run()
    # THEN its optimum is a lower bound for the plan, and no lower than the one that the plan carries
    optimum_ms = model.getInfo().objective_function_value
    assert planned.lower_bound_ms <= optimum_ms * (1 + 1e-6)
    assert optimum_ms <= planned.step_ms * (1 + 1e-6)


def test_every_family_of_variables_and_rows_is_explained(tmp_path: Path) -> None:
    of, path = case(gpt2(layers=6, link=PCIE_16, speed=50)), tmp_path / "program.lp"
    write_program(PlanningRequest(of.dataflow, of.share(0.6), of.evaluator, host_budget_bytes=of.share(0.3)), path)
    explained = (ROOT / "docs" / "planner.md").read_text()
    names = set(re.findall(r"[a-z_]+_[a-z0-9_]*[0-9]\w*|\bhost\b", path.read_text()))
    families = {re.match(r"(host|[a-z_]+?)(_c?[0-9]|$)", name)[1] for name in names}  # type: ignore[index]
    assert {"swap", "recompute", "duration", "memory", "sources", "host"} <= families
    assert sorted(family for family in families if f"`{family}" not in explained) == []


def test_the_command_writes_it(tmp_path: Path) -> None:
    profile_path, path = tmp_path / "profile.json", tmp_path / "program.lp"
    blocks(4).save(profile_path)
    arguments = [str(profile_path), "--budget", "70%", "--region", "step", "--write-lp", str(path)]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert "memory_1:" in path.read_text()
    # AND overwrites nothing unasked
    again = CliRunner().invoke(command, arguments)
    assert again.exit_code != 0
    assert CliRunner().invoke(command, [*arguments, "--force"]).exit_code == 0
