"""The built-in workloads, small: each trains, is deterministic, and says what it is."""

from __future__ import annotations

import pytest
import torch

from pooch.workloads import BUILT_IN, Workload, load_workload

SMALL: dict[str, dict[str, int | float]] = {
    "resnet50": {"image_size": 32, "classes": 10},
    "gpt2": {"sequence_length": 16, "layers": 2, "width": 32, "heads": 2, "vocabulary": 100},
    "unet3d": {"volume_size": 32, "first_channels": 4, "residual_units": 1},
    "lstm": {"sequence_length": 8, "vocabulary": 50, "width": 16},
}


def small(name: str, **settings: int) -> Workload:
    if BUILT_IN[name].package:
        pytest.importorskip(BUILT_IN[name].package)
    return load_workload(name, batch_size=2, settings=SMALL[name] | settings)


def train(workload: Workload, steps: int = 2) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = workload.forward()
        loss.backward()
        assert workload.optimizer is not None
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_every_built_in_workload_has_a_small_version_here() -> None:
    assert set(SMALL) == set(BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_trains_and_the_weights_move(name: str) -> None:
    workload = small(name)
    assert (workload.name, workload.batch_size) == (name, 2)
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    losses = train(workload)
    assert all(loss == loss and abs(loss) < 1e4 for loss in losses)
    moved = [not torch.equal(old, new) for old, new in zip(before, workload.model.parameters(), strict=True)]
    assert any(moved)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_same_seed_gives_the_same_losses_and_another_seed_others(name: str) -> None:
    first = train(small(name))
    assert train(small(name)) == first
    assert train(small(name, seed=1)) != first


def test_resnet50_has_the_published_number_of_parameters_and_in_place_activations() -> None:
    workload = load_workload("resnet50", batch_size=1, settings={"image_size": 32})
    assert sum(parameter.numel() for parameter in workload.model.parameters()) == 25_557_032
    assert all(module.inplace for module in workload.model.modules() if isinstance(module, torch.nn.ReLU))
    strides = [block.conv2.stride for block in workload.model.layer2]  # type: ignore[union-attr]
    assert strides[0] == (2, 2)  # "version 1.5": the stride sits in the 3x3 convolution


def test_gpt2_has_the_published_number_of_parameters() -> None:
    pytest.importorskip("transformers")
    workload = load_workload("gpt2", batch_size=1, settings={"sequence_length": 8})
    assert sum(parameter.numel() for parameter in workload.model.parameters()) == 124_439_808


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", BUILT_IN)
def test_runs_on_the_gpu(name: str) -> None:
    workload = load_workload(name, batch_size=2, device="cuda", settings=SMALL[name])
    assert workload.forward().device.type == "cuda"
