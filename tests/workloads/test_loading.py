"""Names, files and settings of workloads; every wrong one is told in one line with a remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pooch.errors import UsageError, WorkloadError
from pooch.workloads import BuiltIn, WorkloadFactory, load_workload, parse_settings

GOOD = """
import torch
import neighbour
from pooch import Workload

def make(batch_size=3, device="cpu", width=4):
    model = torch.nn.Linear(width, 1).to(device)
    data = torch.ones(batch_size, width, device=device)
    return Workload(model, lambda: model(data).sum() * neighbour.FACTOR)

def needs(batch_size, device, rate): return make(batch_size, device)
def anything(**keywords): return make(batch_size=keywords["batch_size"])
def fixed(): return make()
def raises(batch_size, device): raise ValueError("first line\\nsecond line")
def exits(batch_size=1): raise SystemExit(3)
def returns_model(batch_size=1): return torch.nn.Linear(1, 1)
def bad_model(): return Workload("model", lambda: 0)
def bad_forward(): return Workload(torch.nn.Linear(1, 1), 3)
def bad_optimizer(): return Workload(torch.nn.Linear(1, 1), lambda: 0, optimizer=0.1)
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    (tmp_path / "neighbour.py").write_text("FACTOR = 2.0")
    return path


def refusal(name: str, error: type[Exception] = WorkloadError, **arguments: object) -> str:
    with pytest.raises(error) as caught:
        load_workload(name, **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_function_of_the_users_file(file: Path) -> None:
    before = list(sys.path)
    workload = load_workload(f"{file}:make", batch_size=5, device="cpu", settings={"width": 7})
    assert workload.batch_size == 5
    assert workload.name == f"{file}:make"
    assert workload.forward().ndim == 0
    assert sys.path == before


def test_what_is_not_asked_for_is_left_to_the_function(file: Path) -> None:
    assert load_workload(f"{file}:make").batch_size == 0  # the function did not say
    assert load_workload(f"{file}:fixed").forward() is not None
    assert load_workload(f"{file}:anything", batch_size=2, settings={"whatever": 1}).batch_size == 2


def test_a_factory_builds_afresh_each_time(file: Path) -> None:
    settings = {"sequence_length": 4, "vocabulary": 9, "width": 4, "dropout": 0}
    factory = WorkloadFactory("lstm", batch_size=1, settings=settings)
    first, second = factory(), factory()
    assert first.model is not second.model
    assert first.forward().item() == second.forward().item()


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("missing", "has no function 'missing': it defines make, needs"),
        ("number", "is not a function"),
        ("raises", "raised ValueError: first line"),
        ("exits", "raised SystemExit"),
        ("returns_model", "returned Linear: it must return pooch.Workload"),
        ("bad_model", "the model of workload"),
        ("bad_forward", "forward of workload"),
        ("bad_optimizer", "the optimizer of workload"),
    ],
)
def test_functions_that_are_no_workload(file: Path, function: str, told: str) -> None:
    arguments = {"batch_size": 1, "device": "cpu"} if function == "raises" else {}
    assert told in refusal(f"{file}:{function}", **arguments)


def test_unknown_names_suggest_close_ones() -> None:
    assert "did you mean resnet50" in refusal("resnet5")
    assert "there are resnet50, resnet101" in refusal("zebra")


@pytest.mark.parametrize(("name", "told"), [("mine.py", "names no function"), ("nowhere.py:make", "does not exist")])
def test_files_that_are_not_there(name: str, told: str) -> None:
    assert told in refusal(name)


def test_a_folder_is_not_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "net.py").mkdir()
    assert "is a folder" in refusal(f"{tmp_path / 'net.py'}:make")


