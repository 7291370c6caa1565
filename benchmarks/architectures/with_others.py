"""Networks of smaller packages: Gaussian processes, differential equations, equivariant layers, operators."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures.made import Build, OptionalTable, randn, several, tokens
from benchmarks.architectures.network import Network

NETWORKS = OptionalTable()
names, network, needs = NETWORKS.names, NETWORKS.network, NETWORKS.needs
GRID = randn(3, 32, 32)


@needs("gpytorch", "exact")
def _exact_process() -> Network:
    import gpytorch

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, inputs: Tensor, targets: Tensor, likelihood: Any) -> None:
            super().__init__(inputs, targets, likelihood)
            self.mean, self.covariance = (
                gpytorch.means.ConstantMean(),
                gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel()),
            )

        def forward(self, inputs: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(inputs), self.covariance(inputs))

    inputs = torch.linspace(0, 1, 400)
    targets = torch.sin(6 * inputs) + 0.1 * torch.randn(400)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Exact(inputs, targets, likelihood).train()
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    return Network(model, lambda _: (inputs,), lambda output: -evidence(output, targets), fixed_size=True)


@needs("gpytorch", "variational")
def _variational_process() -> Network:
    import gpytorch

    class Variational(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            points = torch.rand(64, 4)
            distribution = gpytorch.variational.CholeskyVariationalDistribution(64)
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution))
            self.mean, self.covariance = (
                gpytorch.means.ConstantMean(),
                gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()),
            )

        def forward(self, inputs: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(inputs), self.covariance(inputs))

    model, likelihood = Variational().train(), gpytorch.likelihoods.GaussianLikelihood()
    evidence = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=1000)
    return Network(
        model, lambda size: (torch.rand(16 * size, 4),), lambda output: -evidence(output, output.mean.detach() + 1)
    )


class _Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

    def forward(self, time: Tensor, state: Tensor) -> Tensor:
        return self.layers(state) * (1 + time)


class _Flow(nn.Module):
    """A state that follows a field that is learned."""

    def __init__(self, method: str, with_adjoint: bool) -> None:
        super().__init__()
        self.field, self.method, self.with_adjoint = _Field(), method, with_adjoint

    def forward(self, state: Tensor) -> Tensor:
        import torchdiffeq

        solve = torchdiffeq.odeint_adjoint if self.with_adjoint else torchdiffeq.odeint
        return solve(self.field, state, torch.linspace(0, 1, 8), method=self.method, rtol=1e-3, atol=1e-4)[-1]


def _flow(method: str, with_adjoint: bool) -> Build:
    return lambda: Network(_Flow(method, with_adjoint), lambda size: (torch.randn(16 * size, 32),))


for _method in ("rk4", "dopri5", "midpoint", "implicit_adams"):
    needs("torchdiffeq", _method)(_flow(_method, False))
needs("torchdiffeq", "dopri5-adjoint")(_flow("dopri5", True))


@needs("e3nn", "gates")
def _gates() -> Network:
    from e3nn import o3
    from e3nn.nn import Gate

    class Layered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            gate = [Gate("8x0e", [torch.tanh], "8x0e", [torch.sigmoid], "8x1o") for _ in range(3)]
            self.gates = nn.ModuleList(gate)
            inputs = ["8x0e+4x1o", *[each.irreps_out for each in gate[:-1]]]
            self.linears = nn.ModuleList(
                o3.FullyConnectedTensorProduct(one, "1x0e+1x1o", each.irreps_in)
                for one, each in zip(inputs, gate, strict=True)
            )

        def forward(self, features: Tensor, directions: Tensor) -> Tensor:
            harmonics = o3.spherical_harmonics("1x0e+1x1o", directions, normalize=True)
            for linear, gate in zip(self.linears, self.gates, strict=True):
                features = gate(linear(features, harmonics))
            return features

    return Network(Layered().train(), lambda size: (torch.randn(32 * size, 20), torch.randn(32 * size, 3)))


def _of_neuraloperator(name: str, batch: Any, **options: Any) -> None:
    def build() -> Network:
        import neuralop.models as models

        return Network(getattr(models, name)(**options).train(), batch)

    needs("neuralop", name)(build)


_WIDTHS = {"in_channels": 3, "out_channels": 2, "hidden_channels": 16, "n_layers": 3}
_of_neuraloperator("FNO", GRID, n_modes=(8, 8), **_WIDTHS)
_of_neuraloperator("TFNO", GRID, n_modes=(8, 8), factorization="tucker", rank=0.5, **_WIDTHS)
_of_neuraloperator(
    "UNO", GRID, in_channels=3, out_channels=2, hidden_channels=16, uno_out_channels=[16, 16, 16], n_layers=3,
    uno_n_modes=[[8, 8], [4, 4], [8, 8]], uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]], channel_mlp_skip="linear",
)  # fmt: skip


def _of(package: str, module: str, class_name: str, batch: Any, **options: Any) -> None:
    def build() -> Network:
        made = getattr(importlib.import_module(module), class_name)(**options)
        return Network(made.train(), batch)

    needs(package, class_name)(build)


_of("mlp_mixer_pytorch", "mlp_mixer_pytorch", "MLPMixer", randn(3, 64, 64), image_size=64, channels=3, patch_size=8,
    dim=64, depth=4, num_classes=10, dropout=0.1)  # fmt: skip
_of("perceiver_pytorch", "perceiver_pytorch", "Perceiver", randn(32, 32, 3), num_freq_bands=6, depth=2, max_freq=10.0,
    num_latents=32, latent_dim=64, cross_dim_head=16, latent_dim_head=16, num_classes=10)  # fmt: skip
_of("soft_moe_pytorch", "soft_moe_pytorch", "SoftMoE", randn(64, 64), dim=64, seq_len=64, num_experts=4)
_of("vector_quantize_pytorch", "vector_quantize_pytorch", "VectorQuantize", randn(64, 32), dim=32, codebook_size=32,
    learnable_codebook=True, ema_update=False)  # fmt: skip
_of("vector_quantize_pytorch", "vector_quantize_pytorch", "FSQ", randn(64, 32), levels=[8, 5, 5, 5], dim=32)
_of("vector_quantize_pytorch", "vector_quantize_pytorch", "ResidualVQ", randn(64, 32), dim=32, codebook_size=32,
    num_quantizers=3, learnable_codebook=True, ema_update=False)  # fmt: skip


class _Local(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from local_attention import LocalTransformer

        self.transformer = LocalTransformer(num_tokens=128, dim=64, depth=3, heads=4, dim_head=16, max_seq_len=128,
                                            local_attn_window_size=16, causal=True)  # fmt: skip

    def forward(self, text: Tensor) -> Tensor:
        return self.transformer(text, return_loss=True)


needs("local_attention", "LocalTransformer")(lambda: Network(_Local().train(), tokens(128, 128)))

_of("nystrom_attention", "nystrom_attention", "Nystromformer", randn(64, 64), dim=64, depth=3, dim_head=16, heads=4,
    num_landmarks=16)  # fmt: skip
_of("conformer", "conformer", "Conformer", randn(64, 64), dim=64, depth=3, dim_head=16, heads=4, ff_dropout=0.1)
_of("g_mlp_pytorch", "g_mlp_pytorch", "gMLP", tokens(64, 128), num_tokens=128, dim=64, depth=4, seq_len=64)
_of("siren_pytorch", "siren_pytorch", "SirenNet", randn(64, 2), dim_in=2, dim_hidden=64, dim_out=3, num_layers=5)
_of("rtdl_revisiting_models", "rtdl_revisiting_models", "ResNet", randn(64), d_in=64, d_out=4, n_blocks=4, d_block=64,
    d_hidden=None, d_hidden_multiplier=2.0, dropout1=0.2, dropout2=0.1)  # fmt: skip
_of("product_key_memory", "product_key_memory", "PKM", randn(64, 64), dim=64, heads=2, num_keys=32, topk=8, dim_head=32)
_of("lambda_networks", "lambda_networks", "LambdaLayer", randn(32, 16, 16), dim=32, dim_k=8, r=7, heads=4)
_of("egnn_pytorch", "egnn_pytorch", "EGNN_Network", several(tokens(32, 21), randn(32, 3)), num_tokens=21,
    num_positions=32, dim=32, depth=3, num_nearest_neighbors=8, coor_weights_clamp_value=2.0)  # fmt: skip
