"""Plans of models that are compiled in parts: graphs are ops of the plan, and what they save is copied."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

import pooch
from pooch.errors import UsageError
from pooch.executor.apply import apply_plan
from pooch.ir.plan import GRAPH
from pooch.planner import Effort
from tests.autopilot.test_compiled import Broken, Changing
from tests.compiled_models import MODELS, WIDTH, blocks_in_place, blocks_wrapped, data_of, whole, whole_without_breaks

ROWS = 512


def compiled(name: str, way: Any, backend: str) -> nn.Module:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    return way(MODELS[name](), backend)  # type: ignore[no-any-return]


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(data[0]), data[1])


def steps(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Train from the same random state, and return all that there is."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), list[float]()
    for data in batches:
        optimizer.zero_grad()
        loss = loss_of(model, data)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [torch.tensor(losses)] + [
        each.detach().clone() for each in (*model.parameters(), *gradients, *model.buffers())
    ]


def compare(name: str, way: Any, backend: str, budget: str, effort: Effort = "full") -> tuple[pooch.Plan, Any]:
    data = data_of(name, torch.Generator().manual_seed(2))
    expected = steps(compiled(name, way, backend), [data] * 4)
    graphs = counters["stats"]["unique_graphs"]
    model = compiled(name, way, backend)
    profile = pooch.profile(lambda: loss_of(model, data), model)
    plan = pooch.plan(profile, budget=budget, effort=effort)
    with apply_plan(plan, model, measure_every=1) as run:
        assert all(map(torch.equal, steps(model, [data] * 4), expected))
    assert counters["stats"]["unique_graphs"] == graphs, "nothing is compiled by us, and nothing anew"
    assert run.totals.steps_off_path == 0
    assert run.totals.steps_over_budget == 0
    assert run.stats.recomputed_ops == 0
    assert any(op.name == GRAPH for op in profile.ops)
    return plan, run


@pytest.mark.parametrize("way", [blocks_in_place, blocks_wrapped])
def test_compiled_blocks_follow_their_plan(way: Any) -> None:
    plan, run = compare("language", way, "aot_eager", "75%")
    assert {choice.choice for choice in plan.choices} == {"keep", "swap"}
    assert run.stats.swapped_out_bytes > 0


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_each_kind_of_model(name: str, backend: str) -> None:
    compare(name, blocks_in_place, backend, "80%", "fast")  # how plans are searched for is the same for all kinds


@pytest.mark.parametrize("way", [whole, whole_without_breaks])
def test_a_model_compiled_as_a_whole_is_planned_too(way: Any) -> None:
    plan, run = compare("language", way, "aot_eager", "min")
    assert run.stats.swapped_out_bytes > 0
    assert plan.predicted_peak_bytes < plan.in_core_peak_bytes / 2, "what is saved leaves within the graph"


@pytest.mark.parametrize("kind", [Broken, Changing])
def test_what_graphs_write_to_and_what_lies_between_them(kind: type[nn.Module]) -> None:
    data = (torch.randn(ROWS, WIDTH), torch.randint(10, (ROWS,)))

    def built() -> nn.Module:
        torch._dynamo.reset()
        torch.manual_seed(0)
        return kind()

    expected = steps(built(), [data] * 3)
    model = built()
    profile = pooch.profile(lambda: loss_of(model, data), model)
    with apply_plan(pooch.plan(profile, budget="min", effort="fast"), model) as run:
        assert all(map(torch.equal, steps(model, [data] * 3), expected))
    assert run.stats.swapped_out_bytes > 0


def test_a_step_that_leaves_its_plan_has_its_bits() -> None:
    generator = torch.Generator().manual_seed(2)
    data, other = data_of("language", generator), data_of("language", generator, length=48)
    batches = [data, other, data]
    expected = steps(compiled("language", blocks_in_place, "aot_eager"), batches)
    model = compiled("language", blocks_in_place, "aot_eager")
    plan = pooch.plan(pooch.profile(lambda: loss_of(model, data), model), budget="75%", effort="fast")
    with warnings.catch_warnings(), apply_plan(plan, model, measure_every=1) as run:
        warnings.simplefilter("ignore")
        assert all(map(torch.equal, steps(model, batches), expected))
    assert run.totals.steps_off_path == 1
    assert run.stats.swapped_out_bytes > 0


def test_a_plan_of_the_model_before_it_was_compiled_is_refused() -> None:
    data = data_of("language", torch.Generator().manual_seed(2))
    model = MODELS["language"]()
    plan = pooch.plan(pooch.profile(lambda: loss_of(model, data), model), budget="75%", effort="fast")
    blocks_in_place(model, "aot_eager")
    with pytest.raises(UsageError, match="was not when the plan was made: profile and plan again"):
        apply_plan(plan, model)


def test_a_plan_of_graphs_that_make_values_again() -> None:
    data = data_of("language", torch.Generator().manual_seed(2))
    expected = steps(compiled("language", whole, "aot_eager"), [data] * 3)
    model = compiled("language", whole, "aot_eager")
    budget_bytes = 7 * 2**20
    profile = pooch.profile(lambda: loss_of(model, data), model, memory_limit=budget_bytes, allow_recompute="rounding")
    assert any('allow_recompute="rounding"' in note for note in profile.notes)
    plan = pooch.plan(profile, budget=budget_bytes, effort="fast")
    with apply_plan(plan, model, measure_every=1) as run:
        assert all(map(torch.equal, steps(model, [data] * 3), expected)), "aot_eager fuses nothing"
    assert run.totals.steps_over_budget == 0


def test_making_values_again_needs_a_budget() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="give it as memory_limit"):
        pooch.profile(lambda: model(torch.randn(2, 2)).sum(), model, allow_recompute="rounding")
