"""Every optimizer and many networks with most of their memory in parameters, gradients and state: the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import pooch
from pooch.torchtools import watch
from tests.autopilot.persistent_nets import NETS
from tests.live_before import live_before

pytestmark = [
    pytest.mark.skipif(watch.LIBRARY.get() is None, reason="nothing leaves without what watches natively"),
    pytest.mark.timeout(120),
]
STEPS, SHARE, ROOM_BYTES = 5, 0.22, 2**20

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda given: optim.AdamW(given, 1e-3),
    "Adam amsgrad": lambda given: optim.Adam(given, 1e-3, amsgrad=True, foreach=False),
    "AdamW fused": lambda given: optim.AdamW(given, 1e-3, fused=True),
    "SGD": lambda given: optim.SGD(given, 1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda given: optim.RMSprop(given, 1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda given: optim.Adagrad(given, 1e-2),
    "Adafactor": lambda given: optim.Adafactor(given),
    "NAdam": lambda given: optim.NAdam(given, 1e-3),
    "RAdam": lambda given: optim.RAdam(given, 1e-3),
    "Adadelta": lambda given: optim.Adadelta(given),
    "Adamax": lambda given: optim.Adamax(given, 1e-3),
    "ASGD": lambda given: optim.ASGD(given, 1e-3),
    "Rprop": lambda given: optim.Rprop(given, 1e-3),
}
FEATURES = ("plain", "clipping", "accumulation", "autocast", "scaler")
# Each network with each optimizer, and the features in turns, so that each meets each network and each optimizer.
CASES = [
    (net, optimizer, FEATURES[(row + column) % len(FEATURES)])
    for row, net in enumerate(NETS)
    for column, optimizer in enumerate(OPTIMIZERS)
]


def groups_of(model: nn.Module, are_several: bool) -> list[Any]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not are_several:
        return trained
    half = len(trained) // 2
    return [{"params": trained[:half], "lr": 2e-3}, {"params": trained[half:], "weight_decay": 0.0}]


def step(model: nn.Module, loss_of: Any, optimizer: optim.Optimizer, feature: str, scaler: Any) -> list[float]:
    losses = []
    for _ in range(2 if feature == "accumulation" else 1):
        around = torch.autocast("cpu", torch.bfloat16) if feature == "autocast" else contextlib.nullcontext()
        with around:
            loss = loss_of(model)
        losses.append(loss.item())
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(optimizer)
    if feature in ("clipping", "scaler"):
        nn.utils.clip_grad_norm_([each for each in model.parameters() if each.requires_grad], 0.1)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=feature != "accumulation")
    return losses


def trained(net: str, optimizer_name: str, feature: str, *, within: bool) -> tuple[list[float], list[bytes], bytes]:
    """The losses, all that outlives the steps, and the random state."""
    before_bytes = live_before()
    torch.manual_seed(0)
    model = NETS[net].build()
    optimizer = OPTIMIZERS[optimizer_name](groups_of(model, NETS[net].groups))
    scheduler = optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if feature == "scaler" else None
    losses: list[float] = []
    with contextlib.ExitStack() as stack:
        auto = None
        if within:
            whole_bytes = sum(each.nbytes * (4 if each.requires_grad else 1) for each in model.parameters())
            budget_bytes = before_bytes + int(SHARE * whole_bytes) + ROOM_BYTES
            auto = stack.enter_context(pooch.auto(model, budget_bytes, optimizer, quiet=True))
        torch.manual_seed(1)
        for _ in range(STEPS):
            losses += step(model, NETS[net].loss, optimizer, feature, scaler)
            scheduler.step()
        if auto is not None:
            summary = auto.summary()
            assert max(summary.peak_bytes, summary.between_peak_bytes) <= budget_bytes
            assert sum(each.in_bytes for each in summary.persistent) > 0
            assert not summary.staying
    tensors = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        tensors += [state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)]
    contents = [bytes(each.detach().contiguous().view(-1).view(torch.uint8).tolist()) for each in tensors]
    return losses, contents, torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize(("net", "optimizer", "feature"), CASES)
def test_the_numbers_are_those_of_plain_training(net: str, optimizer: str, feature: str) -> None:
    plain = trained(net, optimizer, feature, within=False)
    assert trained(net, optimizer, feature, within=True) == plain
