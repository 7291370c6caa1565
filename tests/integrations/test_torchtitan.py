"""The integration for torchtitan, against stand-ins that have its interface: its models need Triton and a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from pooch.errors import UsageError
from tests.live_before import live_before


class StandIn:
    """A policy as torchtitan has it: it is made of its configuration, and applied to a model before there is data."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        preserve_rng_state: bool = True

    def __init__(self, config: Any, dump_folder: str = "") -> None:
        self.config = config


def tag(gm: torch.fx.GraphModule, *, policy_fn: Callable[[torch.fx.Node], CheckpointPolicy]) -> None:
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta["recompute"] = policy_fn(node)


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    registered: dict[str, Any] = {}
    names = ("", ".distributed", ".distributed.activation_checkpoint", ".experiments", ".experiments.graph_trainer")
    inner = (".experiments.graph_trainer.memory_policy", ".experiments.graph_trainer.registry")
    modules: dict[str, Any] = {name: ModuleType(f"torchtitan{name}") for name in (*names, *inner)}
    modules[names[2]].ActivationCheckpointing = StandIn
    modules[inner[0]].tag_sac_policy = tag
    modules[inner[1]].register_memory_policy = lambda key: lambda function: registered.setdefault(key, function)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"torchtitan{name}", module)
    monkeypatch.delitem(sys.modules, "pooch.integrations.torchtitan", raising=False)
    import pooch.integrations.torchtitan as integration

    integration.registered = registered  # type: ignore[attr-defined]
    yield integration
    integration.HELD.end()
    monkeypatch.delitem(sys.modules, "pooch.integrations.torchtitan", raising=False)


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(8)), nn.Linear(128, 8))


def train(model: nn.Module) -> list[float]:
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(1024, 128)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows), torch.arange(1024) % 8)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_model_trains_within_the_budget_with_the_same_losses(titan: Any) -> None:
    expected = train(built())
    budget_bytes = live_before() + 6 * 2**20  # without Pooch it takes 9.5 MiB
    model = built()
    titan.PoochBudget(titan.PoochBudget.Config(budget=f"{budget_bytes}B")).apply(model)
    assert train(model) == expected
    summary = titan.HELD.finder.auto.summary()
    assert summary.steps == 4
    assert summary.steps_over_budget == 0
    assert summary.swapped_bytes + summary.recomputed_ops > 0


def test_the_parts_of_a_model_share_one_budget(titan: Any) -> None:
    policy = titan.PoochBudget(titan.PoochBudget.Config(budget="1GiB"))
    policy.apply(built())
    finder = titan.HELD.finder
    policy.apply(built())
    assert titan.HELD.finder is finder
    with pytest.raises(UsageError, match="is held already"):
        titan.PoochBudget(titan.PoochBudget.Config(budget="2GiB")).apply(built())


def joint() -> torch.fx.GraphModule:
    def function(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        wide = torch.nn.functional.dropout(torch.relu(rows @ first), 0.1)
        return (wide @ second).sin()

    return make_fx(function, tracing_mode="fake")(torch.randn(64, 32), torch.randn(32, 256), torch.randn(256, 16))


def saved(graph: torch.fx.GraphModule) -> set[str]:
    return {node.name for node in graph.graph.nodes if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE}


def test_a_policy_saves_as_much_as_its_budget_allows(titan: Any) -> None:
    titan.register_policy("1GiB")
    assert {"mm", "mm_1"} <= saved(titan.registered["pooch"](joint(), config=None))
    titan.register_policy("100KiB", "small")  # of which the random numbers take 64
    names = saved(titan.registered["small"](joint(), config=None))
    assert "mm_1" in names, "it takes the most computing for its bytes"
    assert "mm" not in names
    assert any("dropout" in name or "bernoulli" in name for name in names), "random numbers are never drawn again"


def test_a_policy_that_cannot_be_kept_is_refused(titan: Any) -> None:
    titan.register_policy("2KiB")
    with pytest.raises(UsageError, match="more than the budget"):
        titan.registered["pooch"](joint(), config=None)
