"""Every wrong input: its exit code, one line on stderr that names the thing and the remedy, no output half written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import pooch.api.planning
import pooch.workloads
from pooch.ir import Plan, Profile
from pooch.torchtools.spill_directory import VARIABLE, SpillDirectory
from tests.cli.conftest import Command
from tests.toys import chain

USER_FILE = """
import torch
from pooch import Workload

def wrong(batch_size=1, device="cpu"): return 3
def broken(batch_size=1, device="cpu"): raise RuntimeError("no such data")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
    def forward(self, inputs): raise ValueError("shapes do not fit")

def raising(batch_size=1, device="cpu"):
    model = Model()
    return Workload(model, lambda: model(torch.ones(3)))

def no_gradient(batch_size=1, device="cpu"):
    model = torch.nn.Linear(3, 1)
    def forward():
        with torch.no_grad():
            return model(torch.ones(1, 3)).sum()
    return Workload(model, forward)
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return path


def names_in(folder: Path) -> Iterable[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("name", ["resnet5", "zebra", "nowhere.py:make", "mine.py", "nowhere.onnx"])
def test_unknown_workloads(pooch_command: Command, tmp_path: Path, name: str) -> None:
    outcome = pooch_command("profile", name, "-o", tmp_path / "p.json")
    assert outcome.code == 2
    assert name.removesuffix(":make") in outcome.error_line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("wrong", "must return pooch.Workload"),
        ("broken", "no such data"),
        ("raising", "shapes do not fit"),
        ("no_gradient", "grad"),
    ],
)
def test_workloads_that_do_not_work(pooch_command: Command, user_file: Path, function: str, told: str) -> None:
    before = names_in(user_file.parent)
    outcome = pooch_command("profile", f"{user_file}:{function}", "-o", user_file.parent / "p.json")
    assert outcome.code == 1
    assert told in outcome.error_line
    assert [name for name in names_in(user_file.parent) if name != "__pycache__"] == before


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--batch-size", "0"], "batch size 0"),
        (["--batch-size", "-2"], "batch size -2"),
        (["--batch-size", "some"], "--batch-size"),
        (["--set", "nonsense"], "key=value"),
        (["--set", "colour=red"], "colour"),
        (["--mode", "magic"], "--mode"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_wrong_options_of_a_workload(pooch_command: Command, tmp_path: Path, options: list[str], told: str) -> None:
    outcome = pooch_command("profile", "lstm", "-o", tmp_path / "p.json", *options)
    assert outcome.code == 2
    assert told in outcome.error_line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b'{"format": "pooch-profile", "version": 1, "workl', "truncated"),
        (b'{"format": "pooch-profile", "version": 99}', "newer Pooch"),
        (b'{"nodes": []}', "not a Pooch profile or plan"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "binary"),
        (b"workload: resnet50", "is not JSON"),
        (b'{"format": "pooch-plan", "version": 1}', "not a pooch-profile file"),
        (b'{"format": "pooch-profile", "version": 1}', "damaged"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "compare"])
def test_bad_profiles(pooch_command: Command, tmp_path: Path, command: str, content: bytes | None, told: str) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    output = ["-o", tmp_path / "plan.json"] if command == "plan" else []
    outcome = pooch_command(command, path, "--budget", "60%", *output)
    assert outcome.code == (2 if content is None else 1)
    assert told in outcome.error_line
    assert str(path) in outcome.error_line
    assert outcome.out == ""
    assert not (tmp_path / "plan.json").exists()


def test_an_inconsistent_profile(pooch_command: Command, profile_path: Path) -> None:
    content = json.loads(profile_path.read_text())
    content["ops"][2]["index"] = 0
    profile_path.write_text(json.dumps(content))
    outcome = pooch_command("show", profile_path)
    assert outcome.code == 1
    assert "op 2 has index 0" in outcome.error_line


