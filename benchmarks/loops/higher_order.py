"""Gradients of gradients: meta-learning, penalties, second order, `torch.func`, written from PyTorch's tutorials."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn, optim
from torch.func import functional_call, grad, hessian, jacrev, vmap
from torch.nn import functional

from benchmarks.loops.loop import Loop, loop


def _classifier() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16, affine=True, track_running_stats=False), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16, affine=True, track_running_stats=False), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Flatten(), nn.Linear(400, 5),
    )  # fmt: skip


def _tasks(count: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    return [
        (torch.rand(25, 1, 28, 28), torch.randint(5, (25,)), torch.rand(25, 1, 28, 28), torch.randint(5, (25,)))
        for _ in range(count)
    ]


@loop()
def maml_create_graph(run: Loop) -> None:
    """Inner steps by `torch.autograd.grad(create_graph=True)` and `functional_call`, as `higher` unrolls them."""
    net = _classifier()
    meta = optim.Adam(net.parameters(), lr=1e-3)
    run.governs(net, meta)
    for _ in range(8):
        meta.zero_grad()
        losses = []
        for x_support, y_support, x_query, y_query in _tasks(2):
            fast = dict(net.named_parameters())
            for _ in range(3):
                loss = functional.cross_entropy(functional_call(net, fast, (x_support,)), y_support)
                gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {name: value - 0.1 * each for (name, value), each in zip(fast.items(), gradients, strict=True)}
            query = functional.cross_entropy(functional_call(net, fast, (x_query,)), y_query)
            losses.append(query.detach())
            query.backward()
        meta.step()
        run.step(*losses)
    run.state("parameters", net)


@loop()
def maml_torch_func(run: Loop) -> None:
    """The same by `torch.func.grad` inside `vmap` over the tasks."""
    net = _classifier()
    parameters = dict(net.named_parameters())
    meta = optim.Adam(net.parameters(), lr=1e-3)

    def of_a_task(x_support: Tensor, y_support: Tensor, x_query: Tensor, y_query: Tensor) -> Tensor:
        def loss_of(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return functional.cross_entropy(functional_call(net, values, (x,)), y)

        fast = parameters
        for _ in range(3):
            gradients = grad(loss_of)(fast, x_support, y_support)
            fast = {name: value - 0.1 * gradients[name] for name, value in fast.items()}
        return loss_of(fast, x_query, y_query)

    run.governs(net, meta)
    for _ in range(6):
        batch = [torch.stack(parts) for parts in zip(*_tasks(2), strict=True)]
        meta.zero_grad()
        losses = vmap(of_a_task, randomness="same")(*batch)
        losses.sum().backward()
        meta.step()
        run.step(losses.sum())
    run.state("parameters", net)


@loop()
def reptile(run: Loop) -> None:
    """First-order meta-learning: a copy of the net is trained, and the net moved towards it."""
    import copy

    net = _classifier()
    run.governs(net)
    for x_support, y_support, _, _ in _tasks(8):
        fast = copy.deepcopy(net)
        inner = optim.SGD(fast.parameters(), lr=0.05)
        for _ in range(3):
            loss = functional.cross_entropy(fast(x_support), y_support)
            inner.zero_grad()
            loss.backward()
            inner.step()
        with torch.no_grad():
            for slow, quick in zip(net.parameters(), fast.parameters(), strict=True):
                slow += 0.5 * (quick - slow)
        functional.cross_entropy(net(x_support), y_support).backward()
        net.zero_grad()
        run.step(loss)
    run.state("parameters", net)


def _mlp(*widths: int) -> nn.Sequential:
    pairs = pairwise(widths)
    return nn.Sequential(*[part for sizes in pairs for part in (nn.Linear(*sizes), nn.Tanh())][:-1])


@loop()
def per_sample_gradients(run: Loop) -> None:
    """Differentially private SGD: `vmap(grad(...))`, clipped for each sample, with noise."""
    model = _mlp(64, 64, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def loss_of(values: dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, values, (sample.unsqueeze(0),)), target.unsqueeze(0))

    run.governs(model, optimizer)
    for _ in range(8):
        data, targets = torch.randn(64, 64), torch.randint(10, (64,))
        values = {name: each.detach() for name, each in model.named_parameters()}
        gradients = vmap(grad(loss_of), in_dims=(None, 0, 0))(values, data, targets)
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()]).norm(dim=0)
        scale = (1 / norms.clamp(min=1.0)).reshape(-1, *[1])
        for name, parameter in model.named_parameters():
            clipped = (gradients[name].flatten(1) * scale).sum(0).view_as(parameter)
            parameter.grad = (clipped + 0.1 * torch.randn_like(clipped)) / len(data)
        optimizer.step()
        run.step(norms.sum())
    run.state("parameters", model)


@loop()
def physics_informed(run: Loop) -> None:
    """A network whose derivatives by its inputs obey an equation: gradients of gradients in the loss."""
    net = _mlp(2, 64, 64, 64, 1)
    optimizer = optim.Adam(net.parameters(), lr=1e-3)
    run.governs(net, optimizer)
    for _ in range(10):
        points = torch.rand(2000, 2, requires_grad=True)
        u = net(points)
        (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
        residual = first[:, 1:] + u * first[:, :1] - 0.01 * second[:, :1]
        boundary = net(torch.cat([torch.rand(200, 1), torch.zeros(200, 1)], 1))
        loss = residual.square().mean() + boundary.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)
    run.state("parameters", net)


@loop()
def jacobian_penalty(run: Loop) -> None:
    """`vmap(jacrev(...))` of a network in its loss, and a Hessian beside training."""
    net = _mlp(8, 96, 96, 4)
    optimizer = optim.Adam(net.parameters(), lr=1e-3)
    run.governs(net, optimizer)
    for _ in range(8):
        x = torch.randn(256, 8)
        jacobians = vmap(jacrev(net))(x)
        loss = net(x).square().mean() + 0.1 * jacobians.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.value("hessian", hessian(lambda each: net(each).sum())(x[0]).diagonal().sum())
        run.step(loss)
    run.state("parameters", net)


@loop()
def wgan_gp(run: Loop) -> None:
    """Wasserstein GAN with a gradient penalty, five critic steps for each generator step."""
    generator, critic = _mlp(16, 256, 256, 128), _mlp(128, 256, 256, 1)
    of_generator = optim.Adam(generator.parameters(), lr=1e-4, betas=(0.5, 0.9))
    of_critic = optim.Adam(critic.parameters(), lr=1e-4, betas=(0.5, 0.9))
    run.governs([generator, critic])
    for number in range(12):
        real, z = torch.randn(512, 128), torch.randn(512, 16)
        of_critic.zero_grad()
        fake = generator(z)
        alpha = torch.rand(512, 1)
        between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(
            critic(between), between, torch.ones(512, 1), create_graph=True, retain_graph=True, only_inputs=True
        )
        loss = -critic(real).mean() + critic(fake).mean() + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        if number % 5 == 0:
            g_loss = -critic(generator(z)).mean()
            g_loss.backward()
            of_generator.step()
            run.value("generator", g_loss)
        run.step(loss)
    run.state("generator", generator)
    run.state("critic", critic)


@loop()
def sharpness_aware(run: Loop) -> None:
    """SAM: two forward and backward passes for each step, the second at other parameters."""
    model = _mlp(128, 256, 256, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.governs(model, optimizer)
    for _ in range(8):
        x, y = torch.randn(1024, 128), torch.randint(10, (1024,))
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = torch.stack([each.norm() for each in gradients if each is not None]).norm()
        old = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.add_(gradient * (0.05 / (norm + 1e-12)))
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), old, strict=True):
                parameter.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
    run.state("parameters", model)


@loop()
def hessian_free(run: Loop) -> None:
    """Newton steps by conjugate gradients over Hessian-vector products of one retained graph."""
    model = _mlp(64, 128, 128, 1)
    parameters = list(model.parameters())
    run.governs(model)
    for _ in range(6):
        x, y = torch.randn(1024, 64), torch.randn(1024, 1)
        loss = functional.mse_loss(model(x), y)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        flat = torch.cat([each.flatten() for each in gradients])
        step, rest = torch.zeros_like(flat), -flat.detach()
        direction = rest.clone()
        for _ in range(3):
            products = torch.autograd.grad(flat, parameters, direction, retain_graph=True)
            curved = torch.cat([each.flatten() for each in products]) + direction
            length = rest.dot(rest) / direction.dot(curved)
            step, new = step + length * direction, rest - length * curved
            direction, rest = new + new.dot(new) / rest.dot(rest) * direction, new
        with torch.no_grad():
            for parameter, part in zip(parameters, step.split([p.numel() for p in parameters]), strict=True):
                parameter.add_(part.view_as(parameter), alpha=0.1)
        run.step(loss)
    run.state("parameters", model)
