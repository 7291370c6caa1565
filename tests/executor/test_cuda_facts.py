"""What is known of CUDA operators and of torch's profiler on a GPU, as far as it can be told without one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pooch.api.measure.hard_limit import exact_allocator
from pooch.errors import PlanMismatch
from pooch.executor import apply_plan
from pooch.executor.apply import refuse_unrepeatable
from pooch.ir import Plan
from pooch.profiler.device_times import _kernels_ms
from pooch.profiler.recorder import ForwardRecorder
from pooch.torchtools import determinism, operators
from pooch.torchtools.operators import call_refusal, operator_facts
from pooch.torchtools.tensors import has_plain_storage
from tests.executor.nets import make_job
from tests.executor.support import all_of, is_same, profile_job, quick_profile, tight_plan

ATEN = torch.ops.aten
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
    assert (call_refusal(CONVOLUTION, on("cuda" if is_cuda else "cpu")) is not None) == refused


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on(device: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Arguments of an op, of which only the first one and where it lies count here."""
    with FakeTensorMode():
        return (torch.empty(4, dtype=dtype, device=device),)


def transposed(device: str) -> tuple[Any, ...]:
    return tuple(on(device)[0] if a.name == "input" else a.name == "transposed" for a in CONVOLUTION._schema.arguments)


@pytest.mark.parametrize(
    "name", ["scatter_add", "index_put_", "index_add", "scatter_reduce", "embedding_dense_backward"]
)
def test_sums_in_any_order_are_replayed_on_a_gpu_in_deterministic_mode_alone(
    name: str, request: pytest.FixtureRequest
) -> None:
    packet = getattr(ATEN, name)
    func = getattr(packet, packet.overloads()[0])
    assert operator_facts(func).depends_on_call
    assert call_refusal(func, on("cpu")) is None
    assert "use_deterministic_algorithms(True)" in (call_refusal(func, on("cuda")) or "")
    request.getfixturevalue("deterministic")
    assert call_refusal(func, on("cuda")) is None


@pytest.mark.usefixtures("deterministic")
def test_what_has_no_deterministic_kernel_is_never_replayed_on_a_gpu() -> None:
    assert "no deterministic kernel" in (call_refusal(ATEN.histc.default, on("cuda")) or "")
    assert "no deterministic kernel" in (call_refusal(ATEN.cumsum.default, on("cuda")) or "")
    assert call_refusal(ATEN.cumsum.default, on("cuda", torch.int64)) is None
    assert call_refusal(ATEN.histc.default, on("cpu")) is None


def test_transposed_convolutions_are_replayed_in_deterministic_mode_alone(request: pytest.FixtureRequest) -> None:
    assert "transposed" in (call_refusal(CONVOLUTION, transposed("cuda")) or "")
    assert call_refusal(CONVOLUTION, transposed("cpu")) is None
    request.getfixturevalue("deterministic")
    assert call_refusal(CONVOLUTION, transposed("cuda")) is None


def test_every_operator_that_is_listed_exists() -> None:
    for name in determinism._ON_REQUEST | determinism._NEVER | determinism._NEVER_OF_FLOATS:
        assert torch._C._jit_get_schemas_for_operator(f"aten::{name}"), name