@pytest.mark.parametrize(
    ("text", "told"), [("import nonexistent_thing", "ModuleNotFoundError"), ("def f(:", "SyntaxError"), ("1/0", "Zero")]
)
def test_files_that_cannot_be_imported(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    message = refusal(f"{path}:make")
    assert told in message
    assert str(path) in message


@pytest.mark.parametrize("batch_size", [0, -4])
def test_batches_of_nothing(batch_size: int) -> None:
    assert "--batch-size 1 or more" in refusal("resnet50", UsageError, batch_size=batch_size)


def test_settings_that_the_function_does_not_take(file: Path) -> None:
    assert "does not take 'colour'" in refusal("lstm", UsageError, settings={"colour": 1})
    assert "does not take 'device'" in refusal(f"{file}:fixed", UsageError, device="cpu")


def test_settings_that_the_function_needs(file: Path) -> None:
    assert "--batch-size N" in refusal(f"{file}:needs", UsageError, device="cpu")
    assert "--set rate=VALUE" in refusal(f"{file}:needs", UsageError, device="cpu", batch_size=1)


def test_a_setting_that_the_builder_cannot_take() -> None:
    assert "raised" in refusal("lstm", settings={"width": "wide"})


def test_a_missing_extra_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_extra.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkloadError, match=r"not installed: pip install surely_not_installed$"):
        BuiltIn("x", "", "needs_extra", "surely_not_installed").function()


def test_settings_are_read_as_what_they_look_like() -> None:
    texts = ["a=1", "b=0.5", "c=true", "d=False", "e=text", "f=1e-3", "g=", "h=a=b", "image-size=64"]
    assert parse_settings(texts) == {
        "a": 1, "b": 0.5, "c": True, "d": False, "e": "text", "f": 1e-3, "g": "", "h": "a=b", "image_size": 64,
    }  # fmt: skip


@pytest.mark.parametrize("texts", [["a"], ["=1"], ["1a=2"], ["a=1", "a=2"]])
def test_settings_that_are_none(texts: list[str]) -> None:
    with pytest.raises(UsageError):
        parse_settings(texts)


def test_named_sizes_are_settings_that_others_win_against() -> None:
    assert load_workload("lstm@small").batch_size == 128
    assert load_workload("lstm@small", batch_size=3).batch_size == 3
    assert load_workload("lstm@small", settings={"width": 8}).model.head.in_features == 8  # type: ignore[union-attr]
    assert load_workload("resnet101@small", settings={"image_size": 32}).name == "resnet101"


def test_sizes_that_do_not_exist() -> None:
    assert "choose one of lstm@small" in refusal("lstm@huge", UsageError)
    assert "did you mean resnet50" in refusal("resnet5@small")


DRAWING = """
import random
import numpy
import torch
from pooch import Workload

FACTOR = random.random()

def make():
    model = torch.nn.Linear(4, 1)
    data = torch.from_numpy(numpy.random.rand(3, 4)).float() * FACTOR
    return Workload(model, lambda: model(data).sum())
"""


@pytest.mark.parametrize("is_fake", [False, True])
def test_a_build_draws_the_same_random_numbers_each_time_and_none_of_the_callers(is_fake: bool, tmp_path: Path) -> None:
    import random

    import numpy
    import torch

    from pooch.profiler.fake.world import FakeWorld

    (tmp_path / "drawing.py").write_text(DRAWING)
    factory = WorkloadFactory(f"{tmp_path / 'drawing.py'}:make")

    def drawn_around_a_build() -> tuple[float, ...]:
        random.seed(3)
        numpy.random.seed(3)  # noqa: NPY002
        torch.manual_seed(3)
        if is_fake:
            FakeWorld().build(WorkloadFactory("lstm@small"))
        else:
            factory()
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))  # noqa: NPY002

    found = drawn_around_a_build()
    random.seed(3)
    numpy.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    assert found == (random.random(), float(numpy.random.rand()), float(torch.rand(())))  # noqa: NPY002
    losses = []
    for seed in (1, 2):
        random.seed(seed)
        torch.manual_seed(seed)
        losses.append(float(factory().forward().detach()))
    assert losses[0] == losses[1]
