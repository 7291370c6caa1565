"""Lightning under a budget: same bits, within the budget, whatever `training_step` calls."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.errors import UsageError

lightning = pytest.importorskip("lightning")

from pooch.integrations.lightning import PoochCallback  # noqa: E402

pytestmark = pytest.mark.cpu

BUDGET_BYTES = 24 * 2**20


class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
    """The network in a ModuleList, which is never called itself, and a head."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))
        self.head = nn.Linear(256, 10)

    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch[0])
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch[0]))
            optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.blocks.parameters(), lr=0.1)
        if self.automatic_optimization:
            return first
        return [first, torch.optim.SGD(self.head.parameters(), lr=0.1)]


def trained(module: Any, *callbacks: Any, batches: int | None = None) -> dict[str, Tensor]:
    gc.collect()  # what an earlier training left counts towards the budget
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.05)
    data = torch.utils.data.TensorDataset(torch.randn(4800, 256))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=1024))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_a_module_trains_to_the_same_bits_within_the_budget(manual: bool) -> None:
    callback = PoochCallback(BUDGET_BYTES)
    plain, governed = trained(Module(manual)), trained(Module(manual), callback)
    assert all(torch.equal(plain[name], governed[name]) for name in plain)
    summary = callback.summary()
    assert summary.steps == (10 if manual else 5), "manual optimization has two backward passes in each batch"
    assert summary.steps_on_plan + summary.steps_online > 0, "the budget is one that plain training passes"
    assert summary.peak_bytes <= BUDGET_BYTES


def test_the_last_step_is_logged_with_the_modules_metrics() -> None:
    logged: list[dict[str, float]] = []

    class Noting(lightning.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    callback = PoochCallback(BUDGET_BYTES, quiet=True)
    assert repr(callback) == f"PoochCallback({BUDGET_BYTES}, no training is running)"
    trained(Module(), callback, Noting())
    last = logged[-1]
    assert last["pooch/steps"] == 5
    assert last["pooch/budget_mib"] == 24
    assert 0 < last["pooch/peak_mib"] <= 24
    assert last["pooch/on_plan"] in (0, 1)


def test_the_callback_lets_go_when_training_fails() -> None:
    class Failing(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ZeroDivisionError

    callback = PoochCallback(BUDGET_BYTES)
    with pytest.raises(ZeroDivisionError):
        trained(Failing(), callback)
    assert callback.summary().steps == 1
    trained(Module(), PoochCallback(BUDGET_BYTES))  # which would be refused while another budget is held


class Functional(Module):
    """Its training step calls no submodule."""

    def loss(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.head.weight).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.head.weight], lr=0.1)


def test_a_step_that_calls_no_submodule_is_told() -> None:
    with pytest.warns(UserWarning, match="called none of its submodules"):
        trained(Functional(), PoochCallback(BUDGET_BYTES), batches=1)


def test_steps_that_call_no_submodule_are_covered_from_the_second_on() -> None:
    plain = trained(Functional())
    callback = PoochCallback(BUDGET_BYTES)
    found = trained(Functional(), callback)
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    assert callback.summary().steps == 4


def test_a_module_without_a_network_is_refused() -> None:
    class Empty(Module):
        def __init__(self) -> None:
            super().__init__()
            del self.blocks, self.head
            self.weight = nn.Parameter(torch.zeros(1))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.weight], lr=0.1)

    with pytest.raises(UsageError, match="Empty has no submodule with parameters"):
        trained(Empty(), PoochCallback(BUDGET_BYTES))
