"""Networks of packages that bring backward passes of their own: reversible, implicit, spiking, sparse, by a scan."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures.made import Build, OptionalTable, randn, tokens
from benchmarks.architectures.network import Network

NETWORKS = OptionalTable()
names, network = NETWORKS.names, NETWORKS.network
WORDS, LENGTH, WIDTH = 128, 64, 64
OF_TEXTS = {"num_tokens": WORDS, "dim": WIDTH, "depth": 3, "heads": 4, "max_seq_len": LENGTH, "causal": True}


def _of_texts(package: str, class_name: str, **options: Any) -> None:
    def build() -> Network:
        made = getattr(importlib.import_module(package), class_name)(**OF_TEXTS, **options)
        return Network(made.train(), tokens(LENGTH, WORDS))

    NETWORKS.needs(package, class_name)(build)


_of_texts("reformer_pytorch", "ReformerLM", dim_head=16, bucket_size=8, n_hashes=2, ff_chunks=2, lsh_dropout=0.1)
_of_texts("linear_attention_transformer", "LinearAttentionTransformerLM", dim_head=16, reversible=True,
          blindspot_size=1, n_local_attn_heads=2, local_attn_window_size=16, ff_dropout=0.1)  # fmt: skip
_of_texts("performer_pytorch", "PerformerLM", dim_head=16, nb_features=16, reversible=True, ff_dropout=0.1)
_of_texts("sinkhorn_transformer", "SinkhornTransformerLM", bucket_size=16, reversible=True, ff_dropout=0.1)
_of_texts("routing_transformer", "RoutingTransformerLM", dim_head=16, window_size=16, reversible=True,
          ff_dropout=0.1)  # fmt: skip


@NETWORKS.needs("axial_attention", "AxialImageTransformer")
def _axial() -> Network:
    from axial_attention import AxialImageTransformer

    model = AxialImageTransformer(dim=32, depth=3, heads=4, reversible=True)
    return Network(nn.Sequential(nn.Conv2d(3, 32, 1), model).train(), randn(3, 16, 16))


class _Halves(nn.Module):
    """What changes one half of the channels by the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.layers(values)
        return out


def _memcnn(keeps_input: bool) -> Build:
    def build() -> Network:
        import memcnn

        blocks = [
            memcnn.InvertibleModuleWrapper(
                memcnn.AdditiveCoupling(_Halves(16), _Halves(16)),
                keep_input=keeps_input,
                keep_input_inverse=keeps_input,
            )
            for _ in range(4)
        ]
        return Network(nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks).train(), randn(3, 32, 32))

    return build


NETWORKS.needs("memcnn", "additive")(_memcnn(False))
NETWORKS.needs("memcnn", "additive-keeping")(_memcnn(True))


@NETWORKS.needs("revtorch", "reversible")
def _revtorch() -> Network:
    import revtorch

    blocks = nn.ModuleList(revtorch.ReversibleBlock(_Halves(16), _Halves(16)) for _ in range(4))
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), revtorch.ReversibleSequence(blocks))
    return Network(model.train(), randn(3, 32, 32))


class _Likelihood(nn.Module):
    """The negative likelihood of samples under a flow."""

    def __init__(self, flow: nn.Module, tell: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.flow, self.tell = flow, tell

    def forward(self, samples: Tensor) -> Tensor:
        return -self.tell(self.flow, samples).mean()


@NETWORKS.needs("FrEIA", "all-in-one")
def _freia() -> Network:
    import FrEIA.framework as framework
    import FrEIA.modules as modules

    def inner(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, outputs))

    flow = framework.SequenceINN(32)
    for _ in range(4):
        flow.append(modules.AllInOneBlock, subnet_constructor=inner, permute_soft=True)

    def tell(flow: nn.Module, samples: Tensor) -> Tensor:
        hidden, volume = flow(samples)
        return volume - 0.5 * hidden.square().sum(1)

    return Network(_Likelihood(flow.train(), tell), lambda size: (torch.randn(16 * size, 32),))


@NETWORKS.needs("nflows", "splines")
def _nflows() -> Network:
    from nflows.distributions import StandardNormal
    from nflows.flows import Flow
    from nflows.transforms import (
        CompositeTransform,
        MaskedPiecewiseRationalQuadraticAutoregressiveTransform,
        RandomPermutation,
    )

    layers = [
        layer
        for _ in range(3)
        for layer in (
            MaskedPiecewiseRationalQuadraticAutoregressiveTransform(8, 32, tails="linear", tail_bound=4.0),
            RandomPermutation(8),
        )
    ]
    flow = Flow(CompositeTransform(layers), StandardNormal([8]))
    tell = lambda flow, samples: flow.log_prob(samples)  # noqa: E731
    return Network(_Likelihood(flow, tell).train(), lambda size: (torch.randn(16 * size, 8),))


@NETWORKS.needs("zuko", "NSF")
def _zuko() -> Network:
    import zuko

    flow = zuko.flows.NSF(8, transforms=3, hidden_features=(32, 32))
    tell = lambda flow, samples: flow().log_prob(samples)  # noqa: E731
    return Network(_Likelihood(flow, tell).train(), lambda size: (torch.randn(16 * size, 8),))