@pytest.mark.parametrize("size", [10**18 * 2, 10**30])
def test_a_size_beyond_all_measure(pooch_command: Command, profile_path: Path, size: int) -> None:
    content = json.loads(profile_path.read_text())
    content["values"][4]["size_bytes"] = size
    profile_path.write_text(json.dumps(content))
    outcome = pooch_command("show", profile_path)
    assert outcome.code == 1
    assert "profile.json is" in outcome.error_line


@pytest.mark.parametrize("budget", ["many", "0", "-5", "0%", "-10%", "", "16 parsecs"])
@pytest.mark.parametrize("command", ["plan", "compare"])
def test_budgets_that_are_none(
    pooch_command: Command, profile_path: Path, tmp_path: Path, command: str, budget: str
) -> None:
    output = ["-o", tmp_path / "plan.json"] if command == "plan" else []
    outcome = pooch_command(command, profile_path, "--budget", budget, *output)
    assert outcome.code == 2
    assert "16GiB" in outcome.error_line
    assert not (tmp_path / "plan.json").exists()


def test_an_infeasible_budget(pooch_command: Command, profile_path: Path, tmp_path: Path) -> None:
    outcome = pooch_command("plan", profile_path, "--budget", "3%", "-o", tmp_path / "plan.json")
    assert outcome.code == 3
    assert "smallest feasible budget" in outcome.error_line
    assert not (tmp_path / "plan.json").exists()
    minimum_bytes = outcome.error_line.split("(")[1].split()[0]
    assert pooch_command("plan", profile_path, "--budget", minimum_bytes).code == 0


def test_an_unknown_policy(pooch_command: Command, profile_path: Path) -> None:
    outcome = pooch_command("plan", profile_path, "--budget", "60%", "--policy", "magic")
    assert outcome.code == 2
    assert "'magic'" in outcome.error_line


@pytest.mark.parametrize(
    ("command", "arguments", "told"),
    [
        ("plan", ["--policy", "tflms", "--policy-option", "uc=3"], "it has n_tensors, lb"),
        ("plan", ["--policy", "tflms", "--policy-option", "lb"], "tflms.n_tensors=3"),
        ("plan", ["--policy-option", "tflms.lb=3"], "choose it with --policy"),
        ("compare", ["--policy-option", "lb=3"], "POLICY.lb=3"),
        ("compare", ["--policy", "ilp", "--policy-option", "tflms.lb=3"], "choose it with --policy"),
        ("compare", ["--policy", "tflms", "--policy-option", "lb=soon"], "a whole number"),
    ],
)
def test_options_of_policies_that_make_no_sense(
    pooch_command: Command, profile_path: Path, command: str, arguments: list[str], told: str
) -> None:
    outcome = pooch_command(command, profile_path, "--budget", "80%", *arguments)
    assert outcome.code == 2
    assert told in outcome.error_line


def test_a_plan_for_another_model(pooch_command: Command, plan_path: Path, tmp_path: Path) -> None:
    chain(4).save(tmp_path / "other.json")
    outcome = pooch_command("simulate", tmp_path / "other.json", plan_path, "--trace", tmp_path / "t.json")
    assert outcome.code == 1
    assert "plan is for another" in outcome.error_line
    assert not (tmp_path / "t.json").exists()


def test_outputs_are_not_overwritten_without_force(
    pooch_command: Command, profile_path: Path, plan_path: Path, profile: Profile
) -> None:
    before = plan_path.read_bytes()
    refused = pooch_command("plan", profile_path, "--budget", "80%", "-o", plan_path)
    assert refused.code == 2
    assert "--force" in refused.error_line
    assert plan_path.read_bytes() == before
    assert pooch_command("plan", profile_path, "--budget", "80%", "-o", plan_path, "--force").code == 0
    assert Plan.load(plan_path).budget_bytes == int(0.8 * profile.peak_bytes)


def test_two_outputs_of_one_name_are_refused(pooch_command: Command, profile_path: Path, tmp_path: Path) -> None:
    target = tmp_path / "made"
    outcome = pooch_command("plan", profile_path, "--budget", "60%", "-o", target, "--write-lp", target)
    assert outcome.code == 2
    assert "--output" in outcome.error_line
    assert "--write-lp" in outcome.error_line
    assert not target.exists()


