"""Loops written by hand around one model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, softplus
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from benchmarks.setups.nets import LanguageModel, conv_net, mlp, pictures
from benchmarks.setups.setup import setup
from benchmarks.setups.way import Way

STEPS = 16


@setup("model, loss, backward, optimizer")
def plain_loop(way: Way) -> None:
    model = conv_net()
    optimizer = torch.optim.AdamW(model.parameters())
    way.auto(model, optimizer)
    for _ in range(STEPS):
        loss = cross_entropy(model(pictures(16)), torch.randint(10, (16,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        way.record.step(loss)
    way.record.state("parameters", model)


def multi_scale_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Distance of two batches of feature maps at four scales: it saves more than the model does."""
    loss = torch.zeros(())
    for scale in (1, 2, 4, 8):
        difference = avg_pool2d(prediction, scale) - avg_pool2d(target, scale)
        loss = loss + (softplus(difference) * torch.tanh(difference)).square().mean()
    return loss


@setup("a loss outside of the model that saves more than the model")
def loss_outside(way: Way) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    way.auto(model, optimizer)
    for _ in range(STEPS):
        prediction = model(pictures(8, 96))
        loss = multi_scale_loss(prediction, torch.randn_like(prediction))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.record.step(loss)
    way.record.state("parameters", model)


@setup("accumulation over three micro-batches, clipping, a smaller last batch, validation in between")
def accumulation(way: Way) -> None:
    model = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    way.auto(model, optimizer)
    for epoch in range(6):
        for size in (12, 12, 5):
            loss = cross_entropy(model(pictures(size)), torch.randint(10, (size,))) / 3
            loss.backward()
            way.record.value("loss", loss)
        way.record.value("norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        way.record.step()
        if epoch % 2:
            model.eval()
            with torch.no_grad():
                way.record.value("validation", cross_entropy(model(pictures(32)), torch.randint(10, (32,))))
            model.train()
    way.record.state("parameters", model)


@setup("pictures of a different size in every step")
def multi_scale_pictures(way: Way) -> None:
    model = conv_net()
    optimizer = torch.optim.Adam(model.parameters())
    way.auto(model, optimizer)
    for step in range(20):
        loss = cross_entropy(model(pictures(12, (48, 56, 64, 72, 80)[step * 3 % 5])), torch.randint(10, (12,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.record.step(loss)
    way.record.state("parameters", model)


@setup("layers unfrozen in the middle of training")
def unfreezing(way: Way) -> None:
    model = conv_net(blocks=6)
    for parameter in model[:4].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05, momentum=0.9)
    way.auto(model, optimizer)
    for step in range(STEPS):
        if step == STEPS // 2:
            for parameter in model[:4].parameters():
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": list(model[:4].parameters())})
        loss = cross_entropy(model(pictures(12)), torch.randint(10, (12,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.record.step(loss)
    way.record.state("parameters", model)


@setup("an exponential moving average of the parameters, evaluated in between")
def moving_average(way: Way) -> None:
    model = conv_net()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters())
    way.auto(model, optimizer)
    for step in range(STEPS):
        loss = cross_entropy(model(pictures(16)), torch.randint(10, (16,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        way.record.step(loss)
        if step % 5 == 4:
            with torch.no_grad():
                way.record.value("validation", averaged(pictures(8)).square().mean())
    way.record.state("parameters", model)
    way.record.state("averaged", averaged)


@setup("two backward passes over one graph, the first with retain_graph=True")
def retained_graph(way: Way) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    way.auto(model, optimizer)
    for _ in range(STEPS):
        outputs = model(torch.randn(1536, 256))
        first, second = outputs.square().mean(), outputs.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.record.step(first, second)
    way.record.state("parameters", model)


@setup("a gradient penalty: torch.autograd.grad with create_graph=True inside the loss")
def gradient_penalty(way: Way) -> None:
    model = mlp(width=384, depth=5, outputs=1)
    optimizer = torch.optim.Adam(model.parameters())
    way.auto(model, optimizer)
    for _ in range(STEPS):
        inputs = torch.randn(1024, 256, requires_grad=True)
        scores = model(inputs)
        (gradient,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
        loss = scores.mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.record.step(loss)
    way.record.state("parameters", model)


@setup("LBFGS: the optimizer calls a closure several times per step")
def lbfgs_closure(way: Way) -> None:
    model = mlp(width=256, depth=8)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3)
    inputs, target = torch.randn(2048, 256), torch.randn(2048, 64)
    way.auto(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - target).square().mean()
        loss.backward()
        way.record.value("closure", loss)
        return loss

    for _ in range(6):
        way.record.step(optimizer.step(closure))
    way.record.state("parameters", model)


class Swish(torch.autograd.Function):
    """x * sigmoid(x), which saves its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        return gradient * sigmoid * (1 + x * (1 - sigmoid))


class CustomFunction(nn.Module):
    """Convolutions with `Swish` in between."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(24, 24, 3, padding=1) for _ in range(5))
        self.first, self.head = nn.Conv2d(3, 24, 3, padding=1), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for conv in self.convs:
            x = Swish.apply(conv(x))
        return self.head(x.mean(dim=(2, 3)))


@setup("a custom autograd function")
def custom_function(way: Way) -> None:
    model = CustomFunction()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    way.auto(model, optimizer)
    for _ in range(STEPS):
        loss = cross_entropy(model(pictures(16)), torch.randint(10, (16,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.record.step(loss)
    way.record.state("parameters", model)


class Checkpointed(LanguageModel):
    """Every other block under `torch.utils.checkpoint`."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number % 2 else block(x)
        return self.head(x)


@setup("torch.utils.checkpoint inside the model")
def checkpoint_inside(way: Way) -> None:
    model = Checkpointed(depth=6)
    optimizer = torch.optim.AdamW(model.parameters())
    way.auto(model, optimizer)
    for _ in range(STEPS):
        tokens = torch.randint(200, (8, 129))
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.record.step(loss)
    way.record.state("parameters", model)


@setup("bf16 autocast, and a copy of the optimizer's state taken and loaded again in the middle")
def bfloat16_resumed(way: Way) -> None:
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters())
    way.auto(model, optimizer)
    for step in range(STEPS):
        tokens = torch.randint(200, (12, 129))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.record.step(loss)
        if step == STEPS // 2:
            saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            way.record.state("checkpoint", saved)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
    way.record.state("parameters", model)
