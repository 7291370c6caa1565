"""Steps modelled for a device that is not here: what is priced, and that it is marked everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import pooch
from pooch.api.measure.comparison import compare
from pooch.api.profiling import profile_workload
from pooch.devices import DeviceModel, LinkModel, find_device
from pooch.errors import UsageError
from pooch.ir import Profile
from pooch.ir.consistency import check_profile
from pooch.profiler.fake.flops import moved_bytes, operations
from pooch.profiler.fake.kernels import sized_workspaces
from pooch.report.curves import profile_title
from pooch.report.summaries import comparison_record, plan_record, profile_record
from pooch.report.tables import comparison_table, plan_table, profile_table
from pooch.workloads import Workload, WorkloadFactory

aten = torch.ops.aten
DEVICE = DeviceModel("plain", "a plain card", "cuda", 2**34, {"float32": 10.0}, 100.0, LinkModel("wire", 10.0, 5.0))


def modelled(layers: int = 6, rows: int = 4096) -> Profile:
    def build() -> Workload:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(layers)])
        data = torch.rand(rows, 256)
        return Workload(model, lambda: model(data).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), "mlp")

    return profile_workload(build, device_model=DEVICE)


def shown(table: Any) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_it_is_marked_as_modelled_in_files_tables_and_pictures(tmp_path: Path) -> None:
    profile = modelled()
    profile.save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json")
    assert loaded == profile
    assert check_profile(loaded) is None
    assert loaded.device.modelled
    assert loaded.mode == "fake"
    assert profile_record(profile)["modelled"] is True
    assert "a plain card (cuda, modelled)" in shown(profile_table(profile))
    assert "(modelled, not measured)" in shown(profile_table(profile))
    assert profile_title(profile).endswith("(modelled)")
    plan = pooch.plan(profile, "70%")
    plan.save(tmp_path / "plan.json")
    assert plan_record(pooch.Plan.load(tmp_path / "plan.json"))["modelled"] is True
    assert "(modelled, not measured)" in shown(plan_table(plan))
    rows = compare(profile, ["80%"], policies=["swap_all"])
    assert "times are modelled" in shown(comparison_table(rows))
    assert all(record["modelled"] is True for record in map(comparison_record, rows) if record["feasible"])


def test_times_are_those_of_the_roofline() -> None:
    profile = modelled(layers=1)
    product = next(op for op in profile.ops if op.name == "aten.addmm.default")
    flops, moved = 2 * 4096 * 256 * 256, 4 * (2 * 4096 * 256 + 256 * 256 + 256)
    assert product.time_ms == pytest.approx(DEVICE.op_ms(flops, moved, "float32", "matmul"))
    gelu = next(op for op in profile.ops if op.name == "aten.gelu.default")
    assert gelu.time_ms == pytest.approx(DEVICE.op_ms(0, 2 * 4096 * 256 * 4, "float32", "matmul"))
    assert profile.step_ms == pytest.approx(sum(op.time_ms for op in profile.ops))
    assert profile.link == DEVICE.as_link()


def test_a_card_rounds_what_it_allocates() -> None:
    profile = modelled(layers=1, rows=3)
    assert all(value.allocated_bytes % 512 == 0 for value in profile.values if value.role == "made")
    assert any(value.size_bytes % 512 for value in profile.values if value.role == "made")


def test_a_device_model_runs_nothing() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match="mode 'run' runs the step"):
        pooch.profile(lambda: model(torch.rand(2, 4)).sum(), model, mode="run", device_model=DEVICE)


def test_faster_devices_take_less_time_and_the_same_bytes() -> None:
    factory = WorkloadFactory("resnet50", batch_size=128, settings={"image_size": 64})
    slow, fast = (profile_workload(factory, device_model=find_device(name)) for name in ("M40", "H100"))
    assert slow.step_ms > 3 * fast.step_ms
    assert [op.peak_bytes for op in slow.ops] == [op.peak_bytes for op in fast.ops]
    assert slow.link.out_bytes_per_ms < fast.link.out_bytes_per_ms


def test_a_gpu_that_is_not_here_gets_the_ops_of_the_processor() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here, so its own ops are taken")
    factory = replace(WorkloadFactory("lstm", batch_size=2, settings={"width": 32}), device="cuda")
    profile = profile_workload(factory, device_model=DEVICE)
    assert profile.device.kind == "cuda"
    assert profile.notes[0].startswith("ops are those of the CPU")


@pytest.mark.parametrize("sizes", [(1, 1, 16, 16), (7, 3, 65, 40), (5, 2, 40, 64), (4, 4, 256, 256), (2, 3, 300, 512)])
def test_the_workspace_of_a_recurrent_layer_is_the_real_one(sizes: tuple[int, ...]) -> None:
    steps, batch, width, hidden = sizes
    rows = torch.rand(steps, batch, width)
    weights = [torch.rand(4 * hidden, width), torch.rand(4 * hidden, hidden), *torch.rand(2, 4 * hidden)]
    states = [torch.rand(batch, hidden) for _ in range(2)]
    arguments = (rows, *weights, *states, False, [], 2, hidden, 1, True, False, False, True)
    real = aten.mkldnn_rnn_layer(*arguments)
    sized = sized_workspaces(aten.mkldnn_rnn_layer.default, arguments, (*real[:3], real[3][:0]))
    assert sized[3].numel() == real[3].numel()


def test_operations_and_traffic() -> None:
    left, right = torch.rand(8, 16), torch.rand(16, 4)
    product = left @ right
    assert operations(aten.mm.default, (left, right), {}, product) == 2 * 8 * 16 * 4
    assert moved_bytes(aten.mm.default, (left, right), {}, product) == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert moved_bytes(aten.add.Tensor, (left, left), {}, left) == 4 * 2 * 8 * 16  # read once, written once
    assert moved_bytes(aten.mul.Tensor, (left[:, :1].expand(8, 16), left), {}, left) == 4 * (8 + 2 * 8 * 16)
    table, rows = torch.rand(1000, 16), torch.zeros(4, dtype=torch.long)
    assert moved_bytes(aten.embedding.default, (table, rows), {}, table[rows]) == 2 * 4 * 16 * 4
    assert moved_bytes(aten.empty_like.default, (table,), {}, table) == 0