def test_an_output_folder_that_is_not_there(pooch_command: Command, profile_path: Path, tmp_path: Path) -> None:
    outcome = pooch_command("plan", profile_path, "--budget", "80%", "-o", tmp_path / "missing" / "plan.json")
    assert outcome.code == 2
    assert "folder" in outcome.error_line


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_an_output_that_can_be_no_file_is_refused_before_anything_is_planned(
    pooch_command: Command, profile_path: Path, plan_path: Path, tmp_path: Path, kind: str
) -> None:
    output = tmp_path / "output"
    output.mkdir() if kind == "folder" else os.mkfifo(output)
    for options in (("report", plan_path, "--profile"), ("plan", "--budget", "min")):
        outcome = pooch_command(*options, profile_path, "--force", "-o", output, "--time-limit", "nan")
        assert outcome.code == 2
        assert "is a folder, pipe or device: give the name of a file" in outcome.error_line


@pytest.mark.parametrize(
    ("options", "told"),
    [(["--plot", "x.gif"], ".png"), (["--plot", "x.png"], "--profile"), (["--depth", "0"], "--depth")],
)
def test_pictures_that_cannot_be_drawn(
    pooch_command: Command,
    plan_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = names_in(tmp_path)
    outcome = pooch_command("show", plan_path, *options)
    assert outcome.code == 2
    assert told in outcome.error_line
    assert names_in(tmp_path) == before


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["plan"], ["plan", "p.json"], ["simulate", "p.json"], ["--colour"]]
)
def test_wrong_usage_points_at_help(pooch_command: Command, arguments: list[str]) -> None:
    outcome = pooch_command(*arguments)
    assert outcome.code == 2
    assert "--help" in outcome.error_line


def test_a_defect_is_told_in_one_line_and_debug_shows_the_traceback(
    pooch_command: Command, profile_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*arguments: object, **keywords: object) -> None:
        raise ZeroDivisionError("a defect\nover two lines")

    monkeypatch.setattr(pooch.api.planning, "plan_with", defect)
    quiet = pooch_command("plan", profile_path, "--budget", "60%")
    assert quiet.code == 1
    assert "--debug" in quiet.error_line
    loud = pooch_command("plan", profile_path, "--budget", "60%", "--debug")
    assert loud.code == 1
    assert "Traceback" in loud.error


