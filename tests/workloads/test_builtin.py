"""The built-in workloads, small: each trains, is deterministic, and says what it is."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from pooch.errors import FileFormatError, UsageError
from pooch.ground.reading import packaged_tables
from pooch.ir.validation import checked_entry
from pooch.workloads import Workload, built_in_workloads, catalogue, load_workload, workload_growth
from pooch.workloads.catalogue import FILE
from pooch.workloads.models.resnet import blocks_of
from pooch.workloads.registry import BuiltIn, Preset

SMALL = "small"
SIZES = [(entry, preset) for entry in built_in_workloads().values() for preset in entry.presets]
SMALL_NAMES = [f"{entry.name}@{preset.name}" for entry, preset in SIZES if preset.name.startswith(SMALL)]


def small(name: str, **settings: int) -> Workload:
    package = built_in_workloads()[name.partition("@")[0]].package
    if package:
        pytest.importorskip(package)
    return load_workload(name, settings=settings)


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


@pytest.mark.parametrize("name", built_in_workloads())
def test_every_built_in_workload_has_a_small_version(name: str) -> None:
    assert f"{name}@{SMALL}" in SMALL_NAMES


@pytest.mark.parametrize("package", ["pooch.workloads.models", "pooch.published.models"])
def test_fields_of_the_tables_have_their_types(package: str) -> None:
    for entry in packaged_tables(package, FILE)["workloads"]:
        checked_entry(BuiltIn, entry, FILE)


def test_a_fault_in_the_table_of_workloads_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"name": "own", "summary": "mine", "module": "own", "growths": [], "presets": []}
    for changed, complaint in (
        ({"size": 3}, "unexpected keyword argument 'size'"),
        ({"growths": [{"setting": "a", "size": 3}]}, "unexpected keyword argument 'size'"),
        ({"presets": [{"name": "a"}]}, "missing 2 required positional arguments: 'settings' and 'note'"),
    ):
        tables = {"workloads": [entry | changed]}
        monkeypatch.setattr(catalogue, "packaged_tables", lambda package, name, tables=tables: tables)
        with pytest.raises(FileFormatError, match=rf"^workloads\.toml of own: [^\n]*{complaint}: correct it$"):
            catalogue.packaged_workloads("own")
    with pytest.raises(FileFormatError, match=r"^f\.toml: module: input should be a valid string: correct it$"):
        checked_entry(BuiltIn, entry | {"module": 3}, "f.toml")
    with pytest.raises(FileFormatError, match=r"^gone\.toml of pooch\.workloads cannot be read"):
        packaged_tables("pooch.workloads", "gone.toml")


@pytest.mark.parametrize("name", SMALL_NAMES)
def test_trains_and_the_weights_move(name: str) -> None:
    workload = small(name)
    assert workload.name == name.partition("@")[0] or name.startswith("resnet@")
    assert workload.batch_size > 0
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    losses = train(workload)
    assert all(loss == loss and abs(loss) < 1e4 for loss in losses)
    moved = [not torch.equal(old, new) for old, new in zip(before, workload.model.parameters(), strict=True)]
    assert all(moved)


@pytest.mark.parametrize("name", SMALL_NAMES)
def test_the_same_seed_gives_the_same_losses_and_another_seed_others(name: str) -> None:
    def losses(caller: int, **settings: int) -> list[float]:
        torch.manual_seed(caller)  # what was drawn before is no matter for the build
        workload = small(name, **settings)
        torch.manual_seed(9)  # of dropout, while it trains
        return train(workload, 1)

    first = losses(7)
    assert losses(8) == first
    assert losses(7, seed=1) != first


PARAMETERS = {
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet200": 64_673_832,
    "alexnet": 62_378_344,
    "inception_v3": 27_161_264,
    "vit": 86_567_656,
    "gpt2": 124_439_808,
    "gpt2@xl": 1_557_611_200,
    "llama@7b": 6_738_415_616,
}


def _name(entry: BuiltIn, preset: Preset) -> str:
    return f"{entry.name}@{preset.name}"


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_numbers_of_parameters(name: str) -> None:
    pytest.importorskip(built_in_workloads()[name.partition("@")[0]].package or "torch")
    with FakeTensorMode():
        workload = load_workload(name, batch_size=1)
    assert sum(parameter.numel() for parameter in workload.model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", [_name(*pair) for pair in SIZES if not pair[1].name.startswith(SMALL)])
def test_published_sizes_are_built_from_fake_tensors(name: str) -> None:
    pytest.importorskip(built_in_workloads()[name.partition("@")[0]].package or "torch")
    with FakeTensorMode():
        workload = load_workload(name)
    assert workload.batch_size == next(p for e, p in SIZES if _name(e, p) == name).settings["batch_size"]


def test_resnet_has_in_place_activations_and_the_stride_in_the_3x3_convolution() -> None:
    workload = small("resnet50@small")
    assert all(module.inplace for module in workload.model.modules() if isinstance(module, torch.nn.ReLU))
    strides = [block.conv2.stride for block in workload.model.layer2]  # type: ignore[union-attr]
    assert strides[0] == (2, 2)


@pytest.mark.parametrize("depth", [26, 50, 101, 152, 200, 1001, 2000])
def test_blocks_add_up_to_the_depth(depth: int) -> None:
    blocks = blocks_of(depth)
    assert 3 * sum(blocks) + 2 == depth
    assert blocks[0] == blocks[3] == 3


@pytest.mark.parametrize("depth", [0, 23, 1000])
def test_depths_that_no_resnet_has(depth: int) -> None:
    with pytest.raises(UsageError, match=r"it must be 3 n \+ 2"):
        blocks_of(depth)


def test_the_unrolled_lstm_computes_what_the_fused_one_does() -> None:
    from pooch.workloads.models.recurrent import UnrolledLstm

    torch.manual_seed(0)
    fused = torch.nn.LSTM(5, 8, 2, batch_first=True)
    unrolled = UnrolledLstm(5, 8, 2)
    order = [0, 1, 3, 2]  # ours has the candidate last, PyTorch's has it third
    with torch.no_grad():
        for number, cell in enumerate(unrolled.cells):
            for linear, kind in ((cell.from_input, "ih"), (cell.from_state, "hh")):
                for name in ("weight", "bias"):
                    chunks = getattr(fused, f"{name}_{kind}_l{number}").chunk(4)
                    getattr(linear, name).copy_(torch.cat([chunks[i] for i in order]))
    inputs = torch.randn(3, 6, 5)
    (expected, (hidden, _)), (actual, last) = fused(inputs), unrolled(inputs)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(last[1][0], hidden[1])


def test_each_network_of_the_gan_gets_the_gradient_of_its_own_loss() -> None:
    workload = small("gan@small")
    model = workload.model
    torch.manual_seed(3)
    workload.forward().backward()
    together = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    losses = []
    for number in range(3):
        for parameter in model.parameters():
            parameter.grad = None
        torch.manual_seed(3)
        logits = model(torch.zeros_like(_images(workload)) + _images(workload))
        target = torch.zeros_like(logits[number]) if number == 1 else torch.ones_like(logits[number])
        torch.nn.functional.binary_cross_entropy_with_logits(logits[number], target).backward()
        losses.append([p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in model.parameters()])
    names = [name.partition(".")[0] for name, _ in model.named_parameters()]
    for name, whole, real, fake, fooled in zip(names, together, *losses, strict=True):
        torch.testing.assert_close(whole, fooled if name == "generator" else real + fake)
        assert not (real + fake).any() if name == "generator" else not fooled.any()


def _images(workload: Workload) -> torch.Tensor:
    cells = dict(zip(workload.forward.__code__.co_freevars, workload.forward.__closure__, strict=True))  # type: ignore[attr-defined]
    found: torch.Tensor = cells["images"].cell_contents
    return found


def test_what_grows() -> None:
    assert workload_growth("resnet50").setting == "batch_size"
    assert workload_growth("unet3d@tflms-144", "volume_size").step == 16
    assert workload_growth("mine.py:make", "length").step == 1
    with pytest.raises(UsageError, match="choose batch_size, sequence_length, layers"):
        workload_growth("gpt2", "image_size")


@pytest.mark.gpu
@pytest.mark.any_kernels
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", SMALL_NAMES)
def test_runs_on_the_gpu(name: str) -> None:
    workload = load_workload(name, device="cuda")
    assert workload.forward().device.type == "cuda"
