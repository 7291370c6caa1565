"""From PyTorch to a file, trained under a plan with the same bits as plainly, and back into one that infers alike."""

from __future__ import annotations

from pathlib import Path

import numpy
import onnx
import pytest
import torch

from pooch.api.measure.training import first_difference, train_steps
from pooch.errors import WorkloadError
from pooch.onnx.exporting import export_trained
from pooch.workloads import Workload, load_workload
from tests.executor.support import mixed, planned_replays, quick_profile, tight_plan
from tests.onnx.nets import NETS, ConvNet, Exported
from tests.onnx.support import run_onnxruntime

Stored = tuple[Exported, Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx")


def saved(name: str, folder: Path) -> Path:
    """Exported once: PyTorch's exporter takes seconds."""
    path = folder / f"{name}.onnx"
    return path if path.exists() else NETS[name].save(path)


@pytest.fixture(scope="module", params=list(NETS))
def exported(request: pytest.FixtureRequest, folder: Path) -> Stored:
    return NETS[request.param], saved(request.param, folder)


@pytest.fixture(scope="module")
def conv_file(folder: Path) -> Path:
    return saved("convolutions", folder)


def load(exported: Stored, **settings: int | float | str) -> Workload:
    net, path = exported
    return load_workload(str(path), batch_size=net.batch, settings=settings)


def silent(text: str) -> None:
    """Nobody is told."""


def arrays(path: Path) -> dict[str, numpy.ndarray]:
    return {stored.name: onnx.numpy_helper.to_array(stored) for stored in onnx.load(path).graph.initializer}


@pytest.mark.slow
def test_trained_under_a_plan_and_written_back(exported: Stored, tmp_path: Path) -> None:
    net, source = exported
    plain, planned = load(exported, learning_rate=0.1), load(exported, learning_rate=0.1)
    assert len(list(plain.model.parameters())) == net.parameters
    profile = quick_profile(planned.forward, planned.model, planned.optimizer)
    plan = tight_plan(profile, mixed(profile))
    assert planned_replays(plan) > 0
    trained = train_steps(planned, plan, 2, silent)
    assert trained.stats is not None
    assert trained.stats.recomputed_ops > 0
    assert trained.stats.swapped_out_bytes > 0
    assert trained.stats.mismatches == 0
    assert first_difference(train_steps(plain, None, 2, silent), trained) is None

    target = tmp_path / "trained.onnx"
    report = export_trained(planned, target)
    assert report.is_same
    assert report.largest_output > 0
    before, after = onnx.load(source), onnx.load(target)
    assert after.graph.input[0] == before.graph.input[0]  # an open batch stays open
    state = dict(planned.model.named_parameters()) | dict(planned.model.named_buffers())
    old, new = arrays(source), arrays(target)
    assert old.keys() == new.keys()
    for name, path in planned.model.stored.items():
        torch.testing.assert_close(torch.tensor(new[name]), state[path].detach(), rtol=0, atol=0)
    assert sum(not numpy.array_equal(old[name], new[name]) for name in old) >= net.parameters - 2


def test_the_export_infers_although_the_file_trains(conv_file: Path, tmp_path: Path) -> None:
    workload = load((NETS["convolutions"], conv_file))
    export_trained(workload, tmp_path / "out.onnx")
    norms = [node for node in onnx.load(tmp_path / "out.onnx").graph.node if node.op_type == "BatchNormalization"]
    assert len(norms) == 3
    assert all(len(node.output) == 1 for node in norms)
    images = numpy.random.default_rng(0).normal(size=(4, 3, 12, 12)).astype("float32")
    one, all_of_them = (run_onnxruntime(tmp_path / "out.onnx", {"images": each})[0] for each in (images[:1], images))
    torch.testing.assert_close(one, all_of_them[:1])  # statistics of the batch would make these differ
    assert workload.model.training


def test_statistics_move_as_in_the_exported_model(conv_file: Path) -> None:
    torch.manual_seed(0)
    source = ConvNet().train()
    for module in source.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    images = torch.randn(6, 3, 12, 12)
    workload = load((NETS["convolutions"], conv_file))
    source(images)
    workload.model(images)
    state = dict(workload.model.named_buffers())
    for name, buffer in source.named_buffers():
        if "running" in name:
            torch.testing.assert_close(state[workload.model.stored[name]], buffer)


@pytest.mark.parametrize(("mode", "changes"), [("exported", True), ("train", True), ("eval", False)])
def test_the_mode_decides_whether_statistics_move(conv_file: Path, mode: str, changes: bool) -> None:
    workload = load((NETS["convolutions"], conv_file), mode=mode)
    before = {name: buffer.clone() for name, buffer in workload.model.named_buffers()}
    first, second = (workload.forward() for _ in range(2))
    moved = any(not torch.equal(before[name], buffer) for name, buffer in workload.model.named_buffers())
    assert moved is changes
    assert torch.equal(first, second) is not changes  # dropout draws anew where it trains


def test_any_other_model_goes_through_pytorchs_exporter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, images = ConvNet(), torch.randn(4, 3, 12, 12)
    workload = Workload(model, lambda: model(images).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    train_steps(workload, None, 1, silent)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = export_trained(workload, tmp_path / "out.onnx")
    assert report.is_same
    assert report.outputs == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [each.name for each in tmp_path.iterdir()] == ["out.onnx"]


def test_a_difference_is_seen(conv_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pooch.onnx import exporting

    run_file = exporting._run_file
    monkeypatch.setattr(
        exporting, "_run_file", lambda *a, **b: [[each * 1.01 for each in run] for run in run_file(*a, **b)]
    )
    report = export_trained(load((NETS["convolutions"], conv_file)), tmp_path / "out.onnx")
    assert not report.is_same
    assert report.relative_difference == pytest.approx(0.01, rel=0.01)


def test_a_file_that_changed_meanwhile_is_not_written_back(conv_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(conv_file.read_bytes())
    workload = load_workload(str(path))
    path.write_bytes(path.read_bytes() + b"\x00\x00")
    with pytest.raises(WorkloadError, match=r"changed while its model was trained"):
        export_trained(workload, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_a_frozen_weight_stays_and_is_no_parameter(conv_file: Path, tmp_path: Path) -> None:
    workload = load((NETS["convolutions"], conv_file), freeze="blocks.*", learning_rate=0.5)
    names = {name for name, _ in workload.model.named_parameters()}
    assert names == {"stem.weight", "stem.bias", "head.weight", "head.bias"}
    train_steps(workload, None, 1, silent)
    export_trained(workload, tmp_path / "out.onnx")
    old, new = arrays(conv_file), arrays(tmp_path / "out.onnx")
    assert numpy.array_equal(old["blocks.0.0.weight"], new["blocks.0.0.weight"])
    assert not numpy.array_equal(old["stem.weight"], new["stem.weight"])