@NETWORKS.needs("snntorch", "leaky")
def _spiking() -> Network:
    import snntorch

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(64, 128), nn.Linear(128, 10)
            gradient = snntorch.surrogate.fast_sigmoid()
            self.first = snntorch.Leaky(beta=0.9, spike_grad=gradient, learn_beta=True)
            self.second = snntorch.Synaptic(alpha=0.8, beta=0.9, spike_grad=gradient)

        def forward(self, currents: Tensor) -> Tensor:
            one, (two, three), spikes = self.first.init_leaky(), self.second.init_synaptic(), []
            for current in currents.unbind(1):
                out, one = self.first(self.into(current), one)
                out, two, three = self.second(self.out(out), two, three)
                spikes.append(three)
            return torch.stack(spikes)

    return Network(Spiking().train(), randn(10, 64))


def _stochastic(with_adjoint: bool) -> Build:
    def build() -> Network:
        import torchsde

        class Equation(nn.Module):
            noise_type, sde_type = "diagonal", "ito" if not with_adjoint else "stratonovich"

            def __init__(self) -> None:
                super().__init__()
                self.drift = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
                self.spread = nn.Linear(16, 16)

            def f(self, time: Tensor, state: Tensor) -> Tensor:
                out: Tensor = self.drift(state)
                return out

            def g(self, time: Tensor, state: Tensor) -> Tensor:
                return torch.sigmoid(self.spread(state))

            def forward(self, state: Tensor) -> Tensor:
                entropy = int(torch.randint(2**31, ()))
                times = torch.linspace(0, 1, 4)
                motion = torchsde.BrownianInterval(0.0, 1.0, size=state.shape, entropy=entropy)
                solve = torchsde.sdeint_adjoint if with_adjoint else torchsde.sdeint
                out: Tensor = solve(
                    self, state, times, bm=motion, dt=0.1, method="midpoint" if with_adjoint else "euler"
                )
                return out

        return Network(Equation().train(), lambda size: (torch.randn(16 * size, 16),))

    return build


NETWORKS.needs("torchsde", "euler")(_stochastic(False))
NETWORKS.needs("torchsde", "adjoint")(_stochastic(True))


@NETWORKS.needs("torchdeq", "fixed-point")
def _implicit() -> Network:
    from torchdeq import get_deq

    class Implicit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.solve = get_deq(f_solver="fixed_point_iter", f_max_iter=12, b_max_iter=12, f_tol=1e-3, b_tol=1e-3)
            self.into = nn.Linear(64, 64)
            self.layer = nn.utils.spectral_norm(nn.Linear(64, 64))

        def forward(self, inputs: Tensor) -> Tensor:
            injected = self.into(inputs)
            found, _ = self.solve(
                lambda state: torch.tanh(0.5 * self.layer(state) + injected), torch.zeros_like(injected)
            )
            out: Tensor = found[-1]
            return out

    return Network(Implicit().train(), lambda size: (torch.randn(32 * size, 64),))


@NETWORKS.needs("geoopt", "hyperbolic")
def _hyperbolic() -> Network:
    import geoopt

    class Hyperbolic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ball = geoopt.PoincareBall()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
            self.points = nn.ParameterList(
                geoopt.ManifoldParameter(self.ball.expmap0(0.1 * torch.randn(32)), manifold=self.ball) for _ in range(4)
            )

        def forward(self, inputs: Tensor) -> Tensor:
            values = self.ball.expmap0(0.1 * inputs)
            for layer, point in zip(self.layers, self.points, strict=True):
                moved = self.ball.mobius_add(values, point)
                values = self.ball.expmap0(torch.tanh(layer(self.ball.logmap0(moved))))
            return self.ball.dist0(values)

    return Network(Hyperbolic().train(), lambda size: (torch.randn(16 * size, 32),))


@NETWORKS.needs("entmax", "attention")
def _sparse() -> Network:
    from entmax import entmax15, sparsemax

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(4))

        def forward(self, values: Tensor) -> Tensor:
            for number, part in enumerate(self.parts):
                queries, keys, others = part(values).chunk(3, -1)
                weigh = sparsemax if number % 2 else entmax15
                values = values + weigh(queries @ keys.mT / WIDTH**0.5, dim=-1) @ others
            return values

    return Network(Attention().train(), randn(32, WIDTH))


@NETWORKS.needs("mambapy", "Mamba")
def _mamba() -> Network:
    from mambapy.mamba import Mamba, MambaConfig

    return Network(Mamba(MambaConfig(d_model=32, n_layers=3)).train(), randn(32, 32))


@NETWORKS.needs("pytorch_tabnet", "TabNet")
def _tabnet() -> Network:
    from pytorch_tabnet.tab_network import TabNet

    options = {"n_d": 16, "n_a": 16, "n_steps": 4, "group_attention_matrix": torch.eye(32)}
    return Network(TabNet(32, 4, **options).train(), lambda size: (torch.randn(16 * size, 32),))