class Summed(nn.Module):
    """Rows added up where indices meet, then something that a plan recomputes from the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> Tensor:
        index = torch.arange(32).remainder(4)
        return torch.tanh(torch.zeros(4, 8).index_add(0, index, self.linear(rows).exp())).exp().sum()


def summing() -> tuple[Summed, Tensor, Plan]:
    torch.manual_seed(0)
    model, rows = Summed(), torch.rand(32, 8)
    profile = quick_profile(lambda: model(rows), model)
    plan = tight_plan(profile, all_of(profile, "recompute", "model"), "model")
    replayed = {plan.expected[a.target - plan.first_slot].name for a in plan.schedule.actions if a.kind == "replay"}
    assert "aten.index_add.default" in replayed
    return model, rows, plan


def test_a_plan_of_deterministic_mode_needs_it_when_it_is_applied(request: pytest.FixtureRequest) -> None:
    _, _, plan = summing()
    refuse_unrepeatable(plan, torch.device("cpu"))
    with pytest.raises(PlanMismatch, match=r"index_add.*use_deterministic_algorithms"):
        refuse_unrepeatable(plan, torch.device("cuda"))
    request.getfixturevalue("deterministic")
    refuse_unrepeatable(plan, torch.device("cuda"))


def test_a_step_without_the_deterministic_mode_of_its_plan_leaves_it_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, rows, plan = summing()
    model(rows).backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with apply_plan(plan, model) as run:
        monkeypatch.setattr(operators, "find_tensors", lambda _: on("cuda"))
        with pytest.warns(UserWarning, match=r"index_add.*use_deterministic_algorithms"):
            model(rows).backward()
        assert run.stats.mismatches == 1
    assert all(is_same(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True) if p.grad is not None)


def test_a_plan_that_replays_convolutions_needs_fixed_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job("conv")
    profile = profile_job(job)
    replaying, swapping = (tight_plan(profile, all_of(profile, choice)) for choice in ("recompute", "swap"))
    gpu = torch.device("cuda")
    refuse_unrepeatable(replaying, gpu)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    refuse_unrepeatable(swapping, gpu)
    refuse_unrepeatable(replaying, torch.device("cpu"))
    with pytest.raises(PlanMismatch, match="switch it off"):
        refuse_unrepeatable(replaying, gpu)


def test_kernel_times_leave_annotations_out() -> None:
    def event(name: str, kernels: list[tuple[str, float]], *children: Any) -> Any:
        launched = [SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels]
        return SimpleNamespace(name=name, kernels=launched, cpu_children=list(children))

    product = event("aten::mm", [("gemm", 700.0), ("split_k", 300.0)])
    marker = event("pooch:op 3", [("pooch:op 3", 1000.0)], event("aten::addmm", [], product))
    assert _kernels_ms(marker) == 1.0


@pytest.fixture
def meta_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets "meta" stand for a second device. Otherwise its tensors are no values, as nothing of them can be moved."""
    for user in ("torchtools.effects", "profiler.recorder"):
        monkeypatch.setattr(f"pooch.{user}.may_move", has_plain_storage)


@pytest.mark.usefixtures("meta_has_memory")
def test_ops_on_another_device_are_not_replayed() -> None:
    """In a backward pass on one device nobody orders the other's streams; here "meta" is the other device."""
    recorder = ForwardRecorder(nn.Linear(4, 4))
    with recorder:
        torch.empty(4, device="meta").cos()
        torch.rand(4).cos()
    assert [op.name for op in recorder.ops if "another device (meta)" in (op.refusal or "")] == [
        "aten.empty.memory_format",
        "aten.cos.default",
    ]
    assert [op.refusal for op in recorder.ops[2:]] == [None, None]


def test_random_numbers_of_another_device_are_not_drawn_again() -> None:
    """The state that is put back for a replay is that of the model's device."""
    recorder = ForwardRecorder(nn.Linear(4, 4, device="meta"))
    with recorder:
        torch.rand(4).cos()
    assert recorder.ops[0].random
    assert "random generator of another device" in (recorder.ops[0].refusal or "")
    assert recorder.ops[1].refusal is None


@pytest.mark.usefixtures("meta_has_memory")
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
    from pooch.executor.engines.measurement import noise

    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        assert noise(2**20, torch.device("cpu")).untyped_storage().nbytes() == 2**20
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(before, torch.get_rng_state())


def test_the_limited_process_gets_an_allocator_that_splits_exactly() -> None:
    assert exact_allocator({"HOME": "/"}) == {"HOME": "/", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    theirs = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert exact_allocator(theirs) == theirs
