"""What is known of CUDA operators and of torch's profiler on a GPU, as far as it can be told without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pooch.errors import PlanMismatch
from pooch.executor.run import _refuse_chosen_algorithms
from pooch.profiler.device_times import _kernels_ms
from pooch.profiler.recorder import ForwardRecorder
from pooch.session.hard_limit import exact_allocator
from pooch.torchtools.operators import call_refusal
from tests.executor.nets import make_job
from tests.executor.support import all_of, profile_job, quick_profile, tight_plan

RNN = torch.ops.aten._cudnn_rnn.default
CONVOLUTION = torch.ops.aten.convolution.default


def rnn_arguments(dropout: float, train: bool) -> tuple[Any, ...]:
    given = {"dropout": dropout, "train": train}
    return tuple(given.get(argument.name) for argument in RNN._schema.arguments)


def test_recurrent_dropout_of_cudnn_is_not_replayed() -> None:
    assert "state of its own" in (call_refusal(RNN, rnn_arguments(0.2, True)) or "")
    assert call_refusal(RNN, rnn_arguments(0.2, False)) is None
    assert call_refusal(RNN, rnn_arguments(0.0, True)) is None


@pytest.mark.parametrize(
    ("benchmark", "is_cuda", "refused"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_algorithms_chosen_by_timing_are_not_replayed(
    benchmark: bool, is_cuda: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    assert (
        call_refusal(CONVOLUTION, (SimpleNamespace(device=torch.device("cuda" if is_cuda else "cpu")),)) is not None
    ) == refused


def test_a_plan_that_replays_convolutions_needs_fixed_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job("conv")
    profile = profile_job(job)
    replaying, swapping = (tight_plan(profile, all_of(profile, choice)) for choice in ("recompute", "swap"))
    gpu = torch.device("cuda")
    _refuse_chosen_algorithms(replaying, gpu)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    _refuse_chosen_algorithms(swapping, gpu)
    _refuse_chosen_algorithms(replaying, torch.device("cpu"))
    with pytest.raises(PlanMismatch, match="switch it off"):
        _refuse_chosen_algorithms(replaying, gpu)


def test_kernel_times_leave_annotations_out() -> None:
    def event(name: str, kernels: list[tuple[str, float]], *children: Any) -> Any:
        launched = [SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels]
        return SimpleNamespace(name=name, kernels=launched, cpu_children=list(children))

    product = event("aten::mm", [("gemm", 700.0), ("split_k", 300.0)])
    marker = event("pooch:op 3", [("pooch:op 3", 1000.0)], event("aten::addmm", [], product))
    assert _kernels_ms(marker) == 1.0


def test_values_on_another_device_are_no_activations() -> None:
    """A value on the CPU in a model on a GPU must not come back onto the GPU; here "meta" is the other device."""
    model = torch.nn.Linear(64, 64)
    elsewhere = torch.ones(64, 64, device="meta", requires_grad=True)

    def forward() -> torch.Tensor:
        torch.tanh(elsewhere * 2)
        return torch.tanh(model(torch.ones(64, 64))).sum()

    recorder = ForwardRecorder(model)
    with recorder.path.watched(), recorder:
        forward()
    assert {value.elsewhere for value in recorder.values} == {"", "meta"}
    profile = quick_profile(forward, model)
    fixed = [value.fixed for value in profile.values if value.fixed and "another device (meta)" in value.fixed]
    assert len(fixed) == 2
    assert profile.activations


def test_measuring_a_link_leaves_random_state_and_default_dtype_alone() -> None:
    from pooch.executor.engines.measurement import _noise

    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        assert _noise(2**20, torch.device("cpu")).untyped_storage().nbytes() == 2**20
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(before, torch.get_rng_state())


def test_the_limited_process_gets_an_allocator_that_splits_exactly() -> None:
    assert exact_allocator({"HOME": "/"}) == {"HOME": "/", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    theirs = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert exact_allocator(theirs) == theirs
