"""Arguments of the wrong kind, in the wrong order, or as files: taken where they can be, else told in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pooch
from pooch.errors import FileFormatError, UsageError
from pooch.ir import Plan, Profile
from tests.toys import blocks

pytestmark = pytest.mark.cpu


@pytest.fixture
def profile() -> Profile:
    return blocks(3)


@pytest.fixture
def plan(profile: Profile) -> Plan:
    return pooch.plan_from_decisions(profile, {})


def model_and_forward() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    data = torch.randn(32, 64)
    return model, lambda: model(data).square().mean()


@pytest.mark.parametrize("kind", [str, Path])
def test_files_are_taken_for_what_they_hold(profile: Profile, tmp_path: Path, kind: type) -> None:
    profile.save(tmp_path / "profile.json")
    path = kind(tmp_path / "profile.json")
    plan = pooch.plan(path, "100%")
    plan.save(tmp_path / "plan.json")
    assert pooch.smallest_budget(path) == pooch.smallest_budget(profile)
    assert pooch.plan_from_decisions(path, {}).workload == profile.workload
    assert len(pooch.activation_costs(path)) == len(profile.activations)
    assert pooch.simulate(path, kind(tmp_path / "plan.json")).peak_bytes == plan.predicted_peak_bytes


def test_a_plan_is_applied_from_its_file(tmp_path: Path) -> None:
    model, forward = model_and_forward()
    profile = pooch.profile(forward, model)
    pooch.plan_from_decisions(profile, {}).save(tmp_path / "plan.json")
    with pooch.apply(tmp_path / "plan.json", model) as run:
        forward().backward()
    assert run.totals.steps == 1
    profile.save(tmp_path / "profile.json")
    with pytest.raises(FileFormatError, match="give the other one"):
        pooch.apply(str(tmp_path / "profile.json"), model)


Call = Callable[[Profile, Plan], object]
MODEL = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
WRONG: dict[str, tuple[Call, str]] = {
    "plan of a plan": (lambda _, plan: pooch.plan(plan, "60%"), r"plan\(\) takes a profile"),  # type: ignore[arg-type]
    "plan of a model": (lambda *_: pooch.plan(MODEL, "60%"), r"not a Linear: profile the step first"),  # type: ignore[arg-type]
    "apply a profile": (lambda profile, _: pooch.apply(profile, MODEL), "not a Profile: plan it first"),  # type: ignore[arg-type]
    "apply to a model first": (lambda _, plan: pooch.apply(MODEL, plan), r"as in pooch.apply\(plan, model\)"),  # type: ignore[arg-type]
    "apply to no model": (lambda _, plan: pooch.apply(plan, OPTIMIZER), "takes a torch.nn.Module, not SGD"),  # type: ignore[arg-type]
    "simulate the other way round": (lambda profile, plan: pooch.simulate(plan, profile), "the profile comes first"),  # type: ignore[arg-type]
    "guard without a profile": (lambda *_: pooch.guard(MODEL, "60%", MODEL), r"guard\(\) takes a profile"),  # type: ignore[arg-type]
    "guard without a model": (lambda profile, _: pooch.guard(profile, "60%", None), r"guard\(\) takes a torch.nn"),  # type: ignore[arg-type]
    "auto of an optimizer": (lambda *_: pooch.auto(OPTIMIZER, "60%"), r'not SGD: pooch.auto\(model, "16GiB"\)'),  # type: ignore[arg-type]
    "auto of a text": (lambda *_: pooch.auto("60%", MODEL), "the budget is of type Linear"),  # type: ignore[arg-type]
    "auto of no optimizer": (
        lambda *_: pooch.auto(MODEL, "60%", 0.1),
        "the optimizer is of type float: give one, or a list",
    ),  # type: ignore[arg-type]
    "auto of no optimizers": (
        lambda *_: pooch.auto(MODEL, "60%", [OPTIMIZER, "16GiB"]),
        "the optimizer is of type str",
    ),  # type: ignore[list-item]
    "auto of texts": (lambda *_: pooch.auto(["a"], "60%"), "not str"),  # type: ignore[list-item]
    "auto of none": (lambda *_: pooch.auto([], "60%"), "needs at least one model"),
    "auto with an optimizer as budget": (lambda *_: pooch.auto(MODEL, OPTIMIZER), "the budget is of type SGD"),  # type: ignore[arg-type]
    "auto both quiet and told": (lambda *_: pooch.auto(MODEL, "60%", quiet=True, tell=print), "give one of them"),
    "profile the other way round": (lambda *_: pooch.profile(MODEL, lambda: None), "the function comes first"),  # type: ignore[arg-type, return-value]
    "profile with another optimizer": (lambda *_: pooch.profile(lambda: None, MODEL, "sgd"), "the optimizer is str"),  # type: ignore[arg-type, return-value]
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_of_the_wrong_kind_is_told_in_one_line(name: str, profile: Profile, plan: Plan) -> None:
    call, told = WRONG[name]
    with pytest.raises(UsageError, match=told) as caught:
        call(profile, plan)
    assert "\n" not in str(caught.value)


def test_a_forward_that_uses_nothing_of_the_model_is_told_when_it_is_profiled() -> None:
    _, forward = model_and_forward()
    other = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(UsageError, match=r"forward uses nothing of this model \(Sequential\)"):
        pooch.profile(forward, other)


def test_a_forward_that_calls_parts_of_the_model_is_noted() -> None:
    model, forward = model_and_forward()
    assert not any("never the model itself" in note for note in pooch.profile(forward, model).notes)
    data = torch.randn(32, 64)

    def in_parts() -> torch.Tensor:
        hidden: Any = data
        for part in model.children():
            hidden = part(hidden)
        return hidden.square().mean()  # type: ignore[no-any-return]

    assert any("plan with region='step'" in note for note in pooch.profile(in_parts, model).notes)


def test_parameters_that_are_used_without_a_call_are_no_mistake() -> None:
    model = nn.Linear(64, 64)
    data = torch.randn(32, 64)
    profile = pooch.profile(lambda: nn.functional.linear(data, model.weight).square().mean(), model)
    assert profile.model_begin == profile.model_end