def test_interrupting_is_no_defect(pooch_command: Command, profile_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pooch.api.planning, "plan_with", interrupted)
    outcome = pooch_command("plan", profile_path, "--budget", "60%")
    assert outcome.code == 130
    assert outcome.error.strip() == "pooch: interrupted"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("optimise", "lstm"), "No such command 'optimise': did you mean optimize?"),
        (("train.py",), "'train.py' is no command: to train under a budget, write `pooch exec --budget 60% train.py`."),
        (("--budget", "60%", "train.py"), "write it after the command, as in `pooch exec --budget ...`. See `pooch"),
        (("exec", "train.py"), "Missing option '--budget'. Give bytes or a share, such as `--budget 16GiB` or"),
        (("plan", "{profile}", "--budget", "60%", "--policy", "ilq"), "there is no policy 'ilq': did you mean ilp"),
        (("profile", "resnet50@smal", "-o", "{new}"), "no size 'smal': did you mean resnet50@small?"),
        (("profile", "gpt3", "-o", "{new}"), "did you mean gpt2"),
        (("workloads", "resnet5"), "did you mean resnet50"),
        (("reproduce", "poch"), "did you mean pooch?"),
        (("show", "-"), "'-' is not read as standard input"),
        (("plan", "{profile}", "--budget", "60%", "-o", "-"), "'-' is not standard output here"),
        (("exec", "--budget", "60%", "-"), "a script is not read from standard input"),
        (("show", "{profile}", "--profile", "{plan}"), "is a profile, and --profile is for a plan"),
    ],
)
def test_what_is_almost_right_is_told_what_was_meant(
    pooch_command: Command, profile_path: Path, plan_path: Path, tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    places = {"{profile}": profile_path, "{plan}": plan_path, "{new}": tmp_path / "new.json"}
    outcome = pooch_command(*(places.get(each, each) for each in arguments))
    assert outcome.code == 2
    assert told in outcome.error_line


def test_a_function_that_a_file_has_not_is_told_by_those_that_it_defines(
    pooch_command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "unet.py"
    path.write_text("from pathlib import Path\nclass Net: pass\ndef make(batch_size=1): pass\ndef main(): pass\n")
    near, far = (pooch_command("profile", f"{path}:{name}", "-o", tmp_path / "p.json") for name in ("mak", "training"))
    assert near.code == far.code == 2
    assert "has no function 'mak': did you mean make?" in near.error_line
    assert "it defines make, main; a workload is a function such as def make(batch_size=8" in far.error_line


@pytest.mark.parametrize("options", [(), ("--mode", "run")])
def test_a_device_is_checked_before_anything_is_built(
    pooch_command: Command, tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooch.workloads.WorkloadFactory, "__call__", lambda self: pytest.fail("it was built"))
    asked = ("profile", "lstm", "-o", tmp_path / "p.json", *options)
    for name in ("gpu", "cuda0", "CPU:"):
        outcome = pooch_command(*asked, "--device", name)
        assert outcome.code == 2
        assert f"there is no device {name!r}: --device takes cpu or cuda" in outcome.error_line
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    outcome = pooch_command(*asked, "--device", "cuda")
    assert outcome.code == 2
    assert "this PyTorch has no CUDA: install a CUDA build, or use --device cpu" in outcome.error_line


@pytest.mark.parametrize("command", ["profile", "exec"])
def test_a_spill_directory_is_tried_first(pooch_command: Command, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "train.py").touch()
    asked = ["exec", "--budget", "1GiB"] if command == "exec" else ["profile", "lstm", "-o", tmp_path / "p.json"]
    for name, told in (("nowhere", "is missing: create it"), ("file", "is not a directory")):
        last = [tmp_path / "train.py"] if command == "exec" else []
        outcome = pooch_command(*asked, "--spill-directory", tmp_path / name, *last)
        assert outcome.code == 2
        assert told in outcome.error_line
        assert outcome.error_line.endswith("choose another with --spill-directory")


def test_a_spill_directory_is_used_while_the_command_runs(
    pooch_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    monkeypatch.setattr(pooch.workloads.WorkloadFactory, "__call__", lambda self: used.append(SpillDirectory.of().path))
    monkeypatch.setenv(VARIABLE, "/before")
    pooch_command("profile", "lstm", "-o", tmp_path / "p.json", "--spill-directory", tmp_path)
    assert used == [tmp_path]
    assert os.environ[VARIABLE] == "/before"


def test_an_error_is_a_document_too(pooch_command: Command, profile_path: Path) -> None:
    outcome = pooch_command("plan", profile_path, "--budget", "3%", "--json")
    record = json.loads(outcome.out)
    assert outcome.code == record["exit_code"] == 3
    assert record["error"] == outcome.error_line.removeprefix("pooch: ")
    assert pooch_command("plan", profile_path, "--budget", str(record["smallest_budget_bytes"])).code == 0
    wrong = pooch_command("plan", profile_path, "--budget", "much", "--json")
    assert (wrong.code, json.loads(wrong.out)["smallest_budget_bytes"]) == (2, None)


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (["unet.py", "--budget", "60%"], "--budget 60% unet.py"),
        (["unet.py", "--lr", "3", "--budget=1GiB", "-v"], "--budget=1GiB unet.py --lr 3 -v"),
        (["--verify", "off", "-m", "my.train", "--budget", "60%"], "--budget 60% --verify off -m my.train"),
    ],
)
def test_a_budget_behind_the_script_is_told_its_place(
    pooch_command: Command, arguments: list[str], written: str
) -> None:
    outcome = pooch_command("exec", *arguments)
    assert outcome.code == 2
    assert "--budget stands after the script, so it goes to the script" in outcome.error_line
    assert outcome.error_line.endswith(f"write pooch exec {written}")
