"""What cuBLAS takes for itself in each thread is in fake profiles of a GPU, too."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import pooch
from pooch.devices import find_device
from pooch.ir import Profile
from pooch.profiler.fake.workspaces import separate_bytes
from pooch.torchtools.cuda_only import blas_workspace_bytes, forget_blas_workspaces, lt_workspace_bytes
from tests.executor.nets import Job
from tests.executor.support import profile_job
from tests.executor.test_peaks import measured_peak

SETTING = "CUBLAS_WORKSPACE_CONFIG"
MIB = 2**20
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def fake(model: nn.Module, rows: torch.Tensor, device: str) -> Profile:
    return pooch.profile(lambda: model(rows).sum(), model, mode="fake", device_model=find_device(device))


@pytest.mark.parametrize(
    ("device", "setting", "expected_bytes"),
    [
        ("V100-PCIe", None, 8.125 * MIB),
        ("H200", None, 32 * MIB),
        ("H200", ":16:8", MIB // 8),
        ("V100-PCIe", ":4096:2:16:8", 8.125 * MIB),
        ("V100-PCIe", "nonsense", 8.125 * MIB),
    ],
)
def test_each_pass_with_products_has_one(
    monkeypatch: pytest.MonkeyPatch, device: str, setting: str | None, expected_bytes: float
) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    if setting is not None:
        monkeypatch.setenv(SETTING, setting)
    frozen = nn.Linear(16, 16).requires_grad_(False)
    kinds: dict[str, tuple[nn.Module, int]] = {
        "none": (nn.Sequential(nn.LayerNorm(16), nn.GELU()), 0),
        "forward": (nn.Sequential(frozen, nn.LayerNorm(16)), 1),
        "both": (nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), 2),
    }
    rows = torch.rand(8, 16)  # 512 bytes
    gc.collect()
    others_bytes = None  # tensors that live in this process besides, such as those that earlier tests left
    for name, (model, count) in kinds.items():
        profile = fake(model, rows, device)
        parameters = sum(-(-p.numel() * 4 // 512) * 512 for p in model.parameters())
        others_bytes = profile.persistent_bytes - parameters if others_bytes is None else others_bytes
        beside_bytes = profile.persistent_bytes - parameters - others_bytes
        with_bias_bytes = separate_bytes() if count else 0  # in the forward pass alone
        assert beside_bytes == pytest.approx(count * expected_bytes + with_bias_bytes, abs=4096), name
        told = [note for note in profile.notes if "cuBLAS " in note]
        assert len(told) == (count > 0), name
        assert all(note.startswith(f"modelled: {count} cuBLAS") for note in told)


@pytest.mark.parametrize(
    ("version", "setting", "size", "expected_bytes"),
    [
        ("2.11.0+cu130", None, None, MIB),
        ("2.11.0+cu130", "1", None, 0),
        ("2.11.0+cu130", None, "2048", 2 * MIB),
        ("2.12.1", None, None, 0),
        ("2.14.1+cu130", "0", None, MIB),
    ],
)
def test_a_product_with_a_bias_may_have_another_one(
    monkeypatch: pytest.MonkeyPatch, version: str, setting: str | None, size: str | None, expected_bytes: int
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    for name, value in (("TORCH_CUBLASLT_UNIFIED_WORKSPACE", setting), ("CUBLASLT_WORKSPACE_SIZE", size)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert separate_bytes() == expected_bytes
    model, rows = nn.Linear(16, 16), torch.rand(8, 16)
    notes = fake(model, rows, "H200").notes
    assert [note for note in notes if "cuBLASLt" in note] == (
        [f"modelled: 1 cuBLASLt workspaces of {expected_bytes // MIB}.00 MiB (one thread) counted as persistent bytes"]
        if expected_bytes
        else []
    )


def job(device: torch.device) -> Job:
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU()).to(device)
    return Job(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        lambda generator: (torch.randn(8192, 256, generator=generator),),
        lambda net, batch: net(batch[0]).square().mean(),
        device,
    )


@pytest.mark.gpu
@on_a_gpu
def test_a_fake_profile_of_a_gpu_has_what_training_takes() -> None:
    device = torch.device("cuda", 0)
    each_bytes = blas_workspace_bytes(device)
    assert each_bytes >= MIB
    assert lt_workspace_bytes(device) == separate_bytes()
    trained = job(device)
    chosen = replace(find_device("V100-PCIe"), blas_workspace_mib=each_bytes / MIB)
    profile = pooch.profile(trained.forward, trained.model, trained.optimizer, mode="fake", device_model=chosen)
    assert measured_peak(trained, None) == pytest.approx(profile.peak_bytes, rel=0.005)
    assert profile_job(trained).persistent_bytes == pytest.approx(profile.persistent_bytes, abs=64 * 1024)
    again = pooch.profile(trained.forward, trained.model, trained.optimizer, mode="fake", device_model=chosen)
    assert again.persistent_bytes == pytest.approx(profile.persistent_bytes, abs=64 * 1024)  # and not counted twice


@pytest.mark.gpu
@on_a_gpu
def test_workspaces_that_are_given_back_are_taken_anew() -> None:
    device = torch.device("cuda", 0)
    each_bytes = blas_workspace_bytes(device)
    rows = torch.rand(64, 64, device=device)
    expected = rows @ rows
    before_bytes = torch.cuda.memory_allocated()
    forget_blas_workspaces()
    assert torch.cuda.memory_allocated() <= before_bytes - each_bytes
    assert torch.equal(rows @ rows, expected)
