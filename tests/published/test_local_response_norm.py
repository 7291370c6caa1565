"""Local response normalization as one operator: the numbers of PyTorch's own, and few bytes beside its results."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pooch.api.profiling import profile_workload
from pooch.devices import find_device
from pooch.published.models.local_response_norm import LocalResponseNorm
from pooch.workloads import WorkloadFactory


class Ops(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("channels", [7, 3, 1])
def test_it_is_pytorchs_own_with_alpha_per_channel(channels: int) -> None:
    ours, theirs = LocalResponseNorm(5, 1e-2, 0.75, 2.0), nn.LocalResponseNorm(5, alpha=5e-2, beta=0.75, k=2.0)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, channels, 4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(2, channels, 4, 3, generator=generator, dtype=torch.float64)
    found, expected = ours(inputs), theirs(inputs)
    torch.testing.assert_close(found, expected)
    (ours_gradient,) = torch.autograd.grad(found, inputs, gradient)
    (theirs_gradient,) = torch.autograd.grad(expected, inputs, gradient)
    torch.testing.assert_close(ours_gradient, theirs_gradient)
    assert torch.autograd.gradcheck(ours, (inputs,))


def test_it_is_one_operator_that_saves_its_input_alone() -> None:
    inputs = torch.randn(2, 7, 4, 3, requires_grad=True)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept), Ops() as ops:
        found = LocalResponseNorm(5, 1e-2, 0.75, 2.0)(inputs)
    assert ops.names == ["pooch_published.local_response_norm.default"]
    assert [tensor.data_ptr() for tensor in saved] == [inputs.data_ptr()]
    with Ops() as ops:
        found.backward(torch.ones_like(found))
    assert [name for name in ops.names if "pooch" in name] == ["pooch_published.local_response_norm_backward.default"]


def test_alexnet_needs_only_a_few_of_its_largest_maps_at_once() -> None:
    modelled = find_device("V100-PCIe")
    profile = profile_workload(WorkloadFactory("alexnet@small"), mode="fake", device_model=modelled)
    largest = max(value.allocated_bytes for value in profile.activations)
    backward = profile.ops[profile.forward_ops :]
    normalizations = [op for op in backward if "local_response_norm" in op.name]
    assert len(normalizations) == 2
    assert all(op.peak_bytes - op.entry_bytes <= largest for op in normalizations)
